"""A map over worker processes that keeps the order of the tasks, so that their number changes no result."""

import itertools
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from stages.artifacts import process
from stages.artifacts.command import StageError

Task = TypeVar("Task")
Result = TypeVar("Result")


def count(num_workers: int | None) -> int:
    """`num_workers`, or one a core that this process may use."""
    if num_workers:
        return num_workers
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def ordered_map(
    function: Callable[[Task], Result], tasks: Sequence[Task], num_workers: int, ahead: int | None = None
) -> Iterator[Result]:
    """Yield `function(task)` for each task, in order, computed by `num_workers` processes.

    Args:
        function: A module's function, so that it can be pickled by name.
        tasks: Pickled, as the results are.
        num_workers: With one, or with one task, everything runs in this process.
        ahead: How many tasks may be under way or done and not yet taken; it bounds the memory of results. None: all.

    Raises:
        StageError: a worker was killed.
    """
    num_workers = min(num_workers, len(tasks))
    if num_workers <= 1:
        yield from map(function, tasks)
        return
    # Spawned, not forked: a fork copies locks that other threads of this process hold.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_begin, initargs=(os.getpid(),))
    waiting = iter(tasks)
    try:
        futures: deque[Future[Result]] = deque(pool.submit(function, task) for task in itertools.islice(waiting, ahead))
        while futures:
            yield futures.popleft().result()
            futures.extend(pool.submit(function, task) for task in itertools.islice(waiting, 1))
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
