"""How exactly the training computes: TF32, float8, sums in a fixed order, and the loss scale of fp16.

The weights that the optimizer updates, and the gradients summed over the ranks, are fp32 in any case.
"""

import torch
from torch.amp import GradScaler

from stages.base.errors import StageError
from stages.training.params import TrainParams

_GROWTH_TRACKER = "_growth_tracker"  # in the state dict of a GradScaler


def check_precision(params: TrainParams, seq_length: int) -> None:
    """Check that the GPUs can compute in `precision`.

    Raises:
        StageError: fp8 on a CPU or on GPUs that cannot multiply matrices in 8 bits, or with a batch that they cannot;
            fp32 on GPUs with `context_parallel`.
    """
    if torch.cuda.is_available():
        params.check_context_on_gpus()
    if params.precision != "fp8":
        return
    devices = range(torch.cuda.device_count())
    unfit = [torch.cuda.get_device_name(each) for each in devices if torch.cuda.get_device_capability(each) < (8, 9)]
    if unfit or not devices:
        raise StageError(
            "precision fp8 needs GPUs of compute capability 8.9 or higher (Ada, Hopper and newer), "
            f"not {unfit[0] if unfit else 'CPUs'}: use bf16"
        )
    params.check_tokens(seq_length)


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
