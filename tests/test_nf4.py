"""Weights in four bits beside adapters (QLoRA): the values of bitsandbytes, and one result however it is killed."""

import dataclasses
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from stages.base.errors import StageError
from stages.base.identity import RunIdentity, TokenFingerprints
from stages.building import nf4, sharded_model
from stages.building.nf4 import Nf4Linear, dequantize, quantize
from stages.checkpointing import decision
from stages.evaluate import rounding_texts
from stages.evaluation import measure
from stages.evaluation.request import LossSum, Trained
from stages.export.evaluation import Loss
from stages.model.adapters import ALL_LINEAR, is_adapter
from stages.planning.memory_plan import state_bytes
from stages.training.params import TrainParams
from tests.artifacts import write_model
from tests.conftest import make_adapted
from tests.models import CONFIGS, full_value, manifest_of
from tests.project import Project
from tests.ranks import Ranks
from tests.trainings import result

WIDE = transformers.LlamaConfig(
    vocab_size=101, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, eos_token_id=0, bos_token_id=None, tie_word_embeddings=False,
)  # fmt: skip


def test_the_values_are_those_of_bitsandbytes() -> None:
    """Its 0.50.2, `quantize_4bit(blocksize=64, quant_type="nf4")`: SHA-256 of two codes a byte, and of the values."""
    weight = ((torch.arange(8 * 128) % 97 - 48).float() ** 3).view(8, 128)
    weight[2, :64] = 0
    packed = quantize(weight)
    codes, values = packed[:, :64], dequantize(packed, 128, torch.float32)
    found = [hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for tensor in (codes, values)]
    assert found == [
        "dbebdf274919474f46e0a637b22e411df6227bd7a17d192cb5218acf975b4dc3",
        "fc898707f4d6eb0df4c3909dda321c17ad008a418b01ad3476b2a6af52e1518f",
    ]
    assert packed.shape == (8, nf4.num_bytes(128))
    assert torch.equal(dequantize(packed.view(torch.bfloat16), 128, torch.float32), values)
    assert torch.equal(quantize(weight[3:5]), packed[3:5])  # each row by itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_module_computes_and_has_gradients_as_one_with_its_values(dtype: torch.dtype) -> None:
    linear = nn.Linear(128, 24, dtype=dtype)
    packed = quantize(linear.weight.detach())
    linear.weight = nn.Parameter(dequantize(packed, 128, dtype), requires_grad=False)
    linear.bias.requires_grad_(False)
    quantized = nn.Linear(128, 24, dtype=dtype)
    quantized.__class__ = Nf4Linear
    assert isinstance(quantized, Nf4Linear)
    quantized.pack(dtype)
    quantized.weight = nn.Parameter(packed.view(dtype), requires_grad=False)
    quantized.bias = linear.bias
    inputs = [torch.randn(3, 5, 128, dtype=dtype).requires_grad_()]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    one, two = linear(inputs[0]), quantized(inputs[1])
    assert torch.equal(two, one)
    for output in (one, two):
        output.float().square().sum().backward()
    assert torch.equal(inputs[1].grad, inputs[0].grad)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # where torch.compile looks for backends
@pytest.mark.parametrize("compiles", [False, True])
def test_nothing_of_a_weight_is_kept_for_the_backward_pass(compiles: bool) -> None:
    """Beside its bytes, that is: neither codes nor values, which torch.compile sees computed twice."""
    layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(2))).requires_grad_(False)
    for layer in layers:
        packed = quantize(layer.weight)
        layer.__class__ = Nf4Linear
        assert isinstance(layer, Nf4Linear)
        layer.pack(torch.float32)
        layer.weight = nn.Parameter(packed.view(torch.float32), requires_grad=False)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    call = torch.compile(layers, fullgraph=True, backend="aot_eager_decomp_partition") if compiles else layers
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call(torch.randn(3, 128, requires_grad=True)).sum().backward()
    weights = {layer.weight.data_ptr() for layer in layers}
    assert {tensor.data_ptr() for tensor in kept} == weights


