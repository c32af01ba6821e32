"""How the loss of a model is computed: whether its LM head can do it."""

from pathlib import Path
from typing import Literal, NamedTuple

import torch

from stages.base.errors import StageError
from stages.forward.loss import obstacle_to_fuse
from stages.model import meta


class LossChoice(NamedTuple):
    """How the loss is computed."""

    name: Literal["fused", "plain"]
    reason: str | None
    """Why not fused, where `auto` would have preferred that."""


def choose_loss(loss: Literal["auto", "fused", "plain"], directory: Path) -> LossChoice:
    """Decide how the loss is computed.

    Args:
        loss: As in params.yaml.
        directory: Of the model.

    Raises:
        StageError: `loss` is fused, which the model does not allow.
    """
    if loss == "plain":
        return LossChoice("plain", None)
    model = meta.build(directory, dtype=torch.bfloat16)  # torch knows the shapes of grouped products in bf16 alone
    reason = obstacle_to_fuse(model)
    if loss == "fused" and reason:
        raise StageError(f"loss fused is not possible with {type(model).__name__}: {reason}; use loss auto or plain")
    return LossChoice("plain" if reason else "fused", reason)
