"""How exactly the training computes: dtypes, TF32, float8, sums in a fixed order, and the loss scale of fp16.

The weights that the optimizer updates, and the gradients summed over the ranks, are fp32 in any case.
"""

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import MixedPrecisionPolicy

from stages.base.errors import StageError
from stages.model.dtypes import PRECISIONS
from stages.training.params import TrainParams

_GROWTH_TRACKER = "_growth_tracker"  # in the state dict of a GradScaler


def mixed_precision_policy(precision: str) -> MixedPrecisionPolicy:
    """What FSDP2 casts gathered weights and the inputs of the model to."""
    if precision == "fp32":
        return MixedPrecisionPolicy()
    # By default FSDP2 reduces in `param_dtype`: a sum over many ranks in bf16 would lose the small gradients.
    return MixedPrecisionPolicy(param_dtype=compute_dtype(precision), reduce_dtype=torch.float32)


def compute_dtype(precision: str) -> torch.dtype:
    """What the layers compute in: with fp8 bf16, except for matrix products."""
    dtype: torch.dtype = getattr(torch, PRECISIONS["bf16" if precision == "fp8" else precision])
    return dtype


def check_precision(params: TrainParams, seq_length: int) -> None:
    """Check that the GPUs can compute in `precision`.

    Raises:
        StageError: fp8 on a CPU or on GPUs that cannot multiply matrices in 8 bits, or with a batch that they cannot.
    """
    if params.precision != "fp8":
        return
    devices = range(torch.cuda.device_count())
    unfit = [torch.cuda.get_device_name(device) for device in devices if not _has_float8(device)]
    if unfit or not devices:
        raise StageError(
            "precision fp8 needs GPUs of compute capability 8.9 or higher (Ada, Hopper and newer), "
            f"not {unfit[0] if unfit else 'CPUs'}: use bf16"
        )
    if params.batch_size * seq_length % 16:  # in the product that gives the gradient of a weight
        raise StageError(
            f"precision fp8 needs a multiple of 16 tokens per forward pass, not batch_size {params.batch_size} x "
            f"seq_length {seq_length}: use bf16, or another batch_size"
        )


def _has_float8(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


def set_float32_precision(tf32: bool) -> None:
    """Have GPUs multiply fp32 matrices in TF32, or in fp32. CPUs have no TF32, but oneDNN may use bf16 in its place."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32  # of convolutions, where it is the default


def use_deterministic_algorithms() -> None:
    """Have torch use only algorithms that give the same bits each time, and raise an error where there is none.

    Without it a GPU adds in an order that varies, as in the backward pass of attention and where an embedding gathers
    its gradient, so two runs differ by rounding. The part of cuBLAS and NCCL is in stages/training/environment.py.

    The flag reaches the kernels of attention: those of flash and memory-efficient attention then add up their gradients
    in a fixed order, and `sdpa` avoids cuDNN's. The compiler chooses no kernel by timing it.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    # It would fill all new memory with NaN, to show reads of what nobody has written: a pass over each tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


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


def scaler_state(scaler: GradScaler) -> tuple[float, int]:
    """What a checkpoint keeps of a scaler: the scale, and how many steps in a row were good since it was changed."""
    return scaler.get_scale(), scaler.state_dict().get(_GROWTH_TRACKER, 0)


def load_scaler_state(scaler: GradScaler, scale: float, good_steps: int) -> None:
    """Continue with what `scaler_state` returned."""
    if scaler.is_enabled():
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale, _GROWTH_TRACKER: good_steps})
