"""The tasks of a map on a Dask cluster, whose workers may run on many machines.

A Dask worker outlives a run, has several threads and a working directory of its own. So it imports nothing of the
project: it starts a process for each task, which works in the project's directory with the code as it is now, has its
memory and its garbage collector for itself, and ends with the worker. That costs half a second a task.
"""

import concurrent.futures
import importlib
import itertools
import json
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from stages.artifacts import process, reuse
from stages.artifacts.command import StageError

PATIENCE = 60.0
"""Seconds that the scheduler's file, the scheduler, or all workers may be missing: they may start with the stage."""

_SETTINGS = {
    "distributed.admin.large-graph-warning-threshold": "1 TiB",  # Dask would warn of each larger task
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}
_ROOT = str(Path(__file__).parents[2])
_SERVE = "import sys; sys.path.insert(0, sys.argv[1]); from stages.corpus import cluster; cluster.serve()"


class Cluster:
    """A Dask cluster that computes one function."""

    def __init__(self, client: Any, place: str, function: Callable[[Any], Any]) -> None:
        module = function.__module__
        if module == "__main__" and (spec := sys.modules[module].__spec__):
            module = spec.name  # as in `python -m stages.extract`
        self._client, self._place, self._function = client, place, function
        self._header = pickle.dumps((module, reuse.digest_of_code(module)))
        self._pool = client.get_executor(pure=False)
        self._submitted = itertools.count()

    def submit(self, task: Any) -> Callable[[], Any]:
        """Have a task computed, and return what waits for its result."""
        future = self._pool.submit(
            subprocess.run,
            [sys.executable, "-c", _SERVE, _ROOT],
            input=self._header + pickle.dumps((self._function, task)),
            capture_output=True,
            cwd=os.getcwd(),
            priority=-next(self._submitted),  # Dask alone keeps the order only by and large
        )
        return partial(self._wait, future)

    def num_workers(self) -> int:
        """How many tasks the cluster computes at once, as matters stand."""
        try:
            return sum(self._client.nthreads().values())
        except OSError:
            raise self.lost() from None

    def lost(self) -> StageError:
        """The error for a scheduler that is gone."""
        return StageError(f"the Dask scheduler {self._place} was lost; nothing was published: start it and run again")

    def _wait(self, future: "Future[subprocess.CompletedProcess[bytes]]") -> Any:
        while True:
            try:
                completed = future.result(PATIENCE)
            except concurrent.futures.TimeoutError:
                if not self.num_workers():
                    raise StageError(
                        f"the Dask scheduler {self._place} had no worker for {PATIENCE:g} seconds; nothing was "
                        "published: start some with `dask worker` and run again"
                    ) from None
            except OSError as error:
                raise StageError(
                    f"a Dask worker cannot start a process ({error.filename}: {error.strerror}): let all machines "
                    f"share {os.getcwd()} and {sys.prefix}"
                ) from None
            else:
                return _read(completed)


@contextmanager
def connect(function: Callable[[Any], Any], num_workers: int, scheduler: str | None) -> Iterator[Cluster]:
    """Yield a cluster for `function`, a module's function.

    Args:
        function: What to compute.
        num_workers: Processes of a cluster on this machine.
        scheduler: Address of a scheduler, or the file that it writes; None: a cluster in this process.

    Raises:
        StageError: Dask, the scheduler or its workers are missing or were lost, or a worker cannot run the project.
    """
    dask, distributed = _import("dask"), _import("distributed")
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(_SETTINGS))
        # What matters is raised; Dask also logs what it cancels.
        stack.enter_context(importlib.import_module("distributed.utils").silence_logging_cmgr(logging.CRITICAL))
        if scheduler is None:
            target, place = stack.enter_context(_local(num_workers)), "of this process"
        else:
            target = _address(scheduler)
            place = f"at {target}"
        try:
            client = stack.enter_context(distributed.Client(target, timeout=PATIENCE, set_as_default=False))
        except OSError:
            raise StageError(
                f"no Dask scheduler answers {place} within {PATIENCE:g} seconds: start one with `dask scheduler`, mend "
                f"runtime.dask_scheduler, now {scheduler}, or set runtime.executor to processes"
            ) from None
        cluster = Cluster(client, place, function)
        try:
            yield cluster
        except concurrent.futures.CancelledError:
            raise cluster.lost() from None
        except distributed.KilledWorker:
            raise StageError(
                "several Dask workers were killed over the same task, most often because memory ran out; nothing was "
                "published: start workers with fewer threads (`dask worker --nthreads`) and run again"
            ) from None


