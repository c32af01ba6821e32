"""Building the model, sharded over the ranks with FSDP2.

It is built on the meta device, sharded there, and only then allocated, so that no rank ever holds the full model. Each
rank reads its own bytes of the safetensors. Random weights and buffers are made one layer at a time on the CPU by the
model's own rules, from a seed that depends on the layer and not on the rank: the weights are the same on any number of
ranks. With two ranks and 100 million parameters, each reads half of the bytes and needs 58 % of the memory (347 of 594
MiB) that the Trainer of transformers needs, which reads all of them on each rank (docs/benchmarks.md).
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from stages.model import headers, meta
from stages.model.headers import StoredTensor
from stages.model.manifest import ModelManifest
from stages.tokens.attention import activate_kernels
from stages.tokens.attention_names import IMPLEMENTATIONS
from stages.tokens.loss import fuse
from stages.training import sharding
from stages.training.activation_checkpointing import checkpoint_activations
from stages.training.distributed import run_on_all_ranks
from stages.training.float8 import convert_linears
from stages.training.params import TrainParams

_RECOMPILE_LIMIT = 64
"""Of the code of a layer. A training of Gemma 3 needs nine, but torch allows eight by default: with `fullgraph` the
next one is an error."""


def build(manifest: ModelManifest, params: TrainParams, mesh: DeviceMesh, initialize: bool) -> PreTrainedModel:
    """Build and shard the model that `manifest` describes.

    Parameters are fp32 DTensors, sharded on their first dim; layers compute in `params.precision`.

    Args:
        manifest: The model manifest.
        params: Precision, sharding, the seed of random weights, and what `choose_attention` and `choose_loss` returned:
            with `auto`, transformers' own attention and the plain loss.
        mesh: The ranks of each copy of the model are its last axis.
        initialize: Whether to fill the parameters, pretrained or random. A checkpoint fills them otherwise; what no
            checkpoint holds, the buffers, is made in both cases.
    """
    directory = manifest.directory()
    model = prepare(manifest, params, mesh)
    sharding.materialize(model, params, mesh)
    reference = meta.build(directory)
    if initialize and not manifest.weights:
        _initialize(model, reference, manifest.layer_classes, params.seed)
        return model
    _rebuild_buffers(model, reference)
    if initialize:
        # Before they are read, and each file by one rank; an altered one ends all ranks with the same message.
        run_on_all_ranks(lambda: manifest.verify(_local_files(manifest.weights)))
        _read_weights(model, directory, meta.check_headers(reference, headers.read(directory, manifest.weights)))
    return model


def prepare(manifest: ModelManifest, params: TrainParams, mesh: DeviceMesh) -> PreTrainedModel:
    """Build and shard the model on the meta device: all of `build` that needs no memory."""
    params.check_compile(manifest)
    if params.attention == "varlen":
        activate_kernels()
    model = meta.build(manifest.directory(), IMPLEMENTATIONS.get(params.attention))
    # Found before sharding, because fully_shard gives them other classes.
    layers = [module for module in model.modules() if type(module).__name__ in manifest.layer_classes]
    if params.precision == "fp8":
        convert_linears(layers)
    checkpoint_activations(model, layers, params.activation_checkpointing)
    if params.compile:
        # For each kind of layer: training and validation, numbers of documents and of rows that turn out to vary.
        torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT
        for layer in layers:
            # In place: torch.compile(layer) would wrap it, and rename its class and its parameters. `fullgraph`: where
            # a layer would fall apart into several graphs, an error shows it, not the time alone.
            layer.compile(fullgraph=True)
    if params.loss == "fused":
        fuse(model)
    sharding.shard(model, params.fsdp.wrapped_classes(manifest), params, mesh)
    return model


def _local_files(names: list[str]) -> list[str]:
    """The files that this rank verifies for all."""
    return names[dist.get_rank() :: dist.get_world_size()]


@torch.no_grad()
def _fill(param: Tensor, whole: Tensor) -> None:
    assert isinstance(param, DTensor)
    param.to_local().copy_(whole[sharding.local_rows(param)])


@torch.no_grad()
def _read_weights(model: nn.Module, directory: Path, stored: dict[str, StoredTensor]) -> None:
    """Fill parameters and stored buffers from safetensors, without reading the rows of other ranks."""
    targets = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    by_file = defaultdict(list)
    for name, tensor in stored.items():
        by_file[tensor.file].append((targets[name], tensor.key))
    for file, tensors in by_file.items():
        with safe_open(directory / file, framework="pt") as reader:
            # `copy_` converts, from bf16 to the fp32 that the optimizer updates. `get_slice` reads these rows only.
            for target, key in tensors:
                if isinstance(target, DTensor):
                    target.to_local().copy_(reader.get_slice(key)[sharding.local_rows(target)])
                else:
                    target.copy_(reader.get_tensor(key))


def _initialize(model: nn.Module, reference: PreTrainedModel, layer_classes: list[str], seed: int) -> None:
    """Initialize all parameters randomly, and all buffers, one layer at a time."""
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    done: set[str] = set()
    for unit, modules in _units(reference, layer_classes):
        for module in modules:
            module.to_empty(device="cpu", recurse=False)
        if not unit:
            reference.tie_weights()  # `to_empty` has replaced the parameters, so those that were one are now two
        digest = hashlib.sha256(f"{seed}/{unit}".encode()).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(
                int.from_bytes(digest[:8], "big")
            )  # torch.manual_seed would seed the GPUs too, which are not forked
            for module in modules:
                reference._init_weights(module)
        names = {module: name for name, module in reference.named_modules()}
        for module in modules:
            prefix = f"{names[module]}." if names[module] else ""
            for name, param in module.named_parameters(recurse=False):
                if prefix + name in params:  # else it is tied to one that is
                    _fill(params[prefix + name], param)
                    done.add(prefix + name)
            for name, buffer in module.named_buffers(recurse=False):
                buffers[prefix + name].copy_(buffer)
            module.to_empty(device="meta", recurse=False)  # frees it: only one layer at a time is in memory
    assert done == set(params), sorted(set(params) - done)


def _units(model: PreTrainedModel, layer_classes: list[str]) -> Iterator[tuple[str, list[nn.Module]]]:
    """Each layer, then everything outside layers: its name ('' for the rest) and its modules, children before parents.

    transformers' rules visit a module after its children, because a parent may give a child other values.
    """
    rest = dict.fromkeys(reversed(list(model.modules())))
    for name, module in model.named_modules():
        if type(module).__name__ in layer_classes:
            modules = list(reversed(list(module.modules())))
            yield name, modules
            for inner in modules:
                rest.pop(inner, None)
    yield "", list(rest)


def _rebuild_buffers(model: nn.Module, reference: PreTrainedModel) -> None:
    """Compute the buffers that no file stores, such as the frequencies of rotary embeddings.

    `to_empty` leaves garbage in them, and the logits still look plausible.
    """
    buffers = dict(model.named_buffers())
    for name, module in reference.named_modules():
        if not module._buffers:
            continue
        # Not `to_empty`: it would also allocate parameters beside them, and separate an embedding from a tied head
        # (Gemma 3 has a buffer there).
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = torch.empty_like(buffer, device="cpu")
        with torch.no_grad():
            reference._init_weights(module)  # parameters beside the buffers stay on the meta device
        for key, buffer in module.named_buffers(recurse=False):
            buffers[f"{name}.{key}" if name else key].copy_(buffer)
            module._buffers[key] = buffer.to("meta")
