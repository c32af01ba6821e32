"""Sharding a model over the ranks: the `fsdp` section of params.yaml, as calls of FSDP2.

All strategies are one mechanism, `fully_shard`, over different meshes: a model of which every rank holds a whole copy
is sharded over groups of one rank. So they compute the same, and each loads the checkpoints of the others.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from stages.base.errors import StageError
from stages.building.params import BuildParams, FsdpParams
from stages.forward.loss import LossHead
from stages.model import meta
from stages.model.dtypes import PRECISIONS


def find_units(model: nn.Module, classes: list[str]) -> list[nn.Module]:
    """The modules that FSDP wraps, whose weights are gathered together: those inside others first, the model last.

    Args:
        model: Its parameters may be on the meta device.
        classes: Of the modules that are wrapped beside the embedding, the LM head and the model itself.

    Raises:
        StageError: the classes would separate tied weights.
    """
    embeddings = untied_embeddings(model)
    units = [module for module in model.modules() if type(module).__name__ in classes or module in embeddings]
    # FSDP shards a parameter with the innermost wrapped module around it; a tied one has two places, but one owner.
    for name, canonical in meta.tied_weights(model).items():
        first, second = (_innermost(model, units, key) for key in (name, canonical))
        if first is not second:
            raise StageError(
                f"fsdp.wrap_layer_cls {','.join(classes)} would gather {canonical} and {name} separately, but they are "
                "one weight: use null"
            )
    return [*(unit for unit in reversed(units) if unit is not model), model]


def untied_embeddings(model: nn.Module) -> list[nn.Module]:
    """The embedding and the LM head, which are gathered by themselves; none where they share a weight."""
    if not isinstance(model, PreTrainedModel) or meta.tied_weights(model):
        return []
    ends = (model.get_input_embeddings(), nn.Embedding), (model.get_output_embeddings(), nn.Linear)
    return [module for module, kind in ends if isinstance(module, kind)]


def _innermost(model: nn.Module, units: list[nn.Module], name: str) -> nn.Module:
    """The unit to which the parameter `name` belongs."""
    path = name.split(".")[:-1]
    ancestors = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path), 0, -1)]
    return next((module for module in ancestors if module in units), model)


def shard(model: nn.Module, wrapped_classes: list[str], params: BuildParams, mesh: DeviceMesh) -> None:
    """Shard a meta model in place. It must be given memory by `materialize` afterwards.

    | unit | freed after the forward pass | gathered in the backward pass |
    |---|---|---|
    | of a wrapped class, the embedding | as `sharding_strategy` says | yes |
    | the LM head, the model | no: the backward pass starts with them; 2 % of a step of the benchmark | yes |
    | the embedding, a head that makes the loss | unless the rank is alone | no: it needs no weights |

    Args:
        model: On the meta device.
        wrapped_classes: What `FsdpParams.wrapped_classes` gives.
        params: Precision, and how to shard.
        mesh: The ranks of each copy of the model are its last axis.
    """
    fsdp = params.fsdp.resolved()
    # In a group of one rank nothing is gathered. What is kept instead is a copy in the dtype of the computation, which
    # with one rank would be made twice a step; `strategy: fsdp` still frees it.
    is_alone = mesh.size(mesh.ndim - 1) == 1 and fsdp.strategy != "fsdp"
    frees = fsdp.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD") and not is_alone
    # What is not trained, and not sharded, needs nothing of FSDP2, which would keep a copy of it.
    ignored = {param for param in model.parameters() if not param.requires_grad} if _is_whole(fsdp, mesh) else None
    units = find_units(model, wrapped_classes)
    for module in units:
        is_wrapped = module is not model and type(module).__name__ in wrapped_classes
        is_freed, is_gathered = frees and (is_wrapped or isinstance(module, nn.Embedding)), True
        # A fused head has made its gradients already, an embedding only adds up. But Inkling's embedding has a norm in
        # it, whose weight the backward pass needs.
        if not is_wrapped and isinstance(module, (nn.Embedding, LossHead)) and not any(module.children()):
            is_freed, is_gathered = not is_alone, False
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=_mixed_precision(params.precision),
            reshard_after_forward=is_freed,
            offload_policy=CPUOffloadPolicy() if _offloads(fsdp, mesh) else OffloadPolicy(),
            ignored_params=ignored,
        )
        assert isinstance(module, FSDPModule)
        module.set_unshard_in_backward(is_gathered)
        if mesh.size() > 1:
            # Sum gradients over the ranks: `train_step` divides by the number of labels. An average that is scaled back
            # would be another pass over them, and inexact where the number of ranks is not a power of two. The second
            # call replaces PREMUL_SUM, a reduction of NCCL only, by a plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if fsdp.backward_prefetch == "NONE":  # with itself as the only one to prefetch, it prefetches no other
            module.set_modules_to_backward_prefetch([module])
    if fsdp.forward_prefetch:
        for following, module in pairwise(units[:-1]):
            assert isinstance(module, FSDPModule) and isinstance(following, FSDPModule)
            module.set_modules_to_forward_prefetch([following])


def compute_dtype(precision: str) -> torch.dtype:
    """What the layers compute in: with fp8 bf16, except for matrix products."""
    dtype: torch.dtype = getattr(torch, PRECISIONS["bf16" if precision == "fp8" else precision])
    return dtype


def _mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """What FSDP2 casts gathered weights and the inputs of the model to."""
    if precision == "fp32":
        return MixedPrecisionPolicy()
    # By default FSDP2 reduces in `param_dtype`: a sum over many ranks in bf16 would lose the small gradients.
    return MixedPrecisionPolicy(param_dtype=compute_dtype(precision), reduce_dtype=torch.float32)


def allocate(model: PreTrainedModel, device: str) -> None:
    """Allocate a sharded meta model on a device."""
    model.to_empty(device=device)
    if not all(isinstance(param, DTensor) for param in model.parameters()):
        model.tie_weights()  # `to_empty` makes two of a parameter that FSDP2 does not manage


def materialize(model: PreTrainedModel, params: BuildParams, mesh: DeviceMesh) -> None:
    """Allocate each rank's part of a sharded meta model, and its buffers, without initializing them."""
    if not _offloads(params.fsdp.resolved(), mesh):
        allocate(model, mesh.device_type)
        return
    allocate(model, "cpu")
    # CPUOffloadPolicy brings parameters to the GPU when they are needed, but not buffers.
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(mesh.device_type)


def _is_whole(fsdp: FsdpParams, mesh: DeviceMesh) -> bool:
    """Whether each rank holds a whole copy of the model on its device."""
    return mesh.size(mesh.ndim - 1) == 1 and not _offloads(fsdp, mesh)


def _offloads(fsdp: FsdpParams, mesh: DeviceMesh) -> bool:
    """Without a GPU, the weights are in CPU memory anyway."""
    return bool(fsdp.cpu_offload) and mesh.device_type != "cpu"