def _local(num_workers: int) -> Any:
    """A cluster in this process: a worker with a thread for each process that it may start.

    Its parts talk without sockets. HTTP servers are all that Dask insists on: they have no pages, and listen to this
    machine only (with `dashboard_address=None` they would listen to all).
    """
    return _import("distributed").LocalCluster(
        n_workers=1,
        threads_per_worker=num_workers,
        processes=False,
        memory_limit=None,
        silence_logs=False,  # they are
        dashboard_address="127.0.0.1:0",
        worker_dashboard_address="127.0.0.1:0",
        scheduler_kwargs={"dashboard": False},
    )


def serve() -> None:
    """Compute a task in this process: from standard input to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # leave Ctrl-C to the stage
    process.die_with_parent(signal.SIGKILL)
    if _is_closed(1):  # the worker ended before the line above
        os._exit(1)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a task prints is no part of it
    outcome: tuple[Any, Exception | None, str]
    try:
        module, digest = pickle.load(sys.stdin.buffer)
        if reuse.digest_of_code(module) != digest:
            raise StageError(
                f"a Dask worker on {socket.gethostname()} finds other code or packages than the stage: let all "
                f"machines share {_ROOT} and {sys.prefix}, do not edit the code while a stage runs, and run again"
            )
        sys.modules["__main__"] = importlib.import_module(module)  # whose names the task may hold
        function, task = pickle.load(sys.stdin.buffer)
        outcome = function(task), None, ""
    except Exception as error:  # whatever it is, the stage raises it
        outcome = None, error, traceback.format_exc()
    with answer:
        pickle.dump(outcome, answer)


def _is_closed(pipe: int) -> bool:
    """Whether nobody can read what is written to a pipe."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))


def _read(completed: "subprocess.CompletedProcess[bytes]") -> Any:
    """The result that `serve` wrote; what it raised is raised."""
    messages = completed.stderr.decode(errors="replace")
    if completed.returncode < 0:
        raise StageError(
            f"a process of a Dask worker was killed by signal {-completed.returncode}, most often because memory ran "
            "out; nothing was published: start workers with fewer threads (`dask worker --nthreads`) and run again"
        )
    if completed.returncode > 0:
        raise StageError(f"a Dask worker cannot run {_ROOT}, which all machines must share:\n{messages}")
    sys.stderr.write(messages)
    result, error, trace = pickle.loads(completed.stdout)
    if error is not None:
        raise error from RuntimeError(trace)
    return result


def _address(scheduler: str) -> str:
    """The address of a scheduler, which may be given by the file that it writes."""
    if "://" in scheduler:
        return scheduler
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            return str(json.loads(Path(scheduler).read_bytes())["address"])
        except (OSError, ValueError, KeyError):  # not there yet, or not yet whole
            time.sleep(0.1)
    raise StageError(
        f"runtime.dask_scheduler is {scheduler}, and no such file names a scheduler within {PATIENCE:g} seconds: start "
        "one with `dask scheduler --scheduler-file`, or give an address such as tcp://host:8786"
    )


def _import(name: str) -> ModuleType:
    """Import a package whose version decides no result, so that `reuse.digest_of_code` need not know of it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise StageError(
            f"runtime.executor is dask, but {name} is not installed: run `make setup`, or install the extra `dask` of "
            "pyproject.toml"
        ) from None
