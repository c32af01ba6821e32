"""Two ranks: every strategy gives the same weights, and loads the checkpoints of the others."""

import dataclasses
import functools
import importlib.util
import math
import re
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from stages.base.errors import StageError
from stages.base.params_file import load_params
from stages.building import frozen_model, sharded_model, sharding, weights
from stages.building.params import FSDP_PRESETS, FsdpParams
from stages.forward.batch import count_labels, make_batch
from stages.forward.loss import fuse
from stages.forward.small_copy import small_config
from stages.model import adapters, meta
from stages.ranks.process_group import device_mesh, process_group
from stages.training import step
from stages.training.optimizer import make_optimizer
from stages.training.params import TrainParams
from stages.training.precision import load_scaler_state, scaler_state
from stages.training.schedule import lr_ratio
from tests.artifacts import write_model
from tests.models import CONFIGS, MIXTRAL, full_value, manifest_of
from tests.project import REPO
from tests.ranks import Ranks
from tests.steps import TIMEOUT_MINUTES, Training, changed

MODELS: dict[str, transformers.PreTrainedConfig] = {
    **CONFIGS,
    "mixtral": MIXTRAL,
    "wide": transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
    ),
    "odd": transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=100, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
    ),
}  # fmt: skip
"""`odd`: the 8-bit optimizer makes blocks of what a rank has of its layers, but not of what each of two ranks has."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "ddp": {"strategy": "ddp"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD", "size": 1},
    "multi_node_fsdp": {"preset": "multi_node_fsdp"},
    "prefetch": {"forward_prefetch": True, "backward_prefetch": "NONE", "cpu_offload": True},
    "wrap_layer_cls": {"wrap_layer_cls": "LlamaMLP, LlamaDecoderLayer"},
}
ADAPTED = {"lora_r": 3, "lora_alpha": 6}
"""Adapters of which one rank has two rows, and the other one."""
UNTIED = "llama untied, scaled rope"
TRAINED: dict[str, dict[str, dict[str, Any]]] = {
    "tied": {
        name: {"fsdp": STRATEGIES[name]} for name in ("FULL_SHARD", "NO_SHARD", "ddp", "HYBRID_SHARD", "wrap_layer_cls")
    },
    "untied": {
        name: {"loss": name.split()[0], "fsdp": STRATEGIES[name.split()[1]]}
        for name in ("plain FULL_SHARD", "fused FULL_SHARD", "fused SHARD_GRAD_OP", "fused ddp", "fused prefetch",
                     "fused multi_node_fsdp")
    },
    "adapted": {
        "plain": ADAPTED, "fused": {**ADAPTED, "loss": "fused"}, "ddp": {**ADAPTED, "fsdp": {"strategy": "ddp"}},
        "full": {**ADAPTED, "activation_checkpointing": "full"},
        "selective_op": {**ADAPTED, "activation_checkpointing": "selective_op"},
    },
    "nf4": {
        "FULL_SHARD": {**ADAPTED, "lora_base": "nf4"},
        "ddp": {**ADAPTED, "lora_base": "nf4", "fsdp": {"strategy": "ddp"}},
    },
}  # fmt: skip
"""By group; all trainings of a group are to be alike."""
MODEL_OF = {"tied": "llama", "untied": UNTIED, "adapted": UNTIED, "nf4": "wide"}

RELOADED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("FULL_SHARD", "NO_SHARD", {}), ("HYBRID_SHARD", "FULL_SHARD", {}),
    ("FULL_SHARD", "ddp", ADAPTED), ("ddp", "FULL_SHARD", ADAPTED),
)  # fmt: skip
"""The strategy that saves, the one that loads, and what is trained."""

RESUMED: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16", "activation_checkpointing": "full", "loss": "fused"},
    "fp16": {"precision": "fp16", "attention": "varlen"},
    "fp16 fused": {"precision": "fp16", "activation_checkpointing": "selective_op", "loss": "fused"},
    "compiled": {"precision": "bf16", "activation_checkpointing": "selective_op", "compile": True},
}
if importlib.util.find_spec("torchao"):
    RESUMED["fp16 adamw_8bit"] = {"precision": "fp16", "optimizer": "adamw_8bit"}
    RESUMED["fp8"] = {"precision": "fp8"}
    RELOADED += (("FULL_SHARD", "ddp", {"optimizer": "adamw_8bit"}), ("ddp", "FULL_SHARD", {"optimizer": "adamw_8bit"}))


def trained(directory: Path, params: TrainParams) -> dict[str, Any]:
    """Steps and weights of all trainings in TRAINED, and how often FSDP gathers which unit."""
    results: dict[str, Any] = {}
    gathered: list[str] = []

    def gather(params: list[FSDPParam], *args: Any) -> Any:
        gathered.append(params[0]._param_fqn or "")
        return foreach_all_gather(params, *args)

    for group, trainings in TRAINED.items():
        for name, changes in trainings.items():
            training = Training(directory / MODEL_OF[group], changed(params, **changes))
            steps = training.train(1)
            gathered.clear()
            with mock.patch.object(_fsdp_param_group, "foreach_all_gather", gather):
                steps += training.train(1)
            params_of = dict(training.model.named_parameters())
            managed = {key: param for key, param in params_of.items() if isinstance(param, DTensor)}
            results[f"{group} {name}"] = {
                "steps": steps,
                "trained": training.trained(),
                "gathered": (gathered.count("model.embed_tokens.weight"), gathered.count("lm_head.weight")),
                "managed": [*managed],
                "share": sum(param.to_local().numel() for param in managed.values())
                / sum(param.numel() for param in params_of.values()),
            }
    return results


def reloaded(directory: Path, params: TrainParams) -> list[Any]:
    """What is trained, in the training that saves and in the one that loads."""
    results = []
    for number, (saving, loading, changes) in enumerate(RELOADED):
        model = directory / ("odd" if "optimizer" in changes else "llama")
        one = Training(model, changed(params, STRATEGIES[saving], **changes))
        one.train(2)  # after the first one, the moments of A are 0
        path = directory / f"reloaded-{number}" / "step-00000002"
        one.save(path)
        two = Training(model, changed(params, STRATEGIES[loading], **changes), initialize=False)
        two.load(path)
        results.append((one.trained(), two.trained()))
    return results


def resumed(directory: Path, params: TrainParams) -> dict[str, Any]:
    results = {}
    compiled_fast = functools.partialmethod(nn.Module.compile, backend="eager")
    for name, changes in RESUMED.items():
        with mock.patch.object(nn.Module, "compile", compiled_fast):
            straight = Training(directory / "wide", changed(params, **changes))
            resumed = Training(directory / "wide", changed(params, **changes), initialize=False)
        if name.startswith("fp16"):  # so high that steps overflow before and after the checkpoint
            load_scaler_state(straight.scaler, scale=2.0**23, good_steps=0)
        steps = []
        for number in (1, 2):  # the first save allocates the memory of the copy, the second one fills it
            steps += straight.train(1)
            path = directory / f"resumed-{name}" / f"step-{number:08}"
            straight.save(path)
        steps += straight.train(3)
        resumed.load(path)
        results[name] = [
            (steps, straight.tensors(), scaler_state(straight.scaler)),
            (steps[:2] + resumed.train(3), resumed.tensors(), scaler_state(resumed.scaler)),
        ]
    return results


class Reader:
    """A file of weights, which counts how many values are read."""

    read = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.file = safe_open(*args, **kwargs)
        self.get_tensor = self.file.get_tensor

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def get_slice(self, key: str) -> "Reader":
        self.slice = self.file.get_slice(key)
        return self

    def __getitem__(self, rows: slice) -> torch.Tensor:
        part: torch.Tensor = self.slice[rows]
        Reader.read += part.numel()
        return part


def every_model(directory: Path, params: TrainParams) -> dict[str, Any]:
    """What differs from `from_pretrained`, and how many values of the weights this rank read."""
    results = {}
    mesh = device_mesh((1, 2), TIMEOUT_MINUTES)
    for name in (*CONFIGS, "mixtral"):
        Reader.read = 0
        with mock.patch.object(weights, "safe_open", Reader):
            model = sharded_model.build(manifest_of(directory / name, with_weights=True), params, mesh, True)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(directory / name)
        ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        expected = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
        results[name] = {
            "different": sorted(ours.keys() ^ expected.keys())
            or [key for key in ours if not torch.equal(full_value(ours[key]), expected[key])],
            "read": Reader.read,
            "local": sum(param.to_local().numel() for param in model.parameters()),
            "all": sum(param.numel() for param in theirs.parameters()),
        }
    return results


def random_weights(directory: Path, params: TrainParams) -> dict[str, torch.Tensor]:
    """The random weights of a model, gathered from the ranks."""
    manifest = manifest_of(directory / "gpt2", with_weights=False)
    model = sharded_model.build(manifest, params, device_mesh((1, 2), TIMEOUT_MINUTES), initialize=True)
    return {name: full_value(param.detach()) for name, param in model.named_parameters()}


def timeouts(directory: Path, params: TrainParams) -> dict[str, float]:
    """The timeouts in minutes of the groups of a mesh in which each rank has a copy of the model."""
    return {
        group.group_desc: group._get_backend(torch.device("cpu")).options._timeout.total_seconds() / 60
        for group in device_mesh((2, 1), TIMEOUT_MINUTES).get_all_groups()
    }


JOBS = (timeouts, trained, reloaded, resumed, every_model, random_weights)


def rank_main(rank: int, directory: Path, params: TrainParams) -> None:
    if "fp8" in RESUMED:
        from torchao import float8

        emulated = float8.Float8LinearConfig(emulate=True)  # all that CPUs can do
        float8.convert_to_float8_training = functools.partial(float8.convert_to_float8_training, config=emulated)
    with process_group(TIMEOUT_MINUTES, str(directory)):
        torch.use_deterministic_algorithms(True)  # torch.empty gives NaN: no uninitialized value looks plausible
        torch.save({job.__name__: job(directory, params) for job in JOBS}, directory / f"results-{rank}.pt")


@pytest.fixture(scope="module")
def results(params: TrainParams, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found, in one launch."""
    directory = tmp_path_factory.mktemp("ranks")
    for name, config in MODELS.items():
        write_model(directory / name, config)
    ranks.call(rank_main, directory, params)
    return [torch.load(directory / f"results-{rank}.pt", weights_only=False) for rank in range(2)]


