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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

import psutil

from stages.training.handoff import DIRECTORY

_FILE = "heartbeat-"  # and the rank
_MAX_BYTES = 128  # of a note
_LOG = logging.getLogger(__name__)


class Heartbeat:
    """What this rank is doing now, for the watchdog and for the log of a `debug` run. A note costs microseconds."""

    def __init__(self, rank: int) -> None:
        self.number, self.activity = 0, "start"
        """How many notes there were, and the newest one."""
        self._file = None
        if DIRECTORY in os.environ:
            self._file = (Path(os.environ[DIRECTORY]) / f"{_FILE}{rank}").open("wb", buffering=0)
        self.note("start")

    def note(self, activity: str) -> None:
        """This rank starts another activity."""
        self.number, self.activity = self.number + 1, activity
        _LOG.debug(activity)
        if self._file is not None:
            note = f"{os.getpid()} {self.number} {activity}".encode()[:_MAX_BYTES]
            # One write of a fixed length at offset 0: the watchdog never reads a mix of two notes.
            os.pwrite(self._file.fileno(), note.ljust(_MAX_BYTES), 0)


class Note(NamedTuple):
    """The newest note of a rank, and what became of the process."""

    rank: int
    node: str
    """Its name; empty where all ranks are on one machine."""
    number: int
    activity: str
    is_alive: bool
    is_stopped: bool
    """As by SIGSTOP."""

    def __str__(self) -> str:
        return rank_name(self.rank, self.node)


def rank_name(rank: int, node: str) -> str:
    """What messages call a rank."""
    return f"rank {rank} on node {node}" if node else f"rank {rank}"


def read_notes(directory: Path, node: str) -> Iterator[Note]:
    """The notes in the directory of the ranks of this machine, which is called `node`."""
    for path in sorted(directory.glob(f"{_FILE}*")):
        pid, _, rest = path.read_text(encoding="utf-8", errors="replace").rstrip().partition(" ")
        number, _, activity = rest.partition(" ")
        if activity:  # otherwise the file has just been created
            status = _status(int(pid))
            is_alive = status not in (None, psutil.STATUS_ZOMBIE)
            rank = int(path.name.removeprefix(_FILE))
            yield Note(rank, node, int(number), activity, is_alive, status == psutil.STATUS_STOPPED)


class Ranks(Protocol):
    """What the watchdog needs to know of all ranks of a training, and to do with them."""

    def notes(self) -> list[Note]:
        """The newest note of each."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all."""


class Watchdog:
    """Kills the ranks when one of them made no progress for too long; a context manager around their lives.

    Args:
        ranks: Of all nodes.
        limit: Seconds. Only the time in which this process runs counts: suspending the whole training (SIGSTOP to the
            process group, a laptop that sleeps) does not end it.
        dump_stacks: Whether to send SIGUSR2 first, at which ranks of a `debug` run write their stacks to their logs.
        report: Called with `hang` before the ranks are killed.
    """

    def __init__(
        self, ranks: Ranks, limit: float, dump_stacks: bool, report: Callable[[str], None] = lambda _: None
    ) -> None:
        self.hang: str | None = None
        """Which rank hung, and where; None as long as none did."""
        self._ranks = ranks
        self._limit = limit
        self._dump_stacks = dump_stacks
        self._report = report
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        interval = check_interval(self._limit)
        idle: dict[tuple[int, int], float] = {}
        while not self._ended.wait(interval):
            # Without those that have ended, whose notes no longer change while others still save.
            notes = [note for note in self._ranks.notes() if note.is_alive]
            # Counted in intervals of this loop, not by a clock, which would also count while this process is suspended.
            keys = [(note.rank, note.number) for note in notes]
            idle = {key: idle.get(key, -interval) + interval for key in keys}
            if idle and max(idle.values()) >= self._limit:
                self.hang = _describe(notes, max(idle.values()))
                self._report(self.hang)
                if self._dump_stacks:
                    self._ranks.send(signal.SIGUSR2)
                    time.sleep(1)  # for faulthandler to write
                # All: those that wait for it would only report a timeout. Not SIGTERM, after which a rank finishes its
                # step and saves: one that hangs cannot.
                self._ranks.send(signal.SIGKILL)
                return


def check_interval(limit: float) -> float:
    """Seconds between two looks at the notes, where `limit` are too many without progress."""
    return min(1.0, limit / 20)


def _describe(notes: list[Note], seconds: float) -> str:
    # Named first: a stopped process may have written as many notes as those that wait for it.
    stopped = [note for note in notes if note.is_stopped]
    fewest = min(note.number for note in notes)
    behind = stopped or [note for note in notes if note.number == fewest]
    text = " and ".join(f"{note} made no progress for {seconds:.0f} s: {note.activity}" for note in behind)
    if stopped:
        text += " (the process is stopped, as by SIGSTOP)"
    waiting = [f"{note} in {note.activity}" for note in notes if note not in behind]
    return text + (f"; waiting for it: {', '.join(waiting)}" if waiting else "")


def _status(pid: int) -> str | None:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return None
