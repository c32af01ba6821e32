"""Which rows of the data each step uses: a function of `seed` and position alone.

Position g of the whole training is row `permutation_e(g mod n)` of epoch e = g // n, so every row is used once in each
epoch, whatever the batch size and the number of ranks, and a resume is an index.

The permutation is never stored, whatever the number of rows: it is a Feistel network over the smallest 2k-bit
range that holds n, walked until the result is below n again (cycle walking; Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", 2002). Its round function is one step of SplitMix64 (Steele, Lea and Flood, 2014). Unlike a
library's shuffle it also stays the same from one release to the next.

Where several sources are mixed by shares, the source of each row is computed too, not drawn. At every position each
source has been used within one row of its share (Tijdeman, "The chairman assignment problem", 1980). Shares are
fractions with a common denominator D, so the order of the sources repeats after D rows: a table of one period answers
for any position, whatever the number of rows.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stages.base.errors import StageError
from stages.base.splitmix64 import next_value
from stages.training.params import TrainParams

LARGEST_PERIOD = 100_000
"""Rows. Five decimals of a share are more than anybody can measure."""

_ROUNDS = 6


def shuffled(positions: NDArray[np.int64], num_rows: int, seed: int) -> NDArray[np.int64]:
    """The rows at `positions` of a training, (n,): all are permuted anew in each epoch."""
    rows = np.empty_like(positions)
    epochs = positions // num_rows  # a step may end one epoch and begin the next; no row is dropped between them
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        rows[inside] = permute(positions[inside] % num_rows, num_rows, seed, int(epoch))
    return rows


def permute(indices: NDArray[np.int64], num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where the permutation of `range(num_rows)` that belongs to `seed` and `epoch` sends `indices`."""
    # Both halves have the same number of bits, so the range is at most four times `num_rows`: on average an index is
    # below it after at most four walks.
    half_bits = np.uint64(max(1, ((num_rows - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    # The seed is mixed before the epoch is added: otherwise epoch 1 of seed 0 would be epoch 0 of seed 1.
    key = next_value(next_value(np.array([seed], dtype=np.uint64)) + np.uint64(epoch))
    keys = [next_value(key + np.uint64(number)) for number in range(1, _ROUNDS + 1)]

    values = indices.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():  # ends: walking a permutation from a start below `num_rows` returns there at the latest
        walked = values[outside]
        left, right = walked >> half_bits, walked & mask
        for round_key in keys:
            left, right = right, left ^ (next_value(right ^ round_key) & mask)
        values[outside] = (left << half_bits) | right
        outside = values >= num_rows
    return values.astype(np.int64)


class SourceRows(NamedTuple):
    """The rows at some positions of a training."""

    sources: NDArray[np.int64]
    """(n,): indices of sources."""
    numbers: NDArray[np.int64]
    """(n,): how many rows of that source stand before."""


class Mixture:
    """The order of the sources."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        """`shares` of the rows, by source; their sum need not be 1.

        Raises:
            ValueError: they have no common denominator up to `LARGEST_PERIOD`.
        """
        fractions = [Fraction(repr(share)) for share in shares.values()]  # 0.7 is seven tenths, as it was typed
        total = sum(fractions)
        normalized = [fraction / total for fraction in fractions]
        self.period = math.lcm(*(fraction.denominator for fraction in normalized))
        if self.period > LARGEST_PERIOD:
            raise ValueError(
                f"the shares have the common denominator {self.period:,}, and {LARGEST_PERIOD:,} is the largest: round "
                "them to fewer digits"
            )
        self.counts = np.array([int(fraction * self.period) for fraction in normalized], np.int64)
        """(k,): the rows of each source in a period."""

    @cached_property
    def _table(self) -> SourceRows:
        """One period: the earliest deadline first, among the sources that may be used already."""
        used = [index for index, count in enumerate(self.counts) if count]
        counts = self.counts[used]  # (k,)
        slack = max(1, 2 * len(used) - 2)  # no source is ever further from its share than 1 - 1 / slack
        taken = np.zeros(len(used), np.int64)
        order = np.empty(self.period, np.int64)
        numbers = np.empty(self.period, np.int64)
        for position in range(self.period):
            is_due = slack * ((position + 1) * counts - taken * self.period) >= (self.period if len(used) > 1 else 0)
            deadlines = np.where(is_due, (slack * taken + slack - 1) / counts, np.inf)
            chosen = int(deadlines.argmin())
            order[position], numbers[position] = used[chosen], taken[chosen]
            taken[chosen] += 1
        return SourceRows(order, numbers)

    def used(self, position: int) -> NDArray[np.int64]:
        """How many rows of each source stand before a position of the training: (k,)."""
        periods, rest = divmod(position, self.period)
        return periods * self.counts + np.bincount(self._table.sources[:rest], minlength=len(self.counts))

    def rows_at(self, positions: NDArray[np.int64]) -> SourceRows:
        """The sources at `positions` of the training, and the numbers of their rows."""
        table = self._table
        periods, rest = np.divmod(positions, self.period)
        sources = table.sources[rest]
        return SourceRows(sources, periods * self.counts[sources] + table.numbers[rest])


class RowOrder:
    """Which rows each step uses: a function of the parameters, the position and the numbers of rows alone."""

    def __init__(self, params: TrainParams, num_rows: int, sources: Mapping[str, int]) -> None:
        """Imports no torch.

        Args:
            params: Those of the training.
            num_rows: Of all sources.
            sources: The rows of each, in the order of the rows; none: they are of all files.

        Raises:
            StageError: `mixture` or `max_repeats` do not fit the sources.
        """
        self._params = params
        self.num_rows = num_rows
        """Of an epoch: of all sources that have a share."""
        self._mixture: Mixture | None = None
        self._names = [*sources]
        unknown = {*(params.mixture or {}), *(params.max_repeats or {})} - {*sources}
        if unknown:
            raise StageError(
                f"mixture and max_repeats: there is no source {', '.join(sorted(unknown))}: "
                + (f"use {', '.join(sources)}" if sources else "name the directories in `sources`, for organize")
            )
        if params.mixture is None:
            self._sizes = np.array([*sources.values()], np.int64)
            return
        # (k,): the first row of each source, and how many it has.
        self._names = [name for name in sources if name in params.mixture]
        self._sizes = np.array([sources[name] for name in self._names], np.int64)
        ends = dict(zip(sources, np.cumsum([*sources.values()], dtype=np.int64), strict=True))
        self._starts = np.array([ends[name] for name in self._names], np.int64) - self._sizes
        self.num_rows = int(self._sizes.sum())
        try:
            self._mixture = Mixture({name: params.mixture[name] for name in self._names})
        except ValueError as error:
            raise StageError(f"mixture: {error}") from None

    def step(self, steps_done: int) -> NDArray[np.int64]:
        """The rows of the optimizer step after `steps_done` ones, in order: (total_batch_size,)."""
        size = self._params.total_batch_size
        positions = np.arange(steps_done * size, (steps_done + 1) * size, dtype=np.int64)
        if self._mixture is None:
            return shuffled(positions, self.num_rows, self._params.seed)
        return mixed_rows(positions, self._mixture, self._starts, self._sizes, self._params.seed)

    @property
    def shares(self) -> dict[str, float]:
        """Of the rows; nothing if there are no sources."""
        counts = self._mixture.counts if self._mixture else self._sizes
        return dict(zip(self._names, (counts / counts.sum()).tolist(), strict=True))

    def epochs(self, num_steps: int) -> dict[str, float]:
        """How often the first steps use a row of each source; nothing if there are no sources."""
        num_rows = num_steps * self._params.total_batch_size
        used = self._mixture.used(num_rows) if self._mixture else self._sizes * (num_rows / self.num_rows)
        return dict(zip(self._names, (used / self._sizes).tolist(), strict=True))

    def check_repeats(self, total_steps: int) -> None:
        """Check how often the whole training uses each source.

        Raises:
            StageError: one more often than `max_repeats` allows.
        """
        repeats, limits = self.epochs(total_steps), self._params.max_repeats or {}
        if too_many := [name for name, limit in limits.items() if repeats.get(name, 0) > limit]:
            found = ", ".join(
                f"{name} is used {repeats[name]:.2f} times, at most {limits[name]:g}" for name in too_many
            )
            raise StageError(
                f"max_repeats: {found}: lower its share in mixture, num_epochs or max_steps, or add raw files to it"
            )


def mixed_rows(
    positions: NDArray[np.int64], mixture: Mixture, starts: NDArray[np.int64], sizes: NDArray[np.int64], seed: int
) -> NDArray[np.int64]:
    """`shuffled` rows of several sources, of which each has epochs of its own.

    Args:
        positions: (n,).
        mixture: Of k sources.
        starts: (k,): the first row of each source.
        sizes: (k,): how many rows it has.
        seed: As in params.yaml.
    """
    sources, numbers = mixture.rows_at(positions)
    rows = np.empty_like(positions)
    for source in np.unique(sources):
        inside = sources == source
        rows[inside] = starts[source] + shuffled(numbers[inside], int(sizes[source]), seed)
    return rows