def loaded(tmp_path: Path, **fsdp: Any) -> FsdpParams:
    values = yaml.safe_load((REPO / "params.yaml").read_text())
    values["fsdp"] |= fsdp
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    return load_params(TrainParams, path=tmp_path / "params.yaml").fsdp


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in TRAINED for name in TRAINED[group]])
def test_every_strategy_gives_the_same_weights(results: list[dict[str, Any]], group: str, name: str) -> None:
    """Also where embeddings are gathered by themselves, and of adapters, however the loss is computed."""
    for rank in results:
        found = rank["trained"][f"{group} {name}"]
        expected = rank["trained"][f"{group} {next(iter(TRAINED[group]))}"]
        if name in ("full", "selective_op"):
            tolerance = {"rtol": 0.0, "atol": 0.0}
        else:
            tolerance = {"rtol": 1e-4, "atol": 1e-4} if group in ("adapted", "nf4") else {}
        for key in ("steps", "trained"):
            torch.testing.assert_close(found[key], expected[key], **tolerance)
        if name == "ddp" and group in ("adapted", "nf4"):  # what is not trained is held whole, once
            assert found["managed"] and all(map(adapters.is_adapter, found["managed"]))
        elif name.endswith(("NO_SHARD", "ddp", "HYBRID_SHARD")):
            assert found["share"] == 1
        else:
            assert found["share"] < 0.52


