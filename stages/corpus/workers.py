"""A map over worker processes that keeps the order of the tasks, so that their number and place change no result."""

import itertools
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

from pydantic import Field

from stages.artifacts import process
from stages.artifacts.command import StageError

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Runtime:
    """Where tasks are computed, which changes no result."""

    num_workers: Annotated[int, Field(ge=1)] | None
    """Processes on this machine; None: one a core."""
    _: KW_ONLY
    executor: Literal["processes", "dask"] = "processes"
    """Processes on this machine, or a Dask cluster."""
    dask_scheduler: Annotated[str, Field(pattern=r"^\w+://[^/]+:\d+$|\.json$")] | None = None
    """The cluster's address, or the file that its scheduler writes; None: one of `num_workers` on this machine."""


class Workers(Protocol):
    """What computes tasks."""

    def submit(self, task: Any) -> Callable[[], Any]:
        """Have a task computed, and return what waits for its result."""

    def num_workers(self) -> int:
        """How many tasks are computed at once."""


def ordered_map(
    function: Callable[[Task], Result], tasks: Sequence[Task], runtime: Runtime, ahead: int | None = None
) -> Iterator[Result]:
    """Yield `function(task)` for each task, in order.

    Args:
        function: A module's function, so that it can be pickled by name.
        tasks: Pickled, as the results are.
        runtime: Who computes them. With one process, or with one task for processes, everything runs in this one.
        ahead: How many tasks a worker may be under way or done and not yet taken; it bounds the memory of results.
            None: all.

    Raises:
        StageError: a worker was killed, or there is none.
    """
    num_workers = runtime.num_workers or _num_cores()
    start: AbstractContextManager[Workers]
    if runtime.executor == "dask" and tasks:
        from stages.corpus import cluster

        start = cluster.connect(function, num_workers, runtime.dask_scheduler)
    elif min(num_workers, len(tasks)) > 1:
        start = _start_processes(function, min(num_workers, len(tasks)))
    else:
        yield from map(function, tasks)
        return
    waiting = iter(tasks)
    waits: deque[Callable[[], Result]] = deque()
    with start as workers:
        while True:
            room = None if ahead is None else max(1, ahead * workers.num_workers() - len(waits))
            waits.extend(map(workers.submit, itertools.islice(waiting, room)))
            if not waits:
                return
            yield waits.popleft()()


class _Processes(NamedTuple):
    """Processes on this machine that compute one function."""

    function: Callable[[Any], Any]
    pool: ProcessPoolExecutor
    size: int

    def submit(self, task: Any) -> Callable[[], Any]:
        return self.pool.submit(self.function, task).result

    def num_workers(self) -> int:
        return self.size


@contextmanager
def _start_processes(function: Callable[[Any], Any], num_workers: int) -> Iterator[_Processes]:
    # Spawned, not forked: a fork copies locks that other threads of this process hold.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_begin, initargs=(os.getpid(),))
    try:
        yield _Processes(function, pool, num_workers)
    except BrokenProcessPool:
        raise StageError(
            "a worker process was killed, most often because memory ran out; nothing was published: "
            f"lower runtime.num_workers, now {num_workers}, and run again"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    """Make this worker end with its parent, however that ends, and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.die_with_parent(signal.SIGKILL, parent)


def _num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