def adapted(params: TrainParams, **values: Any) -> TrainParams:
    return dataclasses.replace(
        params, lora_r=3, lora_base="nf4", lora_target_modules=["q_proj"], attention="sdpa", loss="plain", **values
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_files_are_quantized_as_they_are_read(
    params: TrainParams, mesh: Any, tmp_path: Path, precision: str
) -> None:
    """All linear modules of the layers, with an adapter or not, and nothing else; `plan` counts these bytes."""
    write_model(tmp_path, WIDE)
    manifest = manifest_of(tmp_path, with_weights=True)
    params = adapted(params, precision=precision)
    model = sharded_model.build(manifest, params, mesh, initialize=True)
    stored = load_file(tmp_path / "model.safetensors")
    quantized = {name: module for name, module in model.named_modules() if isinstance(module, Nf4Linear)}
    assert len(quantized) == 2 * 7
    for name, module in quantized.items():
        found = dequantize(full_value(module.weight), module.in_features, torch.float32)
        wanted = dequantize(quantize(stored[f"{name}.weight"]), module.in_features, torch.float32)
        assert torch.equal(found, wanted), name
    frozen = [full_value(param).nbytes for name, param in model.named_parameters() if not is_adapter(name)]
    trained = params.num_trained(manifest)
    # `manifest_of` takes the sizes of its linear modules for 1.
    weights = sum(module.in_features * module.out_features for module in quantized.values())
    kinds = {kind: dataclasses.replace(linear, weights=0) for kind, linear in manifest.linears.items()}
    first = next(iter(kinds))
    kinds[first] = dataclasses.replace(kinds[first], weights=weights)
    manifest = dataclasses.replace(manifest, linears=kinds)
    assert state_bytes(params, manifest) == sum(frozen) + 16 * trained


def test_rows_that_are_no_multiple_of_a_block_are_refused(params: TrainParams, mesh: Any, tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama"])
    with pytest.raises(StageError, match=r"64 values together, and model\.layers\.0\.\S+ of LlamaF\S+ has rows of 24"):
        sharded_model.prepare(manifest_of(tmp_path, with_weights=True), adapted(params), mesh)


def test_a_killed_training_ends_with_the_same_result(ranks: Ranks, tmp_path: Path) -> None:
    """With dropout and sharded rows of bytes, in bf16; a checkpoint has none of them."""
    given = Project(tmp_path / "given")
    given.path.mkdir()
    make_adapted(given, hidden_size=64, intermediate_size=128, num_attention_heads=8, head_dim=8, num_key_value_heads=8)
    given.set(lora_base="nf4", lora_target_modules=ALL_LINEAR, precision="bf16", eval_freq=100, max_steps=4)
    whole, killed = given.copy(tmp_path / "whole"), given.copy(tmp_path / "killed")
    ranks.run(whole)
    ranks.run(killed, "kill rank 1 at step 3", -9)
    output = ranks.run(killed)
    assert "resuming from step" in output and "LoRA of rank 4 on NF4" in output
    assert result(killed, 4) == result(whole, 4)


def test_the_export_names_what_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    untrained, trained, exported = (Loss(1, 1, loss, 1.0, None) for loss in (4.0, 2.0, 2.5))
    evaluation: Any = SimpleNamespace(
        dtype="float32", lora_base="nf4", untrained=untrained, trained=trained, exported=exported
    )
    cost, warning = rounding_texts(evaluation)
    assert cost == (
        "merging adapters that were trained beside weights in NF4 into those of the files costs 0.5000 nats per token, "
        "25.0% of the gain"
    )
    assert "lora_base null" in warning
    monkeypatch.setattr(measure, "stored_dtype", lambda _: "float32")
    request: Any = SimpleNamespace(trained=Trained(2.0, 9, 0.1, "nf4"), directory=None)
    with pytest.raises(StageError, match=r"\+0\.5 nats(.|\n)*Merging adapters(.|\n)*lora_base null"):
        measure.check_export(request, LossSum(nats=25.0, tokens=10, rows=1))


def test_a_run_of_before_it_is_continued_without_it(params: TrainParams) -> None:
    plain, quantized = (
        RunIdentity(dataclasses.replace(params, lora_r=4, lora_base=base).identity(), TokenFingerprints("", ""), "", "")
        for base in (None, "nf4")
    )
    older = dataclasses.replace(plain, params={**plain.params})
    del older.params["lora_base"]
    assert decision._obstacles(older, plain, decision._NEUTRAL) == []
    assert decision._obstacles(older, quantized, decision._NEUTRAL) == ["params.lora_base: null there, 'nf4' here"]
    assert "lora_base" not in dataclasses.replace(params, lora_base="nf4").identity()