def test_embeddings_of_their_own_are_gathered_once_per_forward_pass(results: list[dict[str, Any]]) -> None:
    """In the backward pass they are not needed, or still there; the step has two forward passes."""
    for rank in results:
        gathered = {name: rank["trained"][f"untied {name}"]["gathered"] for name in TRAINED["untied"]}
        assert gathered == {**dict.fromkeys(gathered, (2, 2)), "fused ddp": (0, 0)}


def test_a_checkpoint_of_one_strategy_gives_each_row_back_to_another(results: list[dict[str, Any]]) -> None:
    for rank in results:
        for (saved, loaded), (*_, changes) in zip(rank["reloaded"], RELOADED, strict=True):
            assert all(tensor.any() for tensor in saved.values())
            for key, tensor in saved.items():
                rounding = 0.01 * float(tensor.abs().max()) if "optimizer" in changes and " exp_avg" in key else 0
                torch.testing.assert_close(loaded[key], tensor, rtol=0, atol=rounding)


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_training_equals_an_uninterrupted_one(results: list[dict[str, Any]], name: str) -> None:
    for rank in results:
        straight, resumed = rank["resumed"][name]
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
        steps, tensors, scaler = straight
        if name == "fp8":  # its checkpoints are those of any other precision, its losses nearly
            others, bf16_tensors, _ = rank["resumed"]["bf16"][0]
            assert tensors.keys() == bf16_tensors.keys()
            assert {type(value) for value in tensors.values()} == {torch.Tensor}
            torch.testing.assert_close([loss for loss, _ in steps], [loss for loss, _ in others], rtol=1e-2, atol=0)
            assert steps != others
        if name.startswith("fp16"):
            assert [norm is None for _, norm in steps] == [True, True, True, True, False]
            assert scaler == (2.0**19, 1)
            assert {value.item() for key, value in tensors.items() if key.endswith(" step")} == {1.0}


