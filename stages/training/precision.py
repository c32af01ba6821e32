"""The dtype of forward and backward pass, and the loss scale of fp16.

The weights that the optimizer updates, and the gradients summed over the ranks, are fp32 in any case.
"""

import torch
from torch.amp import GradScaler
from torch.distributed.fsdp import MixedPrecisionPolicy

from stages.artifacts.dtypes import PRECISIONS
from stages.training.state import ScalerState

_GROWTH_TRACKER = "_growth_tracker"  # in the state dict of a GradScaler


def mixed_precision_policy(precision: str) -> MixedPrecisionPolicy:
    """What FSDP2 casts gathered weights and the inputs of the model to."""
    if precision == "fp32":
        return MixedPrecisionPolicy()
    # By default FSDP2 reduces in `param_dtype`: a sum over many ranks in bf16 would lose the small gradients.
    return MixedPrecisionPolicy(param_dtype=compute_dtype(precision), reduce_dtype=torch.float32)


def compute_dtype(precision: str) -> torch.dtype:
    """What the layers compute in."""
    dtype: torch.dtype = getattr(torch, PRECISIONS[precision])
    return dtype


def make_grad_scaler(precision: str, device: torch.device) -> GradScaler:
    """The loss scale: 65536 for fp16, halved where a gradient is not finite, doubled after 2000 good steps.

    Other precisions have the scale 1. Gradients are DTensors, for which torch takes the maximum of `found_inf` over the
    ranks: all of them skip the same steps.

    Args:
        precision: As in params.yaml.
        device: That of the gradients.
    """
    scaler = GradScaler(device.type, enabled=precision == "fp16")
    # Creates the scale on `device`. By default it is where the loss is, which with cpu_offload is a GPU: `unscale_`
    # would then read it on the CPU before its asynchronous copy has arrived.
    scaler.scale(torch.zeros((), device=device))
    return scaler


def scaler_state(scaler: GradScaler) -> ScalerState:
    """What a checkpoint keeps of a scaler."""
    return ScalerState(scaler.get_scale(), scaler.state_dict().get(_GROWTH_TRACKER, 0))


def load_scaler_state(scaler: GradScaler, state: ScalerState) -> None:
    """Continue where `scaler_state` was called."""
    if scaler.is_enabled():
        scaler.load_state_dict({**scaler.state_dict(), "scale": state.scale, _GROWTH_TRACKER: state.good_steps})
