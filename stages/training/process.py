"""Processes that are asked to stop, and runs that have one writer."""

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

from stages.artifacts.command import StageError

INTERRUPTED = 75
"""Exit status of a training that was stopped by a signal and saved: EX_TEMPFAIL, try again."""

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
"""Those that ask a training to save and end."""

LAUNCHER = "TRAINING_LAUNCHER_PID"
"""Environment variable that tells the ranks which process started them."""


class StopSignal:
    """Remembers that a signal asked this process to stop; the training looks at it between two steps."""

    def __init__(self) -> None:
        self.received = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def ignore(self) -> None:
        """From here on the signals do nothing. Python gives them back their default while it ends, which is to kill."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _remember(self, number: int, frame: object) -> None:
        self.received = True


def forward_stop_signals(told: Callable[[], None]) -> None:
    """From here on, pass each stop signal on to the children of this process, which then end it by ending themselves.

    The signals are blocked in this thread, and so in the children until their `StopSignal` is ready: none is lost, and
    none kills a child that is still starting.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def forward() -> None:
        while True:
            signal.sigwait(STOP_SIGNALS)
            told()
            while not (children := psutil.Process().children()):
                time.sleep(0.1)
            for child in children:
                child.send_signal(signal.SIGTERM)

    threading.Thread(target=forward, daemon=True).start()


@contextmanager
def single_writer(directory: Path, report: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Hold a run's directory; yields a function that tells those who wait what this process is doing.

    A second writer meets a clear error. Only where the first one was told to stop and is saving is it waited for, and
    until its last rank has ended: `share_writing` is held by each of them.

    Raises:
        StageError: another training writes into the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "writer.lock").open("a+") as lock:
        waiting = False
        while not _try_lock(lock):
            status = _status(lock)
            if "stopping" not in status:
                raise StageError(
                    f"another training writes into {directory} ({status}): wait for it, or stop it with SIGTERM"
                )
            if not waiting:
                report(f"waiting for a training that saves its last checkpoint ({status})")
            waiting = True
            time.sleep(0.5)
        with (directory / "ranks.lock").open("a") as ranks:
            fcntl.flock(ranks, fcntl.LOCK_EX)  # ranks whose launcher was killed end within a second

        def tell(status: str) -> None:
            lock.seek(0)
            lock.truncate()
            lock.write(f"{status}, process {os.getpid()} on {os.uname().nodename}")
            lock.flush()

        tell("running")
        yield tell


@contextmanager
def is_only_writer(directory: Path) -> Iterator[bool]:
    """Hold a run's directory if no training writes into it or reads it; yields whether it is held."""
    with (directory / "writer.lock").open("a+") as lock, (directory / "ranks.lock").open("a+") as ranks:
        yield _try_lock(lock) and _try_lock(ranks)


@contextmanager
def share_writing(directory: Path) -> Iterator[None]:
    """Held by each rank while it lives: no other training begins before the last one of them has ended.

    One that goes on from another run's checkpoint holds that run's directory, too, while it reads.
    """
    with (directory / "ranks.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _status(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read() or "starting"
