"""Building the model, sharded over the ranks with FSDP2.

It is built on the meta device, sharded there, and only then allocated, so that no rank ever holds the full model. Each
rank reads its own bytes of the safetensors, or makes random weights on the CPU, layer by layer, by the model's own
rules and from seeds that do not depend on the rank: the weights are the same on any number of ranks. With two ranks and
100 million parameters, each reads half of the bytes and needs 58 % of the memory (347 of 594 MiB) that the Trainer of
transformers needs, which reads all of them on each rank (docs/benchmarks.md).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from stages.forward import attention
from stages.forward.attention_names import IMPLEMENTATIONS
from stages.forward.loss import fuse
from stages.forward.sharded_weights import (
    SeededRows,
    check_set,
    local_rows,
    read_weights,
    rebuild_buffers,
    rules_of_random_values,
    seeded,
)
from stages.model import headers, meta
from stages.model.manifest import ModelManifest
from stages.training import sharding
from stages.training.activation_checkpointing import checkpoint_activations
from stages.training.params import TrainParams
from stages.training.precision import convert_linears

_RECOMPILE_LIMIT = 64
"""Of the code of a layer. A training of Gemma 3 needs nine, but torch allows eight by default: with `fullgraph` the
next one is an error."""


def build(
    manifest: ModelManifest, params: TrainParams, mesh: DeviceMesh, initialize: bool,
    note: Callable[[], None] = lambda: None,
) -> PreTrainedModel:  # fmt: skip
    """Build and shard the model that `manifest` describes.

    Parameters are fp32 DTensors, sharded on their first dim; layers compute in `params.precision`.

    Args:
        manifest: The model manifest.
        params: Precision, sharding, the seed of random weights, and what `choose_attention` and `choose_loss` returned:
            with `auto`, transformers' own attention and the plain loss.
        mesh: The ranks of each copy of the model are its last axis.
        initialize: Whether to fill the parameters, with those of the files, which are verified, or random ones. A
            checkpoint fills them otherwise; what no checkpoint holds, the buffers, is made in both cases.
        note: Called before each layer is made, to note progress for a watchdog.
    """
    directory = manifest.directory()
    model = prepare(manifest, params, mesh)
    sharding.materialize(model, params, mesh)
    reference = meta.build(directory)
    rebuild_buffers(model, reference, params.seed)
    if initialize and not manifest.weights:
        _fill_by_layers(model, reference, manifest.layer_classes, params.seed, note)
    elif initialize:
        read_weights(model, directory, meta.check_headers(reference, headers.read(directory, manifest.weights)))
    if initialize:
        check_set(dict(model.named_buffers()))
    return model


def prepare(manifest: ModelManifest, params: TrainParams, mesh: DeviceMesh) -> PreTrainedModel:
    """Build and shard the model on the meta device: all of `build` that needs no memory."""
    params.check_compile(manifest)
    assert callable(attention.varlen_attention), "its import makes it known to transformers"
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
        fuse(model, params.compile)
    sharding.shard(model, params.fsdp.wrapped_classes(manifest), params, mesh)
    return model


def _fill_by_layers(
    model: nn.Module, reference: PreTrainedModel, layer_classes: list[str], seed: int, note: Callable[[], None]
) -> None:
    """Initialize all parameters randomly, one layer at a time, of which each rank keeps its own rows."""
    params = dict(model.named_parameters())
    names = {module: name for name, module in reference.named_modules()}
    rules = rules_of_random_values(reference)
    done: set[str] = set()
    for unit, modules in _units(reference, layer_classes):
        note()
        for module in modules:
            module.to_empty(device="cpu", recurse=False)
        if not unit:
            reference.tie_weights()  # `to_empty` has replaced the parameters, so those that were one are now two
        own: dict[Tensor, str] = {
            param: name
            for module in modules
            for key, param in module.named_parameters(recurse=False)
            # else it is tied to one that is a parameter of the model
            if (name := f"{names[module]}.{key}".lstrip(".")) in params
        }
        with seeded(f"{seed}/{unit}"), SeededRows(own, seed), torch.no_grad():
            for param in own:
                param.fill_(torch.nan)
            for module in modules:
                rules[module](module)
            check_set({name: param for param, name in own.items()})
            for param, name in own.items():
                sharded = params[name]
                assert isinstance(sharded, DTensor)
                sharded.to_local().copy_(param[local_rows(sharded)])
        done |= set(own.values())
        for module in modules:
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
