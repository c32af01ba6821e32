"""One optimizer step, and one validation."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from stages.artifacts.errors import StageError
from stages.artifacts.model_files import CONFIG
from stages.model import meta
from stages.tokens.loss import total_loss, training_losses
from stages.training.distributed import all_reduce_sum, device_type
from stages.training.params import TrainParams
from stages.training.timers import Timers


class StepResult(NamedTuple):
    """What a step has measured. None where a value was not finite and the step was skipped (fp16)."""

    loss: float | None
    """Mean loss of the step, in nats per token; also None where no token of the step has a label."""
    grad_norm: float | None
    """L2 norm of the gradient, before clipping."""


def train_step(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler, batches: list[dict[str, Tensor]], num_labels: int,
    params: TrainParams, timers: Timers,
) -> StepResult:  # fmt: skip
    """Forward, backward and update.

    Every token of the step has the same weight, whatever the number of ranks and forward passes: each loss is divided
    by `num_labels`, the number of tokens that all ranks predict in this step, and gradients are summed over the ranks.
    Where there are none, as in rows of nothing but EOS, the gradient is 0. The router loss of a mixture of experts is
    not a sum over tokens: that of a forward pass has the weight of all its tokens together. With a single forward pass
    the gradient is the one of transformers' own loss.

    Raises:
        StageError: the gradient is not finite, on all ranks alike, and no smaller loss scale would help; the weights
            were not updated. Or the model should have a router loss and computed none.
    """
    router_loss_coef = meta.router_loss_coef(model)
    total = torch.zeros((), dtype=torch.float64, device=device_type())  # not read before the norm is
    assert isinstance(model, FSDPModule)
    for number, batch in enumerate(batches, start=1):
        # Copies of the model (HYBRID_SHARD, ddp) exchange gradients once per step, not once per forward pass.
        model.set_requires_all_reduce(number == len(batches))
        with timers.phase("forward"):
            loss, router_loss = training_losses(model, batch)
            total += loss.detach()  # without the router loss, as in validation
            if router_loss_coef:
                if not isinstance(router_loss, Tensor):
                    raise StageError(
                        f"{type(model).__name__} computes no router loss: set output_router_logits to false in its "
                        f"{CONFIG}"
                    )
                loss = loss + router_loss_coef * router_loss * (batch["labels"] != -100).sum()
        with timers.phase("backward"):
            scaler.scale(loss * (1 / max(1, num_labels))).backward()
    with timers.phase("update"):
        scaler.unscale_(optimizer)  # before clipping, which would otherwise compare the scaled norm with the limit
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), params.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # an all-reduce of the ranks' parts
        # The one place of a step where the CPU waits for the GPU: whether to update depends on the norm. It is the norm
        # over all ranks, so all of them decide alike.
        own_loss, grad_norm = torch.stack([total, norm.to(total)]).tolist()
        is_finite = math.isfinite(grad_norm)
        if not is_finite and scaler.get_scale() <= 1:  # in bf16 and fp32 always: the scale of a disabled scaler is 1
            raise StageError(
                f"the gradient norm is {grad_norm}: lower lr, raise warmup_steps, or look at the data of this step"
            )
        scaler.step(optimizer)  # skipped where the gradient is not finite
        scaler.update()
        optimizer.zero_grad()
        # After the update: a non-finite gradient has by now ended all ranks alike, so none is missing here.
        (loss_of_all,) = all_reduce_sum(own_loss)
    return StepResult(
        loss=loss_of_all / num_labels if num_labels and math.isfinite(loss_of_all) else None,
        grad_norm=grad_norm if is_finite else None,
    )


@torch.no_grad()
def validation_loss(
    model: nn.Module, batches: Iterable[dict[str, Tensor]], before_forward: Callable[[], None]
) -> float | None:
    """Mean loss over the validation batches of all ranks, in nats per token; None where they have no labels."""
    model.eval()
    total, num_labels = total_loss(model, batches, before_forward)
    model.train()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The root keeps its weights gathered for a backward pass, which does not come: a save would find them so.
            module.reshard()
    # Sums, not means: ranks have different numbers of labels, and some only repeated rows without any.
    total, num_labels_of_all = all_reduce_sum(total, num_labels)
    return total / num_labels_of_all if num_labels_of_all else None
