"""A map over worker processes that keeps the order of the tasks, so that their number changes no result."""

import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from stages.artifacts.command import StageError

Task = TypeVar("Task")
Result = TypeVar("Result")


def count(num_workers: int | None) -> int:
    """`num_workers`, or one a core that this process may use."""
    return num_workers or len(os.sched_getaffinity(0))


def ordered_map(
    function: Callable[[Task], Result], tasks: Iterable[Task], num_workers: int, ahead: int | None = None
) -> Iterator[Result]:
    """Yield `function(task)` for each task, in order, computed by `num_workers` processes.

    Args:
        function: A module's function, so that it can be pickled by name.
        tasks: Taken from their iterator as late as possible.
        num_workers: With 1 everything runs in this process.
        ahead: How many tasks may be under way or done and not yet taken; it bounds the memory of results. None: all.

    Raises:
        StageError: a worker was killed.
    """
    if num_workers == 1:
        yield from map(function, tasks)
        return
    # Spawned, not forked: a fork copies locks that other threads of this process hold.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_begin, initargs=(os.getpid(),))
    tasks = iter(tasks)
    try:
        futures: deque[Future[Result]] = deque(pool.submit(function, task) for task in itertools.islice(tasks, ahead))
        while futures:
            yield futures.popleft().result()
            futures.extend(pool.submit(function, task) for task in itertools.islice(tasks, 1))
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
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
