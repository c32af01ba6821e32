"""Which source each row of a training comes from, where several are mixed by shares: computed, not drawn.

At every position each source has been used within one row of its share (Tijdeman, "The chairman assignment problem",
1980). Shares are fractions with a common denominator D, so the order of the sources repeats after D rows: a table of
one period answers for any position, whatever the number of rows, and a resume is an index.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stages.training.order import permute

LARGEST_PERIOD = 100_000
"""Rows. Five decimals of a share are more than anybody can measure."""


class Places(NamedTuple):
    """What stands at some positions."""

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
    def _table(self) -> Places:
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
        return Places(order, numbers)

    def places(self, positions: NDArray[np.int64]) -> Places:
        """The sources at `positions` of the training, and the numbers of their rows."""
        table = self._table
        periods, rest = np.divmod(positions, self.period)
        sources = table.sources[rest]
        return Places(sources, periods * self.counts[sources] + table.numbers[rest])


def mixed_rows(
    positions: NDArray[np.int64], mixture: Mixture, starts: NDArray[np.int64], sizes: NDArray[np.int64], seed: int
) -> NDArray[np.int64]:
    """The rows at `positions` of a training: each source is permuted anew in each of its own epochs.

    Args:
        positions: (n,).
        mixture: Of k sources.
        starts: (k,): the first row of each source.
        sizes: (k,): how many rows it has.
        seed: As in params.yaml.
    """
    sources, numbers = mixture.places(positions)
    rows = np.empty_like(positions)
    epochs = numbers // sizes[sources]
    for source, epoch in {*zip(sources.tolist(), epochs.tolist(), strict=True)}:
        inside = (sources == source) & (epochs == epoch)
        size = int(sizes[source])
        rows[inside] = starts[source] + permute(numbers[inside] % size, size, seed, epoch)
    return rows
