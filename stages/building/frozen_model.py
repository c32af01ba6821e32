"""A finished model whose weights are only read, sharded over the ranks: for models that do not fit on one device."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import GenerationConfig, PreTrainedModel

from stages.building.sharding import find_units
from stages.building.weights import read_weights, rebuild_buffers
from stages.forward.loss import fuse
from stages.model import headers, meta
from stages.model.files import GENERATION_CONFIG


def load(
    directory: Path, weights: list[str], layer_classes: list[str], dtype: torch.dtype, loss: str, mesh: DeviceMesh
) -> PreTrainedModel:
    """The model in evaluation mode, of which each rank holds its own rows; a collective.

    It computes what `from_pretrained` of the directory would, and every forward pass is a collective.

    Args:
        directory: Of the model.
        weights: Its safetensors files.
        layer_classes: Classes of its layers.
        dtype: In which the weights are held and computed with, but for those that the class keeps in fp32.
        loss: `fused` or `plain`.
        mesh: Of one axis, over which it is sharded.

    Raises:
        StageError: the files are not those of the model.
    """
    model, reference = (meta.build(directory, dtype=dtype) for _ in range(2))
    stored = meta.check_headers(reference, headers.read(directory, weights))
    if loss == "fused":
        fuse(model)  # before it is sharded, which gives modules other classes
    kept = meta.stored_dtypes(directory, dtype)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = tensor.data.to(kept.get(name, tensor.dtype))
    model.requires_grad_(False).eval()
    for module in find_units(model, layer_classes):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    model.to_empty(device=mesh.device_type)
    rebuild_buffers(model, reference, seed=0)
    read_weights(model, directory, stored)
    if (directory / GENERATION_CONFIG).is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model