@pytest.mark.parametrize("name", [*CONFIGS, "mixtral"])
def test_each_rank_reads_only_its_own_rows_of_any_model(results: list[dict[str, Any]], name: str) -> None:
    for rank in results:
        found = rank["every_model"][name]
        assert found["different"] == []
        assert found["read"] == found["local"] < 0.51 * found["all"]
    assert sum(rank["every_model"][name]["read"] for rank in results) == results[0]["every_model"][name]["all"]


def test_random_weights_do_not_depend_on_the_number_of_ranks(
    results: list[dict[str, Any]], mesh: DeviceMesh, params: TrainParams, tmp_path: Path
) -> None:
    manifest = manifest_of(write_model(tmp_path, "gpt2", dtype=None), with_weights=False)
    model = sharded_model.build(manifest, params, mesh, initialize=True)
    expected = {name: full_value(param.detach()) for name, param in model.named_parameters()}
    for rank in results:
        torch.testing.assert_close(rank["random_weights"], expected, rtol=0, atol=0)


def test_groups_of_some_of_the_ranks_have_the_timeout_of_the_training(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["timeouts"] == {"default_pg": TIMEOUT_MINUTES, "mesh_fsdp": TIMEOUT_MINUTES}


def test_presets_can_be_overridden(tmp_path: Path) -> None:
    for name, preset in FSDP_PRESETS.items():
        resolved = loaded(tmp_path, preset=name).resolved()
        values = dataclasses.asdict(resolved)
        assert {key: values[key] for key in preset} == preset
    changed = loaded(tmp_path, preset="multi_node_fsdp", sharding_strategy="SHARD_GRAD_OP", forward_prefetch=False)
    assert (changed.resolved().sharding_strategy, changed.resolved().forward_prefetch) == ("SHARD_GRAD_OP", False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "small"}, "fsdp.preset is 'small': input should be 'single_node_fsdp', 'multi_node_fsdp' or"),
        ({"backward_prefetch": "BACKWARD_POST"}, "fsdp.backward_prefetch is 'BACKWARD_POST': in FSDP2 the weights"),
        ({"limit_all_gathers": False}, "fsdp.limit_all_gathers is false: in FSDP2 all-gathers are"),
        ({"use_orig_params": False}, "fsdp.use_orig_params is false: in FSDP2 each"),
        ({"sync_module_states": False}, "fsdp.sync_module_states is false: all ranks start with the same weights"),
        ({"flatten_parameters": True}, "fsdp.flatten_parameters is true: in FSDP2 every parameter is"),
        ({"sync_batchnorm": True}, "fsdp.sync_batchnorm is true: no decoder has BatchNorm"),
        ({"strategy": "ddp", "sharding_strategy": "FULL_SHARD"}, "strategy ddp shards nothing, but fsdp.sharding_str"),
        ({"sharding_strategy": "NO_SHARD", "size": 2}, "NO_SHARD shards nothing, but fsdp.size is 2"),
    ],
)
def test_values_without_equivalent_in_fsdp2_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError, match=re.escape(message)):
        loaded(tmp_path, **values)


