"""One optimizer step, and one validation."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from stages.training.batch import loss_sum, make_batch, num_labels
from stages.training.data import TokenRows
from stages.training.distributed import all_reduce_sum, device_type
from stages.training.order import step_rows
from stages.training.params import TrainParams
from stages.training.precision import LossScaler
from stages.training.telemetry import Timers


class Batches:
    """The rows of each step, as the forward passes of one rank.

    Which rows a step takes does not depend on the number of ranks; which of them a rank takes does.
    """

    def __init__(self, rows: TokenRows, params: TrainParams, eos_token_id: int) -> None:
        self._rows = rows
        self._params = params
        self._eos_token_id = eos_token_id

    def of_step(self, step: int) -> list[dict[str, Tensor]]:
        """The batches of this rank for optimizer step `step`: `grad_accum_steps` of `batch_size` rows."""
        return [self._batch(part) for part in self.rows_of_step(step)]

    def rows_of_step(self, step: int) -> np.typing.NDArray[np.int64]:
        """The indices of these rows: (grad_accum_steps, batch_size)."""
        params, rank = self._params, dist.get_rank()
        indices = step_rows(step, params.total_batch_size, len(self._rows), params.seed)
        return indices.reshape(-1, dist.get_world_size(), params.batch_size)[:, rank]

    def of_validation(self) -> Iterator[dict[str, Tensor]]:
        """This rank's share of all rows. Every rank gets as many batches, for each is a collective operation."""
        size, world_size, rank = self._params.batch_size, dist.get_world_size(), dist.get_rank()
        for start in range(0, len(self._rows), size * world_size):
            own = np.arange(start + rank * size, start + (rank + 1) * size)
            batch = self._batch(np.minimum(own, len(self._rows) - 1))
            batch["labels"][torch.from_numpy(own >= len(self._rows)).to(batch["labels"].device)] = -100
            yield batch

    def _batch(self, indices: np.typing.NDArray[np.int64]) -> dict[str, Tensor]:
        rows = torch.from_numpy(self._rows.rows(indices)).to(device_type(), non_blocking=True)
        return make_batch(rows, self._eos_token_id, self._params.document_mask)


def train_step(
    model: nn.Module, optimizer: Optimizer, scaler: LossScaler, batches: list[dict[str, Tensor]], labels: int,
    params: TrainParams, timers: Timers,
) -> tuple[float | None, float | None]:  # fmt: skip
    """Forward, backward and update.

    Every token of the step weighs the same, whatever the number of ranks and forward passes: each loss is divided by
    `labels`, the number of tokens predicted by all ranks in this step.

    Returns:
        Mean loss of the step in nats a token, and the L2 norm of its gradient before clipping; None where they are not
        finite and `scaler` had the step skipped.

    Raises:
        StageError: the gradient is not finite, on all ranks alike; the weights were not updated.
    """
    total = torch.zeros((), dtype=torch.float64, device=device_type())
    assert isinstance(model, FSDPModule)
    for number, batch in enumerate(batches, start=1):
        model.set_requires_all_reduce(number == len(batches))  # over the copies of the model, once a step
        with timers.phase("forward"):
            loss = loss_sum(model, batch)
        with timers.phase("backward"):
            (loss * (scaler.scale / labels)).backward()
        total += loss.detach()
    with timers.phase("update"):
        scaler.unscale(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), params.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # Here the CPU waits for the GPU.
        own_loss, grad_norm = torch.stack([total, norm.to(total)]).tolist()
        is_finite = math.isfinite(grad_norm)
        scaler.update(grad_norm, is_finite)
        if not is_finite:
            optimizer.zero_grad()  # and without gradients, no weight is updated
        optimizer.step()
        optimizer.zero_grad()
    (loss_of_all,) = all_reduce_sum(own_loss)
    return loss_of_all / labels if math.isfinite(loss_of_all) else None, grad_norm if is_finite else None


@torch.no_grad()
def validation_loss(model: nn.Module, batches: Batches, note: Callable[[], None]) -> float | None:
    """Mean loss over all validation rows, in nats a token; None where there are no rows.

    `note` is called before each forward pass.
    """
    model.eval()
    total, labels = 0.0, 0
    for batch in batches.of_validation():
        note()
        total += loss_sum(model, batch).item()
        labels += num_labels(batch)
    model.train()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what stays gathered for a backward pass
    total, count = all_reduce_sum(total, labels)
    return total / count if count else None
