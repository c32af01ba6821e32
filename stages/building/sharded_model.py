"""Building the model of a training, from top to bottom: `prepare` on the meta device, then `build` with weights.

It is sharded over the ranks with FSDP2 before it is allocated, so that no rank ever holds the full model. Each rank
reads its own bytes of the safetensors, or makes random weights on the CPU, layer by layer, by the model's own rules and
from seeds that do not depend on the rank: the weights are the same on any number of ranks. With two ranks and 100
million parameters, each reads half of the bytes and needs 58 % of the memory (347 of 594 MiB) that the Trainer of
transformers needs, which reads all of them on each rank (docs/benchmarks.md).
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from stages.base.errors import StageError
from stages.building.activation_checkpointing import checkpoint_activations
from stages.building.lora import add_adapters, initialize_adapters
from stages.building.params import BuildParams
from stages.building.sharding import materialize, shard
from stages.building.weights import check_set, make_weights, read_weights, rebuild_buffers
from stages.forward import attention
from stages.forward.attention_names import IMPLEMENTATIONS
from stages.forward.loss import fuse
from stages.model import headers, meta
from stages.model.manifest import ModelManifest

_RECOMPILE_LIMIT = 64
"""Of the code of a layer. A training of Gemma 3 needs nine, but torch allows eight by default: with `fullgraph` the
next one is an error."""


def prepare(manifest: ModelManifest, params: BuildParams, mesh: DeviceMesh) -> PreTrainedModel:
    """Build and shard the model on the meta device: all of `build` that needs no memory."""
    params.check_compile(manifest)
    params.check_lora(manifest)
    assert callable(attention.varlen_attention), "its import makes it known to transformers"
    model = meta.build(manifest.directory(), IMPLEMENTATIONS.get(params.attention))
    # Found before sharding, because fully_shard gives them other classes.
    layers = [module for module in model.modules() if type(module).__name__ in manifest.layer_classes]
    if params.lora_r:
        add_adapters(model, manifest, params)
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
    shard(model, params.fsdp.wrapped_classes(manifest), params, mesh)
    return model


def build(
    manifest: ModelManifest, params: BuildParams, mesh: DeviceMesh, initialize: bool,
    note: Callable[[], None] = lambda: None,
) -> PreTrainedModel:  # fmt: skip
    """Build and shard the model that `manifest` describes.

    What is trained are fp32 DTensors, sharded on their first dim; layers compute in `params.precision`.

    Args:
        manifest: The model manifest.
        params: With what `choose_attention` and `choose_loss` returned: with `auto`, transformers' own attention and
            the plain loss.
        mesh: The ranks of each copy of the model are its last axis.
        initialize: Whether to fill what is trained, with the weights of the files, which are verified, or random ones.
            A checkpoint fills it otherwise. What no checkpoint holds is filled in both cases.
        note: Called before each layer is made, to note progress for a watchdog.
    """
    model = prepare(manifest, params, mesh)
    materialize(model, params, mesh)
    directory = manifest.directory()
    reference = meta.build(directory)  # not sharded
    rebuild_buffers(model, reference, params.seed)
    if manifest.weights and (initialize or params.lora_r):  # no checkpoint has the weights beside adapters
        read_weights(model, directory, meta.check_headers(reference, headers.read(directory, manifest.weights)))
    elif initialize:
        make_weights(model, reference, manifest.layer_classes, params.seed, note)
    if initialize:
        check_set(dict(model.named_buffers()))
        initialize_adapters(model, params.seed)
    return model


def convert_linears(layers: list[nn.Module]) -> None:
    """Have the linear layers inside `layers` compute in float8, with torchao. Modules and parameters keep their names.

    Inputs, weights and gradients are cast with one scale per tensor, computed from its largest value each time (dynamic
    tensorwise scaling). torchao can also gather the weights in float8 (`enable_fsdp_float8_all_gather`); then the
    parameters, and so the checkpoints, would contain a class of torchao, which nothing else could load.

    The head is not in a layer, so it is not converted: its error would reach the loss directly.

    Raises:
        StageError: there is no linear layer that can compute in float8.
    """
    from torchao.float8 import convert_to_float8_training  # slow to import, and an extra

    converted = []

    def is_suitable(module: nn.Module, name: str) -> bool:
        # The GPU multiplies float8 matrices only where both dims are multiples of 16.
        suitable = isinstance(module, nn.Linear) and module.in_features % 16 == module.out_features % 16 == 0
        converted.extend([name] * suitable)
        return suitable

    for layer in layers:
        convert_to_float8_training(layer, module_filter_fn=is_suitable)
    if not converted:
        raise StageError(
            "precision fp8: no layer of the model has linear modules whose sizes are multiples of 16: use bf16"
        )
