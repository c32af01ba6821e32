"""A map over worker processes in the order of the tasks, so that how many there are, and where, changes no result.

The price of the order is that a slow task keeps the results of later ones in memory: `ahead` bounds how many.
"""

import itertools
import math
import multiprocessing
import os
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import KW_ONLY, dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import Field
from tqdm import tqdm

from stages.base import process
from stages.base.errors import StageError

Task = TypeVar("Task")
Result = TypeVar("Result")

PATIENCE = 60.0
"""Seconds to wait for the scheduler's file, the scheduler, or any worker: they may start together with the stage."""


@dataclass(frozen=True)
class Runtime:
    """Where tasks are computed, which changes no result."""

    num_workers: Annotated[int, Field(ge=1)] | None
    """Processes that read data, and threads of consolidate. null: one per core."""
    _: KW_ONLY
    dask_scheduler: Annotated[str, Field(pattern=r"^\w+://[^/]+:\d+$|\.json$")] | None = None
    """Dask cluster that reads data: its address, or the file that its scheduler writes. null: none."""

    min_bytes: ClassVar[float] = 8 << 20
    """Less data is worked on without starting processes. One costs 0.45 s, most of it for imports, and 8 MiB of YAML
    take a second. Above, even a single one is started: it can be killed in the middle of a task."""


class Pool(NamedTuple):
    """What computes tasks."""

    submit: Callable[[Any], "Future[Any]"]
    num_workers: Callable[[], int]
    """The number of tasks that are computed at the same time: that of a cluster may change."""


def ordered_map(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    runtime: Runtime,
    *,
    num_bytes: float = math.inf,
    ahead: int | None = None,
) -> Generator[Result, None, None]:
    """Yield `function(task)` for each task, in order.

    Args:
        function: A module's function, so that it can be pickled by name.
        tasks: Pickled, as the results are.
        runtime: Where they are computed; without Dask, in this process if `num_bytes` are less than `min_bytes`.
        num_bytes: That all tasks read.
        ahead: Tasks per worker that are started before their results are asked for, which bounds the memory of results;
            None: all.

    Raises:
        StageError: a worker was killed, or there is none.
    """
    num_workers = runtime.num_workers or len(os.sched_getaffinity(0))  # os.cpu_count() has those that a job may not use
    start: AbstractContextManager[Pool]
    if runtime.dask_scheduler and tasks:
        from stages.work import cluster

        start = cluster.connect(function, runtime.dask_scheduler)
    elif tasks and num_bytes >= runtime.min_bytes:
        start = _processes(function, min(num_workers, len(tasks)))
    else:
        yield from map(function, tasks)
        return
    waiting = iter(tasks)
    futures: deque[Future[Result]] = deque()
    with start as pool:
        while True:
            # At least one: without any worker yet, no task in flight would look like the end of the tasks.
            room = None if ahead is None else max(1, ahead * pool.num_workers() - len(futures))
            futures.extend(map(pool.submit, itertools.islice(waiting, room)))
            if not futures:
                return
            # A task of any length is allowed; a cluster without workers would wait forever.
            while not wait([futures[0]], PATIENCE).done:
                if not pool.num_workers():
                    raise StageError(
                        f"there was no Dask worker for {PATIENCE:g} seconds; nothing was published: start some with "
                        "`dask worker` and run again"
                    )
            yield futures.popleft().result()


def tracked_map(
    function: Callable[[Task], Result], tasks: Sequence[Task], sizes: Sequence[int], runtime: Runtime, name: str
) -> list[Result]:
    """The results in the order of the tasks, with a progress bar of the bytes that these read, of `sizes` each.

    The largest begins first, so that none ends late.
    """
    order = sorted(range(len(tasks)), key=lambda index: -sizes[index])
    results: dict[int, Result] = {}
    with (
        tqdm(total=sum(sizes), desc=name, unit="B", unit_scale=True, disable=None) as bar,
        closing(ordered_map(function, [tasks[index] for index in order], runtime, num_bytes=sum(sizes))) as found,
    ):
        for index, result in zip(order, found, strict=True):
            results[index] = result
            bar.update(sizes[index])
    return [results[index] for index in range(len(tasks))]


def threaded_map(function: Callable[[Task], Result], tasks: Sequence[Task]) -> Generator[Result, None, None]:
    """The same with threads of this process: for functions that release the interpreter's lock, as hashing does."""
    threads = ThreadPoolExecutor()
    try:
        yield from threads.map(function, tasks)
    finally:
        threads.shutdown(cancel_futures=True)  # by default all tasks are waited for, also after Ctrl-C


@contextmanager
def _processes(function: Callable[[Any], Any], num_workers: int) -> Iterator[Pool]:
    """Processes that end with the block, however it ends: at once, not after the tasks that run.

    Not a ProcessPoolExecutor, whose processes share a pipe for results: if one is killed while it sends, the stage may
    wait forever for the rest (3 times of 6 with results of 200 kB, which `organize` has).
    """
    # Spawned, not forked: a fork copies the locks that other threads hold (of Arrow, of tqdm) but not these threads, so
    # the child may wait for a lock forever.
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    idle: SimpleQueue[Connection] = SimpleQueue()  # the pipes of those that compute nothing
    threads = ThreadPoolExecutor(num_workers)  # one for each process: it gives tasks out while the stage is busy

    def kill() -> None:
        for each in processes:
            each.kill()

    def compute(task: Any) -> Any:
        pipe = idle.get()
        try:
            pipe.send(task)
            result, error, trace = pipe.recv()
        except (EOFError, OSError):  # which task needed the memory is not known: others may have been spared by chance
            kill()
            raise StageError(
                "a worker process was killed, most often because memory ran out; nothing was published: "
                f"lower runtime.num_workers, now {num_workers}, and run again"
            ) from None
        finally:
            idle.put(pipe)
        if error is not None:
            raise error from RuntimeError(trace)  # a traceback cannot be pickled, its text can
        return result

    try:
        resource_tracker.ensure_running()  # otherwise the first process starts it, which unblocks the signal
        with process.uninterrupted():  # a process whose start is left half-way prints a traceback
            # The terminal sends Ctrl-C to all processes, and a traceback from each would bury the stage's message. They
            # inherit what is blocked, so not even one that is just starting prints one.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                for _ in range(num_workers):
                    pipe, end = context.Pipe()
                    # A daemon: Python kills it at its end if this thread could not.
                    worker = context.Process(target=_serve, args=(end, function, os.getpid()), daemon=True)
                    worker.start()
                    processes.append(worker)
                    idle.put(pipe)
                    end.close()  # only the process has it now, so that the pipe ends with it
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        yield Pool(lambda task: threads.submit(compute, task), lambda: num_workers)
    finally:
        with process.uninterrupted():
            kill()
            for worker in processes:  # until then they write where the caller cleans up next
                worker.join()
            threads.shutdown(cancel_futures=True)


def _serve(pipe: Connection, function: Callable[[Any], Any], parent: int) -> None:
    """Compute the tasks of a pipe, in a process of its own."""
    # A killed parent cannot end its workers, which would finish their tasks, writing where the next run writes, and
    # then wait forever.
    process.die_with_parent(signal.SIGKILL, parent)
    while True:
        task = pipe.recv()
        try:
            outcome = pickle.dumps((function(task), None, ""))
        except Exception as error:  # of any kind: the stage raises it
            outcome = pickle.dumps((None, error, traceback.format_exc()))
        pipe.send_bytes(outcome)