def test_values_that_describe_fsdp2_are_accepted(tmp_path: Path) -> None:
    loaded(tmp_path, limit_all_gathers=True, use_orig_params=True, flatten_parameters=False, sync_module_states=True)


def test_the_mesh_has_the_shape_of_the_strategy(tmp_path: Path) -> None:
    shapes = {
        (8, 4): ({"preset": "multi_node_fsdp"}, (2, 4)),
        (8, 8): ({}, (1, 8)),
        (8, 2): ({"size": 4}, (2, 4)),
        (4, 4): ({"strategy": "ddp"}, (4, 1)),
        (1, 1): ({"strategy": "none"}, (1, 1)),
    }
    for world, (values, shape) in shapes.items():
        assert loaded(tmp_path, **values).mesh_shape(*world) == shape
    with pytest.raises(StageError, match=r"fsdp.size 3 does not divide the 8 ranks: use one of 1, 2, 4, 8"):
        loaded(tmp_path, size=3).mesh_shape(8, 8)
    with pytest.raises(StageError, match=r"strategy none trains on one rank, but there are 2: set runtime.nproc"):
        loaded(tmp_path, strategy="none").mesh_shape(2, 2)


class Strange(nn.Linear):
    """A layer with a name that is in no list."""


class StrangeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.layers = nn.ModuleList(Strange(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight


def test_layers_to_wrap_are_found_in_the_model() -> None:
    model = StrangeModel()
    assert sharding.find_units(model, meta.layer_classes(model)) == [*reversed(model.layers), model]
    assert meta.module_classes(model) == ["Embedding", "Linear", "ModuleList", "Strange"]
    with pytest.raises(StageError, match=r"embedding.weight and head.weight separately, but they are one weight"):
        sharding.find_units(model, ["Strange", "Embedding"])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gradient_that_is_not_finite_changes_no_bit_and_is_an_error_once_no_smaller_scale_helps(
    params: TrainParams, mesh: DeviceMesh, tmp_path: Path, precision: str
) -> None:
    training = Training(write_model(tmp_path), changed(params, precision=precision))
    assert training.scaler.get_scale() == (2**16 if precision == "fp16" else 1)
    load_scaler_state(training.scaler, scale=2.0, good_steps=0)
    assert None not in training.train(2)[1]
    before = {name: value.clone() for name, value in training.tensors().items()}
    losses = step.training_losses
    with mock.patch.object(step, "training_losses", lambda *args: (losses(*args)[0] * math.inf, None)):
        if precision == "fp16":
            assert training.train(1) == [(None, None)]
        with pytest.raises(StageError, match="the gradient norm is nan"):
            training.train(1)
    after = training.tensors()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert {float(value) for name, value in after.items() if name.endswith(" step")} == {2.0}
    training.train(1)  # the next one is as if there had been none
    after = training.tensors()
    assert not any(torch.equal(before[name], after[name]) for name in before if name.endswith(" exp_avg"))


class Reads(TorchDispatchMode):
    """Counts the reads of single numbers from the device: `.item()`, `bool(tensor)`, `if tensor`."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_reads_no_number_from_the_device(
    params: TrainParams, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    training = Training(write_model(tmp_path), changed(params, precision=precision))
    # The masks of transformers' own attention functions depend on whether all positions of the batch are in one row.
    transformers.AttentionInterface.register("maskless", sdpa_attention_forward)
    training.model.config._attn_implementation = "maskless"
    batch = make_batch(torch.randint(0, 101, (2, 16)), eos_token_id=0, document_mask=True)
    with monkeypatch.context() as patch, Reads() as reads:
        patch.setattr(torch.Tensor, "tolist", None)  # on CPUs it is no operation that a mode sees
        unread = training.queue_step([batch, batch], num_labels=60)
        assert reads.number == 0
        assert training.scaler.get_scale() >= 1
        assert reads.number == (precision == "fp16")  # the mode does count them
    assert unread.read()[1] is not None


def test_a_step_without_labels_has_no_gradient(params: TrainParams, mesh: DeviceMesh, tmp_path: Path) -> None:
    training = Training(write_model(tmp_path), params)
    batch = make_batch(torch.zeros(2, 16, dtype=torch.int32), eos_token_id=0, document_mask=True)
    assert count_labels(batch) == 0
    assert training.train_step([batch], num_labels=0) == (None, 0.0)
    assert all(torch.isfinite(value).all() for value in training.tensors().values())


def test_copies_of_the_model_exchange_gradients_once_per_step(
    params: TrainParams, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(FSDPModule, "set_requires_all_reduce", lambda _, value: asked.append(value))
    batch = make_batch(torch.ones(2, 16, dtype=torch.int32), eos_token_id=0, document_mask=True)
    Training(write_model(tmp_path), params).train_step([batch] * 3, num_labels=3 * count_labels(batch))
    assert asked == [False, False, True]


def test_the_8_bit_optimizer_skips_what_torchao_does_not(params: TrainParams, monkeypatch: pytest.MonkeyPatch) -> None:
    class AdamW8bit(torch.optim.SGD):  # in place of that of torchao, which may be missing
        def __init__(self, groups: Any, lr: float, betas: Any, eps: float) -> None:
            super().__init__(groups, lr)

        def step(self, closure: Any = None) -> None:
            self.found_inf = None  # SGD refuses it, torchao does not know it
            super().step(closure)

    contents: dict[str, dict[str, Any]] = {
        "torchao": {}, "torchao.optim": {"AdamW8bit": AdamW8bit},
        "torchao.optim.subclass_8bit": {"OptimState8bit": mock.Mock()},
    }  # fmt: skip
    for name, content in contents.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    layer = nn.Linear(2, 2)
    optimizer = make_optimizer(layer, dataclasses.replace(params, optimizer="adamw_8bit"))
    assert optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]  # else GradScaler decides by itself
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.ones_like(layer.weight)
    for found_inf in (1.0, 0.0):
        optimizer.found_inf = torch.tensor(found_inf)  # type: ignore[attr-defined]
        optimizer.step()
        assert torch.equal(layer.weight, before) == bool(found_inf)


def test_schedules_have_the_documented_ratios(params: TrainParams) -> None:
    def ratios(steps: int, **changes: Any) -> list[float]:
        scheduled = changed(params, warmup_steps=2, min_lr_ratio=0.5, **changes)
        return [lr_ratio(scheduled, steps, step) for step in range(steps)]

    warmup = [0.5, 1.0]
    assert ratios(6, lr_schedule="constant") == [*warmup, 1, 1, 1, 1]
    assert ratios(6, lr_schedule="linear") == [*warmup, 1, 0.875, 0.75, 0.625]
    assert ratios(6, lr_schedule="linear", lr_decay_steps=4) == [*warmup, 1, 0.75, 0.5, 0.5]
    assert ratios(4, lr_schedule="cosine") == [*warmup, 1, 0.75]
    wsd = {"lr_schedule": "wsd", "lr_decay_ratio": 0.4}
    assert ratios(10, **wsd) == [*warmup, 1, 1, 1, 1, 1, 0.875, 0.75, 0.625]
    assert ratios(12, **wsd, lr_decay_steps=10) == [*warmup, 1, 1, 1, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.5]
    with pytest.raises(ValueError, match="lr_decay_steps 2 includes the warm-up, but warmup_steps is 2"):
        ratios(4, lr_decay_steps=2)


_MIXTURE: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "dtype", "kept"),
    [
        (transformers.DeepseekV3Config(**_MIXTURE, n_routed_experts=2, n_group=1, topk_group=1, first_k_dense_replace=1,
                                       kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
                                       v_head_dim=4),
         torch.bfloat16, "layers.1.mlp.gate.e_score_correction_bias"),
        (transformers.GptOssConfig(**_MIXTURE, num_local_experts=2, head_dim=8), torch.float16, "norm.weight"),
    ],
    ids=["a buffer", "a parameter"],
)  # fmt: skip
def test_a_frozen_model_keeps_in_fp32_what_its_class_does(
    config: transformers.PreTrainedConfig, dtype: torch.dtype, kept: str, mesh: DeviceMesh, tmp_path: Path
) -> None:
    write_model(tmp_path, config)
    stored = load_file(tmp_path / "model.safetensors")
    stored[f"model.{kept}"] += 14.012  # no value of bf16 or fp16
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, local_files_only=True)
    classes = meta.layer_classes(expected)
    model = frozen_model.load(tmp_path, ["model.safetensors"], classes, dtype, "plain", mesh)
    found = {name: full_value(tensor) for name, tensor in model.state_dict().items()}
    assert found[f"model.{kept}"].dtype == torch.float32
    torch.testing.assert_close(found, dict(expected.state_dict()), rtol=0, atol=0)
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)


def shard_on_meta(
    directory: Path, config: str | transformers.PreTrainedConfig, classes: list[str], params: TrainParams, mesh: Any
) -> Any:
    model = meta.build(write_model(directory, config, dtype=None))
    if params.loss == "fused":
        fuse(model)
    sharding.shard(model, classes, params, mesh)
    return model


def test_a_wrapped_module_may_contain_embeddings(mesh: DeviceMesh, params: TrainParams, tmp_path: Path) -> None:
    model = shard_on_meta(tmp_path, UNTIED, ["LlamaModel", "LlamaDecoderLayer"], params, mesh)
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert units == ["", "model", "model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]
    groups = [module._get_fsdp_state()._fsdp_param_group for module in (model.model, model.model.embed_tokens)]
    assert [len(group.fsdp_params) for group in groups] == [1, 1]  # the last norm, and the embedding


@pytest.mark.parametrize("name", ["llama", "inkling_text"])
def test_an_embedding_with_a_norm_in_it_has_its_weights_in_the_backward_pass(
    mesh: DeviceMesh, params: TrainParams, tmp_path: Path, name: str
) -> None:
    """Without them it ends in a segmentation fault, on two ranks or more."""
    small = small_config(transformers.AutoConfig.for_model(name, tie_word_embeddings=False))
    assert small
    embedding = shard_on_meta(tmp_path, small, [], params, mesh).get_input_embeddings()
    has_norm = bool([*embedding.children()])  # that of inkling, in newer versions of transformers
    assert embedding._get_fsdp_state()._fsdp_param_group.unshard_in_backward == has_norm


@pytest.mark.parametrize(
    ("strategy", "loss", "are_freed"),
    [
        ("auto", "fused", set()),
        ("fsdp", "plain", {"embed", "layers.0", "layers.1"}),
        ("fsdp", "fused", {"embed", "layers.0", "layers.1", "lm_head"}),
    ],
)
def test_a_rank_that_has_the_whole_model_keeps_its_copy_until_the_backward_pass(
    mesh: DeviceMesh, params: TrainParams, tmp_path: Path, strategy: str, loss: str, are_freed: set[str]
) -> None:
    """Unless `fsdp` is asked for: then it frees what others would, and a head that has made its gradients."""
    params = changed(params, {"strategy": strategy}, loss=loss)
    model = shard_on_meta(tmp_path, UNTIED, ["LlamaDecoderLayer"], params, mesh)
    freed = {
        name.removeprefix("model.").removesuffix("_tokens")
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule) and module._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info
    }
    assert freed == are_freed
