"""The order of the rows of several sources."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.base.errors import StageError
from stages.training.loader import BatchLoader
from stages.training.order import LARGEST_PERIOD, Mixture, RowOrder, mixed_rows
from stages.training.params import TrainParams
from tests.trainings import each_rank

SHARES = st.lists(st.integers(0, 60), min_size=1, max_size=50).filter(any)


@settings(deadline=None, max_examples=50)
@given(shares=SHARES, first=st.integers(0, 10**9))
def test_each_source_is_within_one_row_of_its_share_at_every_position(shares: list[int], first: int) -> None:
    mixture = Mixture({str(number): share for number, share in enumerate(shares)})
    exact = np.array(shares) / sum(shares)
    positions = np.arange(2 * mixture.period + 7)
    found = mixture.rows_at(positions).sources[:, None] == np.arange(len(shares))  # (n, k)
    counts = found.cumsum(0)
    assert (np.abs(counts - exact * (positions + 1)[:, None]) < 1).all()
    # Far away, too, and without what precedes.
    sources, numbers = mixture.rows_at(positions + first)
    expected = exact[sources] * (positions + first)
    assert (np.abs(numbers - expected) < 1 + 1e-6 * first).all()
    for source in range(len(shares)):  # and one after the other
        own = numbers[sources == source]
        assert (np.diff(own) == 1).all()


def test_shares_are_what_was_typed() -> None:
    mixture = Mixture({"web": 0.7, "chat": 0.3})
    assert (mixture.period, mixture.counts.tolist()) == (10, [7, 3])
    assert Mixture({"a": 2, "b": 1, "c": 0}).counts.tolist() == [2, 1, 0]
    sources = mixture.rows_at(np.arange(10)).sources.tolist()
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


def test_the_ranks_share_one_order_whatever_their_number(params: TrainParams, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"web": 40, "code": 30, "chat": 7}

    class Rows:
        seq_length = 8

        def __init__(self) -> None:
            self.sources = sources

        def __len__(self) -> int:
            return sum(sources.values())

    params = dataclasses.replace(params, mixture={"chat": 0.25, "web": 0.75}, total_batch_size=8, batch_size=1)
    steps = []
    for num_ranks in (1, 2, 4):
        parts = []
        for _ in each_rank(monkeypatch, num_ranks):
            loader = BatchLoader(Rows(), params, eos_token_id=0)  # type: ignore[arg-type]
            parts.append(np.concatenate([loader.step_indices(step) for step in (0, 1, 1000)]))
            loader.close()
        steps.append(np.stack(parts, axis=1).ravel().tolist())  # (passes, ranks, 1)
    assert steps[0] == steps[1] == steps[2]
    is_chat = np.array(steps[0]) >= 70
    assert is_chat.reshape(3, 8).sum(1).tolist() == [2, 2, 2]
    assert not ((np.array(steps[0]) >= 40) & ~is_chat).any(), "code has no share"


def test_what_does_not_fit_the_sources_is_refused(params: TrainParams) -> None:
    sources = {"web": 40, "chat": 10}
    mixed = dataclasses.replace(params, mixture={"web": 0.5, "chat": 0.5}, total_batch_size=10)
    order = RowOrder(mixed, 50, sources)
    assert order.epochs(10) == {"web": 1.25, "chat": 5.0}
    order.check_repeats(10)
    limited = RowOrder(dataclasses.replace(mixed, max_repeats={"chat": 4}), 50, sources)
    with pytest.raises(StageError, match=r"max_repeats: chat is used 5\.00 times, at most 4: lower its share"):
        limited.check_repeats(10)
    for values, message in (
        ({"mixture": {"web": 1, "books": 1}}, "there is no source books: use web, chat"),
        ({"max_repeats": {"books": 1}}, "there is no source books"),
        ({"mixture": {"web": 333_330, "chat": 1}}, "mixture: the shares have the common denominator"),
    ):
        with pytest.raises(StageError, match=message):
            RowOrder(dataclasses.replace(params, **values), 50, sources)
    with pytest.raises(StageError, match="name the directories in `sources`"):
        RowOrder(mixed, 50, {})
