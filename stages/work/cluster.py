"""The tasks of a map on a Dask cluster, whose workers may run on many machines.

The workers need nothing but Dask: each task names the project's directory, from which they import its code. They keep
it as long as they live, so the digest of what they have imported is compared with that of the stage.
"""

import concurrent.futures
import importlib
import json
import logging
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from stages.base import code, process
from stages.base.errors import StageError
from stages.work import workers

_ROOT = str(Path(__file__).parents[2])
_MODULES = ("stages.organize", "stages.extract", "stages.deduplicate", "stages.pack", "stages.scoring.contamination")


@contextmanager
def connect(function: Callable[[Any], Any], scheduler: str) -> Iterator[workers.Pool]:
    """Yield what computes `function`, a module's function, on a cluster.

    Args:
        function: What to compute.
        scheduler: Address of a scheduler, or the file that it writes.

    Raises:
        StageError: Dask, the scheduler or its workers are missing or were lost, or a worker cannot run the project.
    """
    # In a way that `code.digest_with_packages` does not see: the version of Dask decides no result.
    try:
        distributed = importlib.import_module("distributed")
    except ImportError:
        raise StageError(
            f"runtime.dask_scheduler is {scheduler}, but distributed is not installed: run `make setup`, or install "
            "the extra `dask` of pyproject.toml"
        ) from None
    module = function.__module__
    if module == "__main__" and (spec := sys.modules[module].__spec__):
        module = spec.name  # as in `python -m stages.extract`
    compute = _computing(_ROOT, os.getcwd(), module, code_digest())
    with ExitStack() as stack:
        # What matters is raised as an exception; Dask also logs each task that it cancels.
        stack.enter_context(importlib.import_module("distributed.utils").silence_logging_cmgr(logging.CRITICAL))
        address = _address(scheduler)
        try:
            client = distributed.Client(address, timeout=workers.PATIENCE, set_as_default=False)
        except OSError:
            raise StageError(
                f"no Dask scheduler answered at {address} within {workers.PATIENCE:g} seconds: start one with `dask "
                f"scheduler`, correct runtime.dask_scheduler, now {scheduler}, or set it to null"
            ) from None
        stack.callback(_close, client)
        lost = StageError("the Dask scheduler was lost; nothing was published: start it and run again")
        executor = client.get_executor(pure=False)  # pure: a task that is equal to an earlier one would not run

        def submit(task: Any) -> "concurrent.futures.Future[Any]":
            # fifo_timeout: by default Dask only roughly keeps the order. A result that is late keeps all later ones in
            # memory.
            return executor.submit(compute, pickle.dumps((function, task)), fifo_timeout=0)  # type: ignore[no-any-return]

        def count() -> int:
            try:
                return sum(client.nthreads().values())
            except OSError:
                raise lost from None

        try:
            yield workers.Pool(submit, count)
        except BaseException as error:
            with process.uninterrupted(), suppress(OSError, TimeoutError):
                # The tasks are killed: they write where the caller cleans up next.
                busy = [worker for worker, keys in client.processing().items() if client.futures.keys() & {*keys}]
                executor.shutdown(wait=False)
                client.run(os._exit, 1, workers=busy, on_error="ignore")  # their nannies start others
            if isinstance(error, concurrent.futures.CancelledError):
                raise lost from None
            if isinstance(error, concurrent.futures.BrokenExecutor):
                raise StageError(
                    f"a Dask worker cannot run {_ROOT} and {sys.prefix}, which all machines must share: {error}"
                ) from None
            if isinstance(error, distributed.KilledWorker):
                raise StageError(
                    "several Dask workers were killed during the same task, most often because memory ran out; nothing "
                    "was published: start fewer workers per machine and run again"
                ) from None
            raise


def _close(client: Any) -> None:
    with suppress(RuntimeError):  # of asyncio, where the client is reconnecting to a scheduler that is lost
        client.close()


def _computing(root: str, directory: str, module: str, digest: str) -> Callable[[bytes], Any]:
    def compute(pickled: bytes) -> Any:
        # A nested function is pickled by value, so neither the scheduler nor a worker needs this module to read it.
        try:
            os.chdir(directory)
            if root not in sys.path:
                sys.path.insert(0, root)
            cluster = importlib.import_module("stages.work.cluster")
            # A stage runs as __main__, so the pickle may name its functions and classes as `__main__.x`.
            sys.modules["__main__"] = importlib.import_module(module)
        except (OSError, ImportError) as error:
            raise concurrent.futures.BrokenExecutor(f"{socket.gethostname()}: {error}") from None
        if cluster.code_digest() != digest:
            raise concurrent.futures.BrokenExecutor(
                f"{socket.gethostname()}: it has imported other code or packages; restart the workers, and run again"
            )
        function, task = pickle.loads(pickled)
        return function(task)

    return compute


@cache  # in a worker, of the time when it began to import the project
def code_digest() -> str:
    """The digest of the code of the data stages, and of the packages that they import."""
    return code.digest_with_packages(*_MODULES)


def _address(scheduler: str) -> str:
    """The address of a scheduler, which may be given by the file that it writes."""
    if "://" in scheduler:
        return scheduler
    end = time.monotonic() + workers.PATIENCE
    while time.monotonic() < end:
        try:
            return str(json.loads(Path(scheduler).read_bytes())["address"])
        except (OSError, ValueError, KeyError):  # not there yet, or only a part of it
            time.sleep(0.1)
    raise StageError(
        f"runtime.dask_scheduler is {scheduler}, and no such file named a scheduler within {workers.PATIENCE:g} "
        "seconds: start one with `dask scheduler --scheduler-file`, or give an address such as tcp://host:8786"
    )
