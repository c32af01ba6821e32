"""The tasks of a map on a Dask cluster, whose workers may run on many machines.

A Dask worker outlives a run, and has several threads and a working directory of its own. So it imports nothing of the
project: it starts a Python process for each task, which runs in the project's directory with the code as it is now,
has its memory and its garbage collector to itself, and ends with the worker. That costs 0.4 to 0.5 s a task, half of it
to compare the code with that of the stage.

Dask's own ways cost 2 to 3 ms, but fail at this (distributed 2026.8). Threads of the worker, and Nanny processes of one
thread, ran the code from before an edit until `Client.restart` (4 s), which cancelled a task of another stage; threads
also share the garbage collector. A `ProcessPoolExecutor` in the worker cannot start below a Nanny, the default; without
one it ran old code as well, and its processes survived a killed worker; with `max_tasks_per_child=1` it costs 0.5 s.
"""

import asyncio
import concurrent.futures
import contextlib
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
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from stages.artifacts import code, process
from stages.artifacts.errors import StageError

PATIENCE = 60.0
"""Seconds to wait for the scheduler's file, the scheduler, or any worker: they may start together with the stage."""

_SECONDS_TO_KILL = 10.0  # the tasks that run, after an error or Ctrl-C

_SETTINGS = {
    "distributed.admin.large-graph-warning-threshold": "1 TiB",  # Dask would warn of each larger task
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}
_ROOT = str(Path(__file__).parents[2])
_CALL = "import sys; sys.path.insert(0, sys.argv[1]); from stages.corpus import cluster; cluster.{}()"
_SERVE, _KILL = _CALL.format("serve"), _CALL.format("kill_tasks")


class Cluster:
    """A Dask cluster that computes one function."""

    def __init__(
        self, client: Any, place: str, function: Callable[[Any], Any], initializer: Callable[[], None], patience: float
    ) -> None:
        module = function.__module__
        if module == "__main__" and (spec := sys.modules[module].__spec__):
            module = spec.name  # as in `python -m stages.extract`
        self._client, self._place, self._patience = client, place, patience
        self._function, self._initializer = function, initializer
        # A pickle of its own: it can be read where the code differs, when that of the task perhaps cannot.
        self._header = pickle.dumps((module, code.digest_with_packages(module)))
        # By default an equal task that the cluster still knows is not run again; but a task also writes a file.
        self._pool = client.get_executor(pure=False)
        self._submitted = itertools.count()
        self._name = uuid.uuid4().hex  # in the command lines of its tasks

    def submit(self, task: Any) -> Callable[[], Any]:
        """Start a task, and return a function that waits for its result."""
        future = self._pool.submit(
            subprocess.run,  # pickled by name, so that the worker needs no module of the project
            [sys.executable, "-c", _SERVE, _ROOT, self._name],
            input=self._header + pickle.dumps((self._function, self._initializer, task)),
            capture_output=True,
            cwd=os.getcwd(),
            # By default Dask only roughly keeps the order. A result that is late keeps all later ones in memory.
            priority=-next(self._submitted),
        )
        return partial(self._wait, future)

    def num_workers(self) -> int:
        """The number of tasks that the cluster can compute at the same time now: workers come and go."""
        try:
            return sum(self._client.nthreads().values())  # the worker runs a task, and so a process, in each thread
        except OSError:
            raise self.lost() from None

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            return
        # The tasks are killed and waited for: they write where the caller cleans up next.
        self._pool.shutdown(wait=False)  # it only cancels those that have not begun
        # Not forever: a worker may not answer, and the stage no longer listens to Ctrl-C.
        killing = threading.Thread(target=self._kill, daemon=True)
        killing.start()
        killing.join(min(_SECONDS_TO_KILL, self._patience))

    def _kill(self) -> None:
        # In a thread of the worker, as meanwhile it must receive what was cancelled.
        command = [sys.executable, "-c", _KILL, _ROOT, self._name]
        with contextlib.suppress(OSError):  # the scheduler is lost
            self._client.run(asyncio.to_thread, subprocess.run, command, on_error="ignore")

    def lost(self) -> StageError:
        """The error for a scheduler that no longer answers."""
        return StageError(f"the Dask scheduler {self._place} was lost; nothing was published: start it and run again")

    def _wait(self, future: "Future[subprocess.CompletedProcess[bytes]]") -> Any:
        while True:
            try:
                completed = future.result(self._patience)
            except concurrent.futures.TimeoutError:
                # A task of any length is allowed; a cluster without workers would wait forever.
                if not self.num_workers():
                    raise StageError(
                        f"the Dask scheduler {self._place} had no worker for {self._patience:g} seconds; nothing was "
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
def connect(
    function: Callable[[Any], Any],
    num_workers: int,
    scheduler: str | None,
    initializer: Callable[[], None],
    patience: float = PATIENCE,
) -> Iterator[Cluster]:
    """Yield a cluster for `function`, a module's function.

    Args:
        function: What to compute.
        num_workers: Processes of a cluster on this machine.
        scheduler: Address of a scheduler, or the file that it writes; None: a cluster in this process.
        initializer: A module's function that each process calls before its task.
        patience: Seconds to wait for the scheduler's file, the scheduler, or any worker.

    Raises:
        StageError: Dask, the scheduler or its workers are missing or were lost, or a worker cannot run the project.
    """
    dask, distributed = _import("dask"), _import("distributed")
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(_SETTINGS))
        # What matters is raised as an exception; Dask also logs each task that it cancels.
        stack.enter_context(importlib.import_module("distributed.utils").silence_logging_cmgr(logging.CRITICAL))
        if scheduler is None:
            target, place = stack.enter_context(_local(num_workers)), "of this process"
        else:
            target = _address(scheduler, patience)
            place = f"at {target}"
        try:
            client = stack.enter_context(distributed.Client(target, timeout=patience, set_as_default=False))
        except OSError:
            raise StageError(
                f"no Dask scheduler answered {place} within {patience:g} seconds: start one with `dask scheduler`, "
                f"correct runtime.dask_scheduler, now {scheduler}, or set runtime.executor to processes"
            ) from None
        try:
            with Cluster(client, place, function, initializer, patience) as cluster:
                yield cluster
        except concurrent.futures.CancelledError:
            raise cluster.lost() from None
        except distributed.KilledWorker:
            raise StageError(
                "several Dask workers were killed during the same task, most often because memory ran out; nothing was "
                "published: start workers with fewer threads (`dask worker --nthreads`) and run again"
            ) from None


