"""The dtypes of forward and backward pass, and the scale of the loss where they need one.

The weights that the optimizer updates, and the gradients summed over the ranks, are fp32 in any case.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from stages.artifacts.command import StageError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_GROWTH_INTERVAL = 2000
_MAX_SCALE = 2.0**24


def policy(precision: str) -> MixedPrecisionPolicy:
    """What FSDP2 casts gathered weights and the inputs of the model to."""
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype(precision), reduce_dtype=torch.float32)


def dtype(precision: str) -> torch.dtype:
    """What the layers compute in."""
    return _DTYPES[precision]


class LossScaler:
    """Keeps fp16 gradients within range: the loss is multiplied by `scale`, the gradient divided by it.

    The rule is that of `torch.amp.GradScaler`: where the gradient is not finite, the step is skipped and the scale
    halved; after 2000 good steps in a row it is doubled. Whether it is finite is read off its norm over all ranks, so
    that all of them decide alike. Scales are powers of 2, which round nothing. Other precisions have the scale 1.
    """

    def __init__(self, precision: str) -> None:
        self._enabled = precision == "fp16"
        self.scale = 2.0**16 if self._enabled else 1.0
        self.good_steps = 0
        """In a row, since the scale was changed."""
        self.skipped_steps = 0
        """Since the beginning of the training."""

    @torch.no_grad()
    def unscale(self, model: nn.Module) -> None:
        """Divide the gradients of a model by the scale, in place."""
        if self._enabled:
            torch._foreach_mul_([param.grad for param in model.parameters() if param.grad is not None], 1 / self.scale)

    def update(self, grad_norm: float, is_finite: bool) -> None:
        """Learn from the gradient of a step, before the weights are updated with it.

        Raises:
            StageError: it is not finite, and no smaller scale would help.
        """
        if not is_finite:
            if self.scale <= 1:
                raise StageError(
                    f"the gradient norm is {grad_norm}: lower lr, raise warmup_steps, or look at the data of this "
                    "step; the newest checkpoint is from before it"
                )
            self.scale, self.good_steps = self.scale / 2, 0
            self.skipped_steps += 1
        elif self._enabled:
            self.good_steps += 1
            if self.good_steps == _GROWTH_INTERVAL:
                self.scale, self.good_steps = min(2 * self.scale, _MAX_SCALE), 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {name: getattr(self, name) for name in ("scale", "good_steps", "skipped_steps")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called."""
        self.scale, self.good_steps, self.skipped_steps = state["scale"], state["good_steps"], state["skipped_steps"]
