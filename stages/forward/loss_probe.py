"""How the loss of a model is computed: whether its LM head can do it, tested before the model is used.

`fuse` is right as long as a model returns what its LM head does. So a tiny random model of the architecture is
tested: its loss and its gradients must be those of its logits.
"""

import copy
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from stages.base.errors import StageError, one_line
from stages.forward.batch import make_batch
from stages.forward.isolated import isolated
from stages.forward.loss import obstacle_to_fuse
from stages.forward.small_copy import VOCAB_SIZE, small_config


class LossChoice(NamedTuple):
    """How the loss is computed."""

    name: Literal["fused", "plain"]
    reason: str | None
    """Why not fused, where `auto` would have preferred that."""


def choose_loss(
    loss: Literal["auto", "fused", "plain"], directory: Path, dtype: torch.dtype, device: str
) -> LossChoice:  # fmt: skip
    """Decide how the loss is computed. Seeds the random number generator of torch.

    Args:
        loss: As in params.yaml.
        directory: Of the model.
        dtype: Of the computation.
        device: `cuda` or `cpu`.

    Raises:
        StageError: `loss` is fused, which the model does not allow.
    """
    if loss == "plain":
        return LossChoice("plain", None)
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    try:
        reason = isolated(device, _obstacle, config, dtype, device)
    except RuntimeError as error:
        reason = f"a small copy of it cannot be tested ({error})"
    if loss == "fused" and reason:
        architecture = (config.architectures or [config.model_type])[0]
        raise StageError(f"loss fused is not possible with {architecture}: {reason}; use loss auto or plain")
    return LossChoice("plain" if reason else "fused", reason)


def _obstacle(config: PreTrainedConfig, dtype: torch.dtype, device: str) -> str | None:
    """What `obstacle_to_fuse` returns for a tiny model."""
    small = small_config(config)
    if small is None:
        return "no small copy of the model computes, with which it could be tested"
    try:
        # In fp32 differences are not rounding; and with the device and the dtype of the computation, its kernels.
        for where, kind in dict.fromkeys([("cpu", torch.float32), (device, dtype)]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(copy.deepcopy(small), trust_remote_code=False)
            model = model.to(where, kind).eval()
            rows = torch.randint(1, VOCAB_SIZE - 1, (2, 16), device=where)  # (B, T)
            if reason := obstacle_to_fuse(model, make_batch(rows, eos_token_id=0, document_mask=False)):
                return reason
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"a small copy of it cannot be tested ({type(error).__name__}: {one_line(error)})"
    return None
