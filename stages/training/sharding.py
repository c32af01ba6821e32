"""Sharding a model over the ranks: the `fsdp` section of params.yaml, as calls of FSDP2.

All strategies are one mechanism, `fully_shard`, over different meshes: a model of which every rank holds a whole copy
is sharded over groups of one rank. So they compute the same, and each loads the checkpoints of the others.
"""

from itertools import pairwise

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from stages.forward.loss import LossHead
from stages.forward.units import modules_to_wrap, untied_embeddings
from stages.training.fsdp import FsdpParams
from stages.training.params import TrainParams
from stages.training.precision import mixed_precision_policy


def shard(model: nn.Module, wrapped_classes: list[str], params: TrainParams, mesh: DeviceMesh) -> None:
    """Shard a meta model in place. It must be given memory by `materialize` afterwards.

    Args:
        model: On the meta device.
        wrapped_classes: What `FsdpParams.wrapped_classes` gives.
        params: Precision, and how to shard.
        mesh: The ranks of each copy of the model are its last axis.
    """
    fsdp = params.fsdp.resolved()
    layers = modules_to_wrap(model, wrapped_classes)
    first, last = ([module for module in modules if module not in layers] for modules in untied_embeddings(model))
    wrapped = {*first, *layers, *last}
    inner = [module for module in model.modules() if module in wrapped]  # modules that contain others come before them
    # Their backward pass needs no weights: a fused head has made its gradients already, an embedding only adds up.
    # Inkling's has a norm in it, whose weight the backward pass needs.
    forward_only: list[nn.Module] = [
        module
        for module in (*first, *last)
        if isinstance(module, (nn.Embedding, LossHead)) and not any(module.children())
    ]
    # The backward pass starts with these: gathering the weights again took 2 % of a step of the benchmark.
    start = [module for module in (*last, model) if module not in forward_only]
    # In a group of one rank nothing is gathered. What is kept instead is a copy in the dtype of the computation, which
    # with one rank would be made twice a step; `strategy: fsdp` still frees it.
    is_alone = mesh.size(mesh.ndim - 1) == 1 and fsdp.strategy != "fsdp"
    reshards = fsdp.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD") and not is_alone
    for module in [*reversed(inner), model]:  # modules inside others first, as fully_shard requires
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=mixed_precision_policy(params.precision),
            reshard_after_forward=(module in forward_only and not is_alone) or (reshards and module not in start),
            offload_policy=CPUOffloadPolicy() if _offloads(fsdp, mesh) else OffloadPolicy(),
        )
    units = [module for module in [*inner, model] if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_unshard_in_backward(unit not in forward_only)
    if mesh.size() > 1:
        # Sum gradients over the ranks: `train_step` divides by the number of labels. An average that is scaled back
        # would be another pass over them, and inexact where the number of ranks is not a power of two. The second call
        # replaces PREMUL_SUM, a reduction of NCCL only, by a plain sum.
        for unit in units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    if fsdp.forward_prefetch:
        for layer, following in pairwise(units[:-1]):
            layer.set_modules_to_forward_prefetch([following])
    if fsdp.backward_prefetch == "NONE":
        for unit in units:  # with itself as the only one to prefetch, it prefetches no other
            unit.set_modules_to_backward_prefetch([unit])


def materialize(model: nn.Module, params: TrainParams, mesh: DeviceMesh) -> None:
    """Allocate each rank's part of a sharded meta model, and its buffers, without initializing them."""
    if not _offloads(params.fsdp.resolved(), mesh):
        model.to_empty(device=mesh.device_type)
        return
    model.to_empty(device="cpu")
    # CPUOffloadPolicy brings parameters to the GPU when they are needed, but not buffers.
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(mesh.device_type)


def _offloads(fsdp: FsdpParams, mesh: DeviceMesh) -> bool:
    """Without a GPU, the weights are in CPU memory anyway."""
    return bool(fsdp.cpu_offload) and mesh.device_type != "cpu"
