"""What `plan` refuses before a training is launched; it imports no torch."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from stages import plan
from stages.artifacts.errors import StageError
from stages.model.manifest import ModelManifest
from stages.tokens.packed import PackedTokens
from stages.training.params import TrainParams
from tests.models import CONFIGS, manifest_of

ROWS = PackedTokens(digests={}, fingerprint="", num_rows=96, seq_length=32)


@pytest.fixture
def llama(tmp_path: Path) -> ModelManifest:
    CONFIGS["llama"].save_pretrained(tmp_path)
    return manifest_of(tmp_path, with_weights=False)


def estimate(params: TrainParams, model: ModelManifest, **changes: Any) -> plan.Plan:
    return plan.estimate(dataclasses.replace(params, **changes), model, ROWS, ROWS)


@pytest.mark.parametrize("num_ranks", [None, 1, 2, 3, 4])
def test_proposed_numbers_of_rows_are_accepted(params: TrainParams, num_ranks: int | None) -> None:
    changed = dataclasses.replace(params, batch_size=3, total_batch_size=16)
    with pytest.raises(StageError) as error:
        plan.check_num_ranks(changed, num_ranks)
    _, _, proposals = str(error.value).partition(": use ")
    found = re.findall(r"(\d+)(?: or (\d+))?(?: for (\d) rank|,)", proposals)
    assert len(found) >= (1 if num_ranks else 4)
    for *totals, ranks in found:
        for total in filter(None, totals):
            accepted = dataclasses.replace(changed, total_batch_size=int(total))
            plan.check_num_ranks(accepted, num_ranks)
            assert accepted.grad_accum_steps(num_ranks or int(ranks)) >= 1


def test_ranks_that_cannot_be_grouped_are_refused(params: TrainParams) -> None:
    groups_of_three = dataclasses.replace(params.fsdp, sharding_strategy="HYBRID_SHARD", size=3)
    with pytest.raises(StageError, match=r"fsdp.size 3 does not divide the 2 ranks"):
        plan.check_num_ranks(dataclasses.replace(params, fsdp=groups_of_three), 2)


def test_an_unknown_number_of_ranks_is_stated(params: TrainParams, capsys: pytest.CaptureFixture[str]) -> None:
    plan.check_num_ranks(dataclasses.replace(params, batch_size=2, total_batch_size=12), None)
    assert "the number of ranks must divide 6" in capsys.readouterr().out


def test_layers_to_wrap_that_the_model_lacks_are_refused(params: TrainParams, llama: ModelManifest) -> None:
    for names in (None, "LlamaMLP, LlamaDecoderLayer"):
        estimate(params, llama, fsdp=dataclasses.replace(params.fsdp, wrap_layer_cls=names))
    message = r"LlamaForCausalLM has no LlamaDecodrLayer: use LlamaDecoderLayer \(its layers, .*\) or others .*LlamaMLP"
    with pytest.raises(StageError, match=message):
        estimate(params, llama, fsdp=dataclasses.replace(params.fsdp, wrap_layer_cls="LlamaDecodrLayer"))


def test_an_optimizer_without_its_package_is_refused(
    params: TrainParams, llama: ModelManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(StageError, match="adamw_8bit needs torchao, which is not installed: run `pip install torchao`"):
        estimate(params, llama, optimizer="adamw_8bit")
