"""The batches of each step, as the forward passes of one rank.

Which rows a step uses is a function of the step alone (order.py), not of the number of ranks: so a resume is an index,
and the loader keeps no state that a checkpoint would have to save. With T = `total_batch_size`, B = `batch_size` and R
ranks, the T rows of a step are dealt out like this (T = 12, B = 2, R = 2):

    rows of the step    r0 r1 | r2 r3 | r4 r5 | r6 r7 | r8 r9 | r10 r11
    rank                  0       1       0       1       0       1
    forward pass          0       0       1       1       2       2

With attention `padded` a step has forward passes of documents in their place, mostly a few more. All ranks find the
same ones in the rows of the step, and deal them out in the same way.

With `context_parallel`, so many consecutive ranks have the rows of one, and each of them a slice of their tokens.

A thread makes the batches of the next step while the device computes this one, in pinned memory if that is a GPU. One
step ahead is enough, as the rows are memory-mapped; and a thread instead of worker processes, as it has little to do.
"""

import math
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from stages.forward.batch import count_labels, read_batch
from stages.forward.context import Context, cut
from stages.forward.distributed import device_type
from stages.forward.padded import count_tokens, padded_batches
from stages.forward.rows import TokenRows
from stages.forward.transfer import own_thread, pinned, to_device
from stages.training.order import RowOrder
from stages.training.params import TrainParams

_SAMPLE = 2**20
"""Tokens in which padding is counted, at most, if they are more than one step."""


class StepBatches(NamedTuple):
    """The batches of one rank for one optimizer step."""

    batches: list[dict[str, Tensor]]
    """`grad_accum_steps` of them, each of `batch_size` rows; or of padded documents, on all ranks as many."""
    num_labels: int
    """How many of their tokens are predicted: counted before they are on a GPU, which would have to be waited for."""


class Padding(NamedTuple):
    """What padded documents cost."""

    share: float
    """Of the tokens in the forward passes that are padding, from 0 to 1."""
    most_sequences: tuple[int, int]
    """The shape (N, L) of the forward pass with the most sequences."""


class BatchLoader:
    """Makes the batches of this rank."""

    def __init__(
        self, rows: TokenRows, params: TrainParams, eos_token_id: int, router_loss: bool = False,
        context: Context | None = None,
    ) -> None:  # fmt: skip
        """Starts no thread yet.

        Args:
            rows: To take the batches from.
            params: With the attention that was chosen.
            eos_token_id: As for `make_batch`.
            router_loss: Whether the model has one that is trained.
            context: The `params.context_parallel` ranks that share each row with this one; None: there are none.
        """
        self._rows = rows
        self._params = params
        self._eos_token_id = eos_token_id
        self._router_loss = router_loss
        self._context = context
        self.order = RowOrder(params, len(rows), rows.sources)
        """Of training rows; not of those of a validation."""
        self._thread = own_thread("loader")  # which pins memory
        self._ahead: dict[int, Future[StepBatches]] = {}

    def step_batches(self, steps_done: int) -> StepBatches:
        """The batches of this rank for the optimizer step after `steps_done` ones, on the device.

        Those of the step after it are made meanwhile.

        Raises:
            StageError: an error of the thread.
        """
        made = self._ahead.pop(steps_done, None) or self._thread.submit(self._make, steps_done)
        # After the last step they are not used.
        self._ahead = {steps_done + 1: self._thread.submit(self._make, steps_done + 1)}
        batches, num_labels = made.result()
        return StepBatches([to_device(batch, device_type()) for batch in batches], num_labels)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def step_indices(self, steps_done: int) -> NDArray[np.int64]:
        """The indices of the rows of a step: (grad_accum_steps, batch_size) int64."""
        indices = self.order.step(steps_done)
        return indices.reshape(-1, self._dp_world_size, self._params.batch_size)[:, self._dp_rank]

    def validation_batches(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """This rank's share of the rows that a validation measures, each batch with the source of all of its rows.

        They are the same rows for any number of ranks. Every rank gets as many batches, because each forward pass is a
        collective operation: past the end the last row is repeated, with labels that do not count.
        """
        for source, rows in self.validation_rows.items():
            for batch in self._validation_batches(rows):
                yield source, to_device(batch, device_type())

    def _validation_batches(self, rows: NDArray[np.int64]) -> Iterator[dict[str, Tensor]]:
        size = self._params.rows_per_validation_pass
        if self._params.attention == "padded":
            for start in range(0, len(rows), self._params.total_batch_size):  # as many at a time as in a step
                yield from self._own_padded(rows[start : start + self._params.total_batch_size], size)
            return
        for number in range(math.ceil(len(rows) / (size * self._dp_world_size))):
            start = (number * self._dp_world_size + self._dp_rank) * size
            own = np.arange(start, start + size)
            batch = self._batch(rows[np.minimum(own, len(rows) - 1)])
            batch["labels"].view(size, -1)[torch.from_numpy(own >= len(rows))] = -100
            yield self._own(batch)

    @property
    def validation_rows(self) -> dict[str, NDArray[np.int64]]:
        """The indices of the rows that a validation measures, by source: `TokenRows.spread`."""
        return self._rows.spread(self._params.eval_rows)

    def padding(self, num_ranks: int) -> "Padding":
        """What padded documents cost on a number of ranks, in the first steps."""
        num_tokens, shapes = 0, []
        for steps_done in range(1 + min(20, _SAMPLE // (self._params.total_batch_size * self._rows.seq_length))):
            batch = self._batch(self.order.step(steps_done))
            num_tokens += count_tokens(batch)
            padded = self._padded(batch, self._params.batch_size, num_ranks, None)
            shapes += [made["input_ids"].shape for made in padded]
        num_sequences, length = max(shapes)
        return Padding(1 - num_tokens / sum(map(math.prod, shapes)), (num_sequences, length))

    def _make(self, steps_done: int) -> StepBatches:
        if self._params.attention == "padded":
            batches = self._own_padded(self.order.step(steps_done), self._params.batch_size)
        else:
            batches = [self._own(self._batch(indices)) for indices in self.step_indices(steps_done)]
        return StepBatches([pinned(batch) for batch in batches], sum(map(count_labels, batches)))

    @property
    def _dp_world_size(self) -> int:
        """How many groups of ranks have rows of their own."""
        return dist.get_world_size() // self._params.context_parallel

    @property
    def _dp_rank(self) -> int:
        """The number of this rank's group."""
        return dist.get_rank() // self._params.context_parallel

    def _own(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's slice of the batch of its group."""
        return cut(batch, dist.get_rank() % self._context.size, self._context) if self._context else batch

    def _batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        lengths = self._params.attention == "varlen"
        return read_batch(self._rows, indices, self._eos_token_id, self._params.document_mask, lengths)

    def _padded(
        self, batch: dict[str, Tensor], batch_size: int, num_ranks: int, rank: int | None
    ) -> list[dict[str, Tensor]]:
        """The forward passes of a rank, or of all, of padded documents; `batch` has the rows of all ranks."""
        max_tokens = batch_size * self._rows.seq_length
        multiple = 16 if self._params.precision == "fp8" else 1  # of tokens, as `check_precision` asks of rows
        return padded_batches(batch, max_tokens, num_ranks, multiple, self._router_loss, rank)

    def _own_padded(self, indices: NDArray[np.int64], batch_size: int) -> list[dict[str, Tensor]]:
        # All rows are read, as their documents are dealt out by length; only the own ones are padded.
        return self._padded(self._batch(indices), batch_size, dist.get_world_size(), dist.get_rank())