def _local(num_workers: int) -> Any:
    """A cluster in this process: a worker with a thread for each process that it may start.

    Its parts communicate without sockets. Dask always starts HTTP servers: here they have no pages, and accept
    connections of this machine only (with `dashboard_address=None`, of all).
    """
    return _import("distributed").LocalCluster(
        n_workers=1,
        threads_per_worker=num_workers,
        processes=False,
        memory_limit=None,  # it counts this process only, not those of the tasks
        silence_logs=False,  # `connect` does
        dashboard_address="127.0.0.1:0",
        worker_dashboard_address="127.0.0.1:0",
        scheduler_kwargs={"dashboard": False},
    )


def serve() -> None:
    """Compute a task in this process: from standard input to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all; the stage alone answers it
    # Dask gives the task of a lost worker to another one, which writes the same file: this process must not continue.
    # The kernel reports only an end that comes after the request. An earlier one is seen by the pipe that it closed.
    process.die_with_parent(signal.SIGKILL)
    if _is_closed(1):
        os._exit(1)
    # The descriptors, not sys.stdout alone: C code and child processes print, too.
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a task prints must not mix with the answer
    outcome: tuple[Any, Exception | None, str]
    try:
        # Two pickles in a row: the digest is compared before the task is read, which needs the same code.
        module, digest = pickle.load(sys.stdin.buffer)
        if code.digest_with_packages(module) != digest:
            raise StageError(
                f"a Dask worker on {socket.gethostname()} finds other code or packages than the stage: let all "
                f"machines share {_ROOT} and {sys.prefix}, do not edit the code while a stage runs, and run again"
            )
        # A stage runs as __main__, so the pickle may name its functions and classes as `__main__.x`.
        sys.modules["__main__"] = importlib.import_module(module)
        function, initializer, task = pickle.load(sys.stdin.buffer)
        initializer()
        outcome = function(task), None, ""
    except Exception as error:  # of any kind: the stage raises it
        outcome = None, error, traceback.format_exc()
    with answer:
        pickle.dump(outcome, answer)


def kill_tasks() -> None:
    """Kill the tasks of a cluster, which is named on the command line, on this machine."""
    named = [each for each in psutil.process_iter(["cmdline"]) if sys.argv[2] in (each.info["cmdline"] or ())]
    tasks = [each for each in named if each.pid != os.getpid()]
    for task in tasks:
        with contextlib.suppress(psutil.NoSuchProcess):
            task.kill()
    psutil.wait_procs(tasks)


def _is_closed(pipe: int) -> bool:
    """Whether nobody can read what is written to a pipe."""
    poll = select.poll()
    poll.register(pipe, 0)  # POLLERR, which is reported unasked: the other end is closed
    return bool(poll.poll(0))


def _read(completed: "subprocess.CompletedProcess[bytes]") -> Any:
    """The result that `serve` wrote; an exception that it caught is raised here."""
    messages = completed.stderr.decode(errors="replace")
    if completed.returncode < 0:
        raise StageError(
            f"a process of a Dask worker was killed by signal {-completed.returncode}, most often because memory ran "
            "out; nothing was published: start workers with fewer threads (`dask worker --nthreads`) and run again"
        )
    if completed.returncode > 0:
        raise StageError(f"a Dask worker cannot run {_ROOT}, which all machines must share:\n{messages}")
    sys.stderr.write(messages)  # warnings of the task: otherwise they would stay on the worker's machine
    result, error, trace = pickle.loads(completed.stdout)
    if error is not None:
        raise error from RuntimeError(trace)  # a traceback cannot be pickled, its text can
    return result


def _address(scheduler: str, patience: float) -> str:
    """The address of a scheduler, which may be given by the file that it writes."""
    if "://" in scheduler:
        return scheduler
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            return str(json.loads(Path(scheduler).read_bytes())["address"])
        except (OSError, ValueError, KeyError):  # not there yet, or only a part of it
            time.sleep(0.1)
    raise StageError(
        f"runtime.dask_scheduler is {scheduler}, and no such file named a scheduler within {patience:g} seconds: start "
        "one with `dask scheduler --scheduler-file`, or give an address such as tcp://host:8786"
    )


def _import(name: str) -> ModuleType:
    """Import a package whose version decides no result, in a way that `code.digest_with_packages` does not see."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise StageError(
            f"runtime.executor is dask, but {name} is not installed: run `make setup`, or install the extra `dask` of "
            "pyproject.toml"
        ) from None
