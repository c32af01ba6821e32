"""A map over worker processes in the order of the tasks, so that how many there are, and where, changes no result.

The price of the order is that a slow task keeps the results of later ones in memory: `ahead` bounds how many.
"""

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
from stages.artifacts.errors import StageError

Task = TypeVar("Task")
Result = TypeVar("Result")


def no_initializer() -> None:
    """Prepare nothing: the function needs no settings of its process."""


@dataclass(frozen=True)
class Runtime:
    """Where tasks are computed, which changes no result."""

    num_workers: Annotated[int, Field(ge=1)] | None
    """Processes on this machine; None: one per core."""
    _: KW_ONLY
    executor: Literal["processes", "dask"] = "processes"
    """Processes on this machine, or a Dask cluster."""
    dask_scheduler: Annotated[str, Field(pattern=r"^\w+://[^/]+:\d+$|\.json$")] | None = None
    """The cluster's address, or the file that its scheduler writes; None: one of `num_workers` on this machine."""


class Workers(Protocol):
    """What computes tasks."""

    def submit(self, task: Any) -> Callable[[], Any]:
        """Start a task, and return a function that waits for its result."""

    def num_workers(self) -> int:
        """The number of tasks that are computed at the same time."""


def ordered_map(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    runtime: Runtime,
    *,
    ahead: int | None = None,
    initializer: Callable[[], None] = no_initializer,
) -> Iterator[Result]:
    """Yield `function(task)` for each task, in order.

    Args:
        function: A module's function, so that it can be pickled by name.
        tasks: Pickled, as the results are.
        runtime: Where they are computed. `processes` with one worker or one task means this process.
        ahead: Tasks per worker that are started before their results are asked for, which bounds the memory of results;
            None: all.
        initializer: A module's function that each process calls before its first task.

    Raises:
        StageError: a worker was killed, or there is none.
    """
    num_workers = runtime.num_workers or _num_cores()
    start: AbstractContextManager[Workers]
    if runtime.executor == "dask" and tasks:
        from stages.corpus import cluster

        start = cluster.connect(function, num_workers, runtime.dask_scheduler, initializer)
    elif min(num_workers, len(tasks)) > 1:
        start = _start_processes(function, min(num_workers, len(tasks)), initializer)
    else:
        initializer()  # here nothing has to be started: two processes cost half a second
        yield from map(function, tasks)
        return
    waiting = iter(tasks)
    waits: deque[Callable[[], Result]] = deque()
    with start as workers:
        while True:
            # The number of workers of a cluster may change at any time.
            # At least one: without any worker yet, no task in flight would look like the end of the tasks.
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
def _start_processes(
    function: Callable[[Any], Any], num_workers: int, initializer: Callable[[], None]
) -> Iterator[_Processes]:
    # Spawned, not forked: a fork copies the locks that other threads hold (of Arrow, of tqdm) but not these threads, so
    # the child may wait for a lock forever.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_begin, initargs=(os.getpid(), initializer))
    try:
        yield _Processes(function, pool, num_workers)
    except BrokenProcessPool:  # raised for all tasks in flight; which one needed the memory is not known
        raise StageError(
            "a worker process was killed, most often because memory ran out; nothing was published: "
            f"lower runtime.num_workers, now {num_workers}, and run again"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)  # waits for tasks that run: they write where the caller cleans up next


def _begin(parent: int, initializer: Callable[[], None]) -> None:
    """Prepare a worker process before its first task."""
    # The terminal sends Ctrl-C to all processes. Only the parent handles it and ends its workers: a traceback from each
    # of them would bury its message.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A killed parent cannot end its workers, which would finish their tasks, writing where the next run writes, and
    # then wait forever.
    process.die_with_parent(signal.SIGKILL, parent)
    initializer()


def _num_cores() -> int:
    """The cores that this process may use."""
    # os.cpu_count() also counts cores that a SLURM job or `taskset` does not allow.
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
