"""Which architectures keep documents apart: found out by trying, on small random copies."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from stages.artifacts import params
from stages.artifacts.command import StageError
from stages.training import probe
from stages.training.params import TrainParams
from tests.conftest import REPO, Project, Ranks
from tests.models import CONFIGS, manifest_of

APART = ["llama", "gpt2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox", "mixtral"]


@pytest.fixture(scope="module")
def train_params() -> TrainParams:
    return params.load(TrainParams, path=REPO / "params.yaml")


@pytest.mark.parametrize("attention", [None, "eager"])  # None: sdpa, in all but Gemma 2
@pytest.mark.parametrize("name", APART)
def test_documents_are_kept_apart(train_params: TrainParams, name: str, attention: str | None) -> None:
    assert not probe.leaks_documents(AutoConfig.for_model(name), train_params, attention)


@pytest.mark.parametrize("name", ["opt", "falcon", "bloom"])
def test_architectures_that_ignore_positions_are_refused(train_params: TrainParams, tmp_path: Path, name: str) -> None:
    small = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 101}
    config = AutoConfig.for_model(name, **small)
    config.save_pretrained(tmp_path)
    manifest = manifest_of(tmp_path, with_weights=False)
    with pytest.raises(StageError, match="lets tokens attend to other documents: set document_mask to false"):
        probe.check(manifest, train_params)
    probe.check(manifest, dataclasses.replace(train_params, document_mask=False))


def test_a_copy_has_a_layer_of_each_kind() -> None:
    config = transformers.Gemma3TextConfig(head_dim=64)
    copy = probe.shrunk(config)
    assert copy.layer_types == ["sliding_attention", "full_attention"]
    assert (copy.num_hidden_layers, copy.hidden_size, copy.vocab_size) == (2, 128, 64)
    assert config.num_hidden_layers == 26


def test_what_cannot_be_tried_is_refused(
    train_params: TrainParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    manifest = manifest_of(tmp_path, with_weights=False)
    monkeypatch.setattr(probe, "_logits", lambda *_: torch.zeros(2, 16, 64))
    with pytest.raises(StageError, match="cannot find out whether LlamaForCausalLM keeps documents apart"):
        probe.check(manifest, train_params)


def test_training_begins_with_the_probe(training: Project, ranks: Ranks) -> None:
    config = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "vocab_size": 4096, "hidden_size": 16,
              "ffn_dim": 32, "word_embed_proj_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
              "eos_token_id": 0, "bos_token_id": 0}  # fmt: skip
    (training / "models/nano/config.json").write_text(json.dumps(config))
    training.run("python", "-m", "stages.download")
    output = ranks.run(training, status=2)
    assert "OPTForCausalLM lets tokens attend to other documents: set document_mask to false" in output
    assert "Traceback" not in output
