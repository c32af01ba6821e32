"""Which architectures keep documents apart: tested on tiny random models."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from stages.artifacts.errors import StageError
from stages.training import document_mask
from stages.training.params import TrainParams
from tests.models import CONFIGS, manifest_of
from tests.project import Project
from tests.ranks import Ranks

APART = ["llama", "gpt2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox", "mixtral"]


@pytest.mark.parametrize("attention", [None, "eager"])  # None: sdpa, in all but Gemma 2
@pytest.mark.parametrize("name", APART)
def test_documents_are_kept_apart(params: TrainParams, name: str, attention: str | None) -> None:
    assert not document_mask.leaks_documents(AutoConfig.for_model(name), params, attention)


@pytest.mark.parametrize("name", ["opt", "falcon", "bloom"])
def test_architectures_that_ignore_positions_are_refused(params: TrainParams, tmp_path: Path, name: str) -> None:
    small = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 101}
    config = AutoConfig.for_model(name, **small)
    config.save_pretrained(tmp_path)
    manifest = manifest_of(tmp_path, with_weights=False)
    with pytest.raises(StageError, match="lets tokens attend to other documents: set document_mask to false"):
        document_mask.check_document_mask(manifest, params)
    document_mask.check_document_mask(manifest, dataclasses.replace(params, document_mask=False))


def test_tiny_config_has_a_layer_of_each_kind() -> None:
    config = transformers.Gemma3TextConfig(head_dim=64)
    tiny = document_mask.tiny_config(config)
    assert tiny.layer_types == ["sliding_attention", "full_attention"]
    assert (tiny.num_hidden_layers, tiny.hidden_size, tiny.vocab_size) == (2, 128, 64)
    assert config.num_hidden_layers == 26


def test_a_model_that_cannot_be_tested_is_refused(
    params: TrainParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    manifest = manifest_of(tmp_path, with_weights=False)
    monkeypatch.setattr(document_mask, "_logits", lambda *_: torch.zeros(2, 16, 64))
    with pytest.raises(StageError, match="cannot determine whether LlamaForCausalLM keeps documents apart"):
        document_mask.check_document_mask(manifest, params)


def test_training_starts_with_the_check(training: Project, ranks: Ranks) -> None:
    config = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "vocab_size": 4096, "hidden_size": 16,
              "ffn_dim": 32, "word_embed_proj_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
              "eos_token_id": 0, "bos_token_id": 0}  # fmt: skip
    (training / "models/nano/config.json").write_text(json.dumps(config))
    training.run("python", "-m", "stages.download")
    output = ranks.run(training, status=2)
    assert "OPTForCausalLM lets tokens attend to other documents: set document_mask to false" in output
    assert "Traceback" not in output
