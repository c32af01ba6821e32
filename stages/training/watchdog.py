"""Finding the rank that hangs: each rank notes what it is doing, and the launcher watches the notes.

A rank that hangs keeps the others waiting in the next collective, and from outside all of them look alike. But all
ranks write the same notes in the same order, so the one with the fewest notes is the one that the others wait for.

torchelastic has timers too (torch.distributed.elastic.timer): they kill every process whose own timer has expired. In a
collective that is all of them, so they cannot name the rank at fault, nor what it was doing, which is what a person
needs; NCCL's own watchdog sees collectives only, not a rank that is stuck in reading data.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import psutil

from stages.training.handoff import DIRECTORY

_FILE = "heartbeat-"  # and the rank
_MAX_BYTES = 128  # of a note
_LOG = logging.getLogger(__name__)


class Heartbeat:
    """What this rank is doing now, for the watchdog and for the log of a `debug` run. A note costs microseconds."""

    def __init__(self, rank: int) -> None:
        self._count = 0
        self._file = None
        if DIRECTORY in os.environ:
            self._file = (Path(os.environ[DIRECTORY]) / f"{_FILE}{rank}").open("wb", buffering=0)
        self.note("start")

    def note(self, activity: str) -> None:
        """This rank starts another activity."""
        self._count += 1
        _LOG.debug(activity)
        if self._file is not None:
            note = f"{os.getpid()} {self._count} {activity}".encode()[:_MAX_BYTES]
            # One write of a fixed length at offset 0: the watchdog never reads a mix of two notes.
            os.pwrite(self._file.fileno(), note.ljust(_MAX_BYTES), 0)


class Note(NamedTuple):
    """The newest note of a rank."""

    rank: int
    pid: int
    number: int
    activity: str


class Watchdog:
    """Kills the ranks when one of them made no progress for too long; a context manager around their lives.

    Args:
        directory: Where the ranks write their notes.
        limit: Seconds. Only the time in which this process runs counts: suspending the whole training (SIGSTOP to the
            process group, a laptop that sleeps) does not end it.
        dump_stacks: Whether to send SIGUSR2 first, at which ranks of a `debug` run write their stacks to their logs.
    """

    def __init__(self, directory: Path, limit: float, dump_stacks: bool) -> None:
        self.hang: str | None = None
        """Which rank hung, and where; None as long as none did."""
        self._limit = limit
        self._dump_stacks = dump_stacks
        self._directory = directory
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def activity(self, rank: int) -> str:
        """What a rank of this machine was doing last."""
        return next((note.activity for note in self._notes() if note.rank == rank), "start")

    def _notes(self) -> Iterator[Note]:
        for path in sorted(self._directory.glob(f"{_FILE}*")):
            pid, _, rest = path.read_text(encoding="utf-8", errors="replace").rstrip().partition(" ")
            number, _, activity = rest.partition(" ")
            if activity:  # otherwise the file has just been created
                yield Note(int(path.name.removeprefix(_FILE)), int(pid), int(number), activity)

    def _watch(self) -> None:
        interval = min(1.0, self._limit / 20)
        idle: dict[Note, float] = {}
        while not self._ended.wait(interval):
            # Without those that have ended, whose notes no longer change while others still save.
            notes = [note for note in self._notes() if psutil.pid_exists(note.pid)]
            # Counted in intervals of this loop, not by a clock, which would also count while this process is suspended.
            idle = {note: idle.get(note, -interval) + interval for note in notes}
            if idle and max(idle.values()) >= self._limit:
                self.hang = _describe(notes, max(idle.values()))
                self._kill([note.pid for note in notes])  # all: those that wait for it would only report a timeout
                return

    def _kill(self, pids: list[int]) -> None:
        if self._dump_stacks:
            _send(pids, signal.SIGUSR2)
            time.sleep(1)  # for faulthandler to write
        # Not SIGTERM, after which a rank finishes its step and saves: one that hangs cannot.
        _send(pids, signal.SIGKILL)


def _describe(notes: list[Note], seconds: float) -> str:
    # Named first: a stopped process may have written as many notes as those that wait for it.
    stopped = [note for note in notes if _is_stopped(note.pid)]
    fewest = min(note.number for note in notes)
    behind = stopped or [note for note in notes if note.number == fewest]
    text = " and ".join(f"rank {note.rank} made no progress for {seconds:.0f} s: {note.activity}" for note in behind)
    if stopped:
        text += " (the process is stopped, as by SIGSTOP)"
    waiting = [f"rank {note.rank} in {note.activity}" for note in notes if note not in behind]
    return text + (f"; waiting for it: {', '.join(waiting)}" if waiting else "")


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
