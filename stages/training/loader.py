"""The batches of each step, as the forward passes of one rank.

Which rows a step uses is a function of the step alone (stages/tokens/order.py), not of the number of ranks: so a
resume is an index, and the loader keeps no state that a checkpoint would have to save. With T = `total_batch_size`,
B = `batch_size` and R ranks, the T rows of a step are dealt out like this (T = 12, B = 2, R = 2):

    rows of the step    r0 r1 | r2 r3 | r4 r5 | r6 r7 | r8 r9 | r10 r11
    rank                  0       1       0       1       0       1
    forward pass          0       0       1       1       2       2

Nothing is read ahead, and there are no worker processes: the rows are memory-mapped. On two cores the training has
100 % (93 to 106 %) of the tokens/s of a loop that has all its batches ready in memory (docs/benchmarks.md).
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from stages.tokens.batch import make_batch
from stages.tokens.order import step_rows
from stages.tokens.rows import TokenRows
from stages.training.distributed import device_type
from stages.training.params import TrainParams


class BatchLoader:
    """Makes the batches of this rank."""

    def __init__(self, rows: TokenRows, params: TrainParams, eos_token_id: int) -> None:
        self._rows = rows
        self._params = params
        self._eos_token_id = eos_token_id

    def step_batches(self, step: int) -> list[dict[str, Tensor]]:
        """The batches of this rank for optimizer step `step`: `grad_accum_steps` of `batch_size` rows."""
        return [self._batch(indices) for indices in self.step_indices(step)]

    def step_indices(self, step: int) -> NDArray[np.int64]:
        """The indices of their rows: (grad_accum_steps, batch_size) int64."""
        params, rank = self._params, dist.get_rank()
        indices = step_rows(step, params.total_batch_size, len(self._rows), params.seed)  # (total_batch_size,)
        return indices.reshape(-1, dist.get_world_size(), params.batch_size)[:, rank]

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """This rank's share of the rows that a validation measures: the same rows for any number of ranks.

        Every rank gets as many batches, because each forward pass is a collective operation: past the end the last row
        is repeated, with labels that do not count.
        """
        rows, size, rank = self.validation_rows, self._params.batch_size, dist.get_rank()
        for number in range(self.num_validation_batches):
            start = (number * dist.get_world_size() + rank) * size
            own = np.arange(start, start + size)
            batch = self._batch(rows[np.minimum(own, len(rows) - 1)])
            batch["labels"][torch.from_numpy(own >= len(rows)).to(batch["labels"].device)] = -100
            yield batch

    @property
    def validation_rows(self) -> NDArray[np.int64]:
        """The indices of the rows that a validation measures."""
        return self._rows.spread(self._params.eval_rows)

    @property
    def num_validation_batches(self) -> int:
        """Forward passes of each rank in a validation."""
        return math.ceil(len(self.validation_rows) / (self._params.batch_size * dist.get_world_size()))

    def _batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        rows = torch.from_numpy(self._rows.rows(indices)).to(device_type(), non_blocking=True)  # (B, T) int32
        return make_batch(rows, self._eos_token_id, self._params.document_mask)
