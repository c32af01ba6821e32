"""What each rank is doing: noted by the ranks, and watched by their launcher, which names the one that hangs.

A rank that no longer moves keeps the others waiting in the next collective operation, and from outside all of them look
alike. All ranks note the same in the same order, so the one with the fewest notes is the one that the others wait for.
"""

import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import psutil

DIRECTORY = "TRAINING_ACTIVITY"
"""Environment variable with the launcher's directory, in which each rank has a file."""

_LONGEST = 128  # bytes of a note
_LOG = logging.getLogger(__name__)


class Activity:
    """What this rank is doing now, for its launcher and the log of a `debug` run. A note takes microseconds."""

    def __init__(self, rank: int) -> None:
        self._count = 0
        self._file = None
        if DIRECTORY in os.environ:
            self._file = (Path(os.environ[DIRECTORY]) / str(rank)).open("wb", buffering=0)
        self.note("start")

    def note(self, what: str) -> None:
        """This rank begins to do something else."""
        self._count += 1
        _LOG.debug(what)
        if self._file is not None:
            note = f"{os.getpid()} {self._count} {what}".encode()[:_LONGEST]
            os.pwrite(self._file.fileno(), note.ljust(_LONGEST), 0)


class Note(NamedTuple):
    """The newest note of a rank."""

    rank: int
    pid: int
    number: int
    what: str


class Watchdog:
    """Ends the ranks when one of them has not moved for too long; a context manager around their lives, in a thread.

    Args:
        limit: Seconds. They are counted while this process runs, so that one who suspends all of it ends nothing.
        wants_stacks: Whether the ranks write their stacks into their logs at SIGUSR2.
    """

    def __init__(self, limit: float, wants_stacks: bool) -> None:
        self.hang: str | None = None
        """Which rank hung, and where; None as long as none did."""
        self._limit = limit
        self._wants_stacks = wants_stacks
        self._directory = tempfile.TemporaryDirectory(prefix="training-")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        os.environ[DIRECTORY] = self._directory.name
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self._directory.cleanup()

    def what(self, rank: int) -> str:
        """What a rank of this machine was doing last."""
        return next((note.what for note in self._notes() if note.rank == rank), "start")

    def _notes(self) -> Iterator[Note]:
        for path in sorted(Path(self._directory.name).iterdir()):
            pid, _, rest = path.read_text(encoding="utf-8", errors="replace").rstrip().partition(" ")
            number, _, what = rest.partition(" ")
            if what:  # else it is being created
                yield Note(int(path.name), int(pid), int(number), what)

    def _watch(self) -> None:
        interval = min(1.0, self._limit / 20)
        idle: dict[Note, float] = {}
        while not self._ended.wait(interval):
            idle = {note: idle.get(note, -interval) + interval for note in self._notes() if psutil.pid_exists(note.pid)}
            if idle and max(idle.values()) >= self._limit:
                self.hang = _describe(list(idle), max(idle.values()))
                self._kill([note.pid for note in idle])
                return

    def _kill(self, pids: list[int]) -> None:
        if self._wants_stacks:
            _signal(pids, signal.SIGUSR2)
            time.sleep(1)
        _signal(pids, signal.SIGKILL)


def _describe(notes: list[Note], seconds: float) -> str:
    stopped = [note for note in notes if _is_stopped(note.pid)]
    fewest = min(note.number for note in notes)
    behind = stopped or [note for note in notes if note.number == fewest]
    text = " and ".join(f"rank {note.rank} has not moved for {seconds:.0f} s: {note.what}" for note in behind)
    if stopped:
        text += " (the process is stopped, as by SIGSTOP)"
    waiting = [f"rank {note.rank} in {note.what}" for note in notes if note not in behind]
    return text + (f"; waiting for it: {', '.join(waiting)}" if waiting else "")


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
