"""Collectives of the ranks: sums, and what one of them decides or all of them report.

How the ranks find each other is in stages/ranks/process_group.py: nothing there decides a number.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from stages.base.errors import StageError, Unavailable, as_stage_error

T = TypeVar("T")


def device_type() -> str:
    """`cuda` where there is a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_rank0() -> bool:
    """Whether this is rank 0, which alone prints, decides and publishes."""
    return dist.get_rank() == 0


def all_reduce_sum(*values: float) -> list[float]:
    """The sum of each number over all ranks, in double precision: counts and flags stay exact.

    The tensor is on the CPU, so gloo carries it and the GPU's queue is not waited for.
    """
    total = torch.tensor(values, dtype=torch.float64, device="cpu")  # (len(values),)
    dist.all_reduce(total)
    return [float(value) for value in total]


def run_on_rank0(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `function` on rank 0 and return its result, or raise its `StageError`, on all ranks.

    A decision that depends on the file system is made once: two ranks may see different directory listings, and ranks
    that resume from different checkpoints would train a mix.
    """
    answer: list[Any] = [None, None]
    if is_rank0():
        try:
            answer[0] = function()
        except (StageError, OSError) as error:
            answer[1] = as_stage_error(error)
    # An error is broadcast as well: the other ranks would wait here until the timeout.
    dist.broadcast_object_list(answer, src=0, group=group)
    if answer[1] is not None:
        raise answer[1]
    return cast(T, answer[0])


def run_on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call `function` on every rank and return all results in rank order; if it fails on one, all ranks raise."""
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, _outcome(function), group=group)
    return _results(outcomes)


def gather_on_rank0(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> Callable[[], list[T]]:
    """Call `function` on every rank, and send the results to rank 0 alone: for those that grow with the ranks.

    Returns:
        On rank 0, what returns all results in rank order, or raises if `function` has failed on one; it is called
        within `run_on_rank0`, which has all ranks raise.
    """
    outcome = _outcome(function)
    outcomes: list[Any] | None = [None] * dist.get_world_size() if is_rank0() else None
    dist.gather_object(outcome, outcomes, group=group)
    return lambda: _results(outcomes or [])


def _outcome(function: Callable[[], T]) -> tuple[T | None, StageError | None]:
    # An error is gathered like a result: a rank that raised at once would leave the others waiting for it.
    try:
        return function(), None
    except (StageError, OSError) as error:
        return None, as_stage_error(error)


def _results(outcomes: list[Any]) -> list[Any]:
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            kind = Unavailable if isinstance(failure, Unavailable) else StageError
            raise kind(f"rank {rank}: {failure.args[0]}", *failure.args[1:])
    return [result for result, _ in outcomes]
