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
    # In a group of one rank nothing is gathered. What is kept instead is a copy in the dtype of the computation, which
    # with one rank would be made twice a step; `strategy: fsdp` still frees it.
    is_alone = mesh.size(mesh.ndim - 1) == 1 and fsdp.strategy != "fsdp"
    frees = fsdp.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD") and not is_alone
    # Of each unit: are its weights freed after the forward pass, and gathered in the backward pass?
    units: dict[nn.Module, tuple[bool, bool]] = dict.fromkeys([*first, *layers], (frees, True))
    # The backward pass starts with these: gathering the weights again took 2 % of a step of the benchmark.
    units |= dict.fromkeys([*last, model], (False, True))
    for module in (*first, *last):
        # A fused head has made its gradients already, an embedding only adds up: their backward pass needs no weights.
        # Inkling's embedding has a norm in it, whose weight the backward pass needs.
        if isinstance(module, (nn.Embedding, LossHead)) and not any(module.children()):
            units[module] = not is_alone, False
    inner = [module for module in model.modules() if module in units and module is not model]
    for module in [*reversed(inner), model]:  # modules inside others first, as fully_shard requires
        is_freed, is_gathered = units[module]
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=mixed_precision_policy(params.precision),
            reshard_after_forward=is_freed,
            offload_policy=CPUOffloadPolicy() if _offloads(fsdp, mesh) else OffloadPolicy(),
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
        for module, following in pairwise(inner):
            assert isinstance(module, FSDPModule) and isinstance(following, FSDPModule)
            module.set_modules_to_forward_prefetch([following])


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
