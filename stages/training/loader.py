"""The batches of each step, as the forward passes of one rank.

Which rows a step uses is a function of the step alone (stages/training/order.py), not of the number of ranks: so a
resume is an index, and the loader keeps no state that a checkpoint would have to save. With T = `total_batch_size`,
B = `batch_size` and R ranks, the T rows of a step are dealt out like this (T = 12, B = 2, R = 2):

    rows of the step    r0 r1 | r2 r3 | r4 r5 | r6 r7 | r8 r9 | r10 r11
    rank                  0       1       0       1       0       1
    forward pass          0       0       1       1       2       2

A thread makes the batches of the next step while the device computes this one, in pinned memory if that is a GPU. One
step ahead is enough, as the rows are memory-mapped; and a thread instead of worker processes, as it has little to do.
"""

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from stages.forward.batch import count_labels, read_batch
from stages.forward.distributed import device_type
from stages.forward.rows import TokenRows
from stages.forward.transfer import pinned, to_device
from stages.training.order import step_rows
from stages.training.params import TrainParams


class StepBatches(NamedTuple):
    """The batches of one rank for one optimizer step."""

    batches: list[dict[str, Tensor]]
    """`grad_accum_steps` of them, each of `batch_size` rows."""
    num_labels: int
    """How many of their tokens are predicted: counted before they are on a GPU, which would have to be waited for."""


class BatchLoader:
    """Makes the batches of this rank."""

    def __init__(self, rows: TokenRows, params: TrainParams, eos_token_id: int, lengths: bool = False) -> None:
        """`lengths`: as for `make_batch`."""
        self._rows = rows
        self._params = params
        self._eos_token_id = eos_token_id
        # A new thread uses the first GPU, whichever is this rank's, and would pin memory for that one.
        on_gpu = torch.cuda.is_available()
        setup = (torch.cuda.set_device, (torch.cuda.current_device(),)) if on_gpu else (None, ())
        self._thread = ThreadPoolExecutor(1, "loader", *setup)  # started by the first step
        self._ahead: dict[int, Future[StepBatches]] = {}
        self._lengths = lengths

    def step_batches(self, step: int) -> StepBatches:
        """The batches of this rank for optimizer step `step`, on the device; those of the next one are made meanwhile.

        Raises:
            StageError: an error of the thread.
        """
        made = self._ahead.pop(step, None) or self._thread.submit(self._make, step)
        # After the last step they are not used.
        self._ahead = {step + 1: self._thread.submit(self._make, step + 1)}
        batches, num_labels = made.result()
        return StepBatches([to_device(batch, device_type()) for batch in batches], num_labels)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def step_indices(self, step: int) -> NDArray[np.int64]:
        """The indices of the rows of a step: (grad_accum_steps, batch_size) int64."""
        params, rank = self._params, dist.get_rank()
        indices = step_rows(step, params.total_batch_size, len(self._rows), params.seed)  # (total_batch_size,)
        return indices.reshape(-1, dist.get_world_size(), params.batch_size)[:, rank]

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """This rank's share of the rows that a validation measures: the same rows for any number of ranks.

        Every rank gets as many batches, because each forward pass is a collective operation: past the end the last row
        is repeated, with labels that do not count.
        """
        rows, size, rank = self.validation_rows, self._params.rows_per_validation_pass, dist.get_rank()
        for number in range(self.num_validation_batches):
            start = (number * dist.get_world_size() + rank) * size
            own = np.arange(start, start + size)
            batch = self._batch(rows[np.minimum(own, len(rows) - 1)])
            batch["labels"].view(size, -1)[torch.from_numpy(own >= len(rows))] = -100
            yield to_device(batch, device_type())

    @property
    def validation_rows(self) -> NDArray[np.int64]:
        """The indices of the rows that a validation measures."""
        return self._rows.spread(self._params.eval_rows)

    @property
    def num_validation_batches(self) -> int:
        """Forward passes of each rank in a validation."""
        return math.ceil(len(self.validation_rows) / (self._params.rows_per_validation_pass * dist.get_world_size()))

    def _make(self, step: int) -> StepBatches:
        batches = [pinned(self._batch(indices)) for indices in self.step_indices(step)]
        return StepBatches(batches, sum(map(count_labels, batches)))

    def _batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        return read_batch(self._rows, indices, self._eos_token_id, self._params.document_mask, self._lengths)
