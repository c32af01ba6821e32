"""One optimizer step, and one validation."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from stages.base.errors import StageError
from stages.forward.distributed import all_reduce_sum
from stages.forward.loss import losses, training_losses
from stages.forward.transfer import Readback
from stages.model import meta
from stages.model.files import CONFIG
from stages.training.params import TrainParams


class StepResult(NamedTuple):
    """What a step has measured. None where a value was not finite and the step was skipped (fp16)."""

    loss: float | None
    """Mean loss of the step, in nats per token; also None where no token of the step has a label."""
    grad_norm: float | None
    """L2 norm of the gradient, before clipping."""


class Validation(NamedTuple):
    """What a validation has measured, in nats per token; None where there are no labels."""

    loss: float | None
    """Mean over all tokens, whatever shares the training gives the sources."""
    of_sources: dict[str, float | None]
    """None: the rows are of all files."""
    num_rows: int


class UnreadStep:
    """A step that is queued, and whose numbers are on their way from the device."""

    def __init__(self, step: int, num_labels: int, numbers: Tensor) -> None:
        """`numbers` and `num_labels` are what `train_step` has returned, and was given."""
        self.step = step
        self._num_labels = num_labels
        self._numbers = Readback(numbers)

    def read(self) -> tuple[float, float | None]:
        """The loss sum of this rank and the gradient norm, which is None where the step was skipped (fp16).

        Raises:
            StageError: the gradient is not finite, on all ranks alike, and no smaller loss scale would help. The
                weights are those of before the step.
        """
        own_loss, grad_norm, scale = self._numbers.read()
        if math.isfinite(grad_norm):
            return own_loss, grad_norm
        if scale <= 1:  # in bf16 and fp32 always
            raise StageError(
                f"the gradient norm is {grad_norm}: lower lr, raise warmup_steps, or look at the data of this step"
            )
        return own_loss, None

    def result(self, loss_of_all: float, grad_norm: float | None) -> StepResult:
        """The result, given the loss sum of all ranks."""
        is_known = self._num_labels and math.isfinite(loss_of_all)
        return StepResult(loss_of_all / self._num_labels if is_known else None, grad_norm)


def train_step(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler, batches: list[dict[str, Tensor]], num_labels: int,
    params: TrainParams, phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> Tensor:  # fmt: skip
    """Queue forward pass, backward pass and update: the CPU waits for nothing that the device computes.

    Every token of the step has the same weight, whatever the number of ranks and forward passes: each loss is divided
    by `num_labels`, the number of tokens that all ranks predict in this step, and gradients are summed over the ranks.
    Where there are none, as in rows of nothing but EOS, the gradient is 0. The router loss of a mixture of experts is
    not a sum over tokens: that of a forward pass has the weight of all its tokens together. With a single forward pass
    the gradient is the one of transformers' own loss.

    Where the gradient is not finite, weights, moments and step counters stay as they are, bit for bit.

    Returns:
        (3,) float64, on the device: the loss of this rank in nats, summed over its labels; the L2 norm of the gradient
        of all ranks, before clipping; the loss scale, 1 where it is not used. `UnreadStep` reads them.

    Raises:
        StageError: the model should have a router loss and computed none.
    """
    router_loss_coef = meta.router_loss_coef(model)
    total = torch.zeros((), dtype=torch.float64, device=batches[0]["labels"].device)
    assert isinstance(model, FSDPModule)
    for number, batch in enumerate(batches, start=1):
        # Copies of the model (HYBRID_SHARD, ddp) exchange gradients once per step, not once per forward pass.
        model.set_requires_all_reduce(number == len(batches))
        with phase("forward"):
            loss, router_loss = training_losses(model, batch)
            total += loss.detach()  # without the router loss, as in validation
            if router_loss_coef:
                if not isinstance(router_loss, Tensor):
                    raise StageError(
                        f"{type(model).__name__} computes no router loss: set output_router_logits to false in its "
                        f"{CONFIG}"
                    )
                loss = loss + router_loss_coef * router_loss * (batch["labels"] != -100).sum()
        with phase("backward"):
            scaler.scale(loss * (1 / max(1, num_labels))).backward()
    with phase("update"):
        scaler.unscale_(optimizer)  # before clipping, which would otherwise compare the scaled norm with the limit
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), params.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # an all-reduce of the ranks' parts
        scale = scaler.scale(torch.ones_like(norm))  # of this step; reading it would wait
        # The device decides whether to update, by GradScaler's protocol: the optimizer's kernel does nothing where
        # `found_inf` is 1. The norm is that over all ranks, so all of them decide alike. An enabled scaler, which is
        # that of fp16, sets its own `found_inf`.
        optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return torch.stack([total, norm.to(total), scale.to(total)])


@torch.no_grad()
def validate(
    model: nn.Module, batches: Iterable[tuple[str, dict[str, Tensor]]], num_rows: Mapping[str, int],
    before_forward: Callable[[], None],
) -> Validation:  # fmt: skip
    """Measure the validation batches of all ranks, each of one source; a collective.

    Args:
        model: That of the training.
        batches: Of this rank, with the source of each.
        num_rows: Of each source, on all ranks.
        before_forward: Called before each forward pass.
    """
    model.eval()
    sums = {source: [0.0, 0.0] for source in num_rows}  # nats and labels
    measured: list[str] = []

    def of_sources() -> Iterator[dict[str, Tensor]]:
        for source, batch in batches:
            measured.append(source)
            yield batch

    for number, (nats, labels) in enumerate(losses(model, of_sources(), before_forward)):
        total = sums[measured[number]]
        total[0] += nats  # in Python, in double precision
        total[1] += labels
    model.train()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The root keeps its weights gathered for a backward pass, which does not come: a save would find them so.
            module.reshard()
    # Sums, not means: ranks have different numbers of labels, and some only repeated rows without any.
    summed = all_reduce_sum(*chain.from_iterable(sums.values()))
    of_source = {name: _mean(*pair) for name, *pair in zip(sums, summed[::2], summed[1::2], strict=True) if name}
    return Validation(_mean(sum(summed[::2]), sum(summed[1::2])), of_source, sum(num_rows.values()))


def _mean(nats: float, num_labels: float) -> float | None:
    return nats / num_labels if num_labels else None
