"""The order of the rows of several sources."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.training.mixture import LARGEST_PERIOD, Mixture, mixed_rows

SHARES = st.lists(st.integers(0, 60), min_size=1, max_size=50).filter(any)


@settings(deadline=None, max_examples=60)
@given(shares=SHARES, first=st.integers(0, 10**9))
def test_each_source_is_within_one_row_of_its_share_at_every_position(shares: list[int], first: int) -> None:
    mixture = Mixture({str(number): share for number, share in enumerate(shares)})
    exact = np.array(shares) / sum(shares)
    positions = np.arange(2 * mixture.period + 7)
    found = mixture.places(positions).sources[:, None] == np.arange(len(shares))  # (n, k)
    counts = found.cumsum(0)
    assert (np.abs(counts - exact * (positions + 1)[:, None]) < 1).all()
    # Far away, too, and without what precedes.
    sources, numbers = mixture.places(positions + first)
    expected = exact[sources] * (positions + first)
    assert (np.abs(numbers - expected) < 1 + 1e-6 * first).all()
    for source in range(len(shares)):  # and one after the other
        own = numbers[sources == source]
        assert (np.diff(own) == 1).all()


def test_shares_are_what_was_typed() -> None:
    mixture = Mixture({"web": 0.7, "chat": 0.3})
    assert (mixture.period, mixture.counts.tolist()) == (10, [7, 3])
    assert Mixture({"a": 2, "b": 1, "c": 0}).counts.tolist() == [2, 1, 0]
    sources = mixture.places(np.arange(10)).sources.tolist()
    assert sources == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    with pytest.raises(ValueError, match=f"common denominator 333,331, and {LARGEST_PERIOD:,} is the largest"):
        Mixture({"a": 333_330, "b": 1})


def test_each_epoch_of_a_source_is_a_new_permutation_of_it() -> None:
    mixture = Mixture({"web": 3, "chat": 1})
    starts, sizes = np.array([0, 12]), np.array([12, 5])
    rows = mixed_rows(np.arange(400), mixture, starts, sizes, seed=3)
    for start, size in zip(starts, sizes, strict=True):
        own = rows[(rows >= start) & (rows < start + size)]
        epochs = own[: len(own) // size * size].reshape(-1, size)
        assert (np.sort(epochs) == np.arange(start, start + size)).all()
        assert len({tuple(epoch) for epoch in epochs}) > len(epochs) / 2
    assert mixed_rows(np.arange(400), mixture, starts, sizes, seed=4).tolist() != rows.tolist()
    # Any part of it is computed alone.
    assert mixed_rows(np.arange(123, 321), mixture, starts, sizes, seed=3).tolist() == rows[123:321].tolist()


def test_a_billion_rows_of_fifty_sources_need_no_memory_and_microseconds() -> None:
    mixture = Mixture({str(number): number + 1 for number in range(50)})
    assert mixture.period == 1275
    positions = np.arange(10**9, 10**9 + 1000)
    sizes = np.full(50, 2 * 10**7)
    rows = mixed_rows(positions, mixture, np.arange(50) * sizes, sizes, seed=0)
    assert len({*rows.tolist()}) == 1000
