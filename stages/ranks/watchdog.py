"""Finding the rank that hangs: each rank notes what it is doing, and rank 0 watches the notes of all.

A rank that hangs keeps the others waiting in the next collective, and from outside all of them look alike. But all
ranks write the same notes in the same order, so the one with the fewest notes is the one that the others wait for.
Within a note, what takes long because of its bytes counts their pieces; as long as one rank goes on, none hangs.
Each publishes its newest note in the store of the process group, whoever has started it, and ends when rank 0 asks for
it there. The thread that does this runs while its rank waits for another one, or for a file. If rank 0 itself is
stopped, the others end at the timeout of the process group.

torchelastic has timers too (torch.distributed.elastic.timer): they kill every process whose own timer has expired. In a
collective that is all of them, so they cannot name the rank at fault, nor what it was doing, which is what a person
needs; NCCL's own watchdog sees collectives only, not a rank that is stuck in reading data.
"""

import json
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from stages.forward.distributed import run_on_rank0

_LOG = logging.getLogger(__name__)

_CHECKS = 60
"""How often the notes are looked at within the limit. A ninth of it is left until the timeout of the process group; it
contains the up to five intervals until rank 0 has seen it and all have obeyed."""

_SILENT = 10
"""A rank that has published nothing in so many of these intervals is stopped, or its node is lost."""


class Heartbeat:
    """What this rank is doing now, for the watchdog and for the log of a `debug` run."""

    def __init__(self) -> None:
        self.number, self.activity = 0, ""
        """How many notes there were, and the newest one."""
        self.pieces = 0
        """Of files, that were read or written; not as many on all ranks."""
        self.note("start")

    def note(self, activity: str) -> None:
        """This rank starts another activity."""
        self.number, self.activity = self.number + 1, activity
        _LOG.debug(activity)

    def goes_on(self) -> None:
        """The activity makes progress; called from any thread."""
        self.pieces += 1


class Note(NamedTuple):
    """The newest note of a rank, as it is published."""

    rank: int
    node: str
    number: int
    activity: str
    pieces: int
    has_ended: bool
    beat: int
    """How often the rank has published."""

    def __str__(self) -> str:
        return f"rank {self.rank} on node {self.node}"


@contextmanager
def watched(heartbeat: Heartbeat, timeout_minutes: float, dump_stacks: bool = False) -> Iterator[None]:
    """Watch all ranks in the block, and kill them if one makes no progress; a collective at its start.

    Args:
        heartbeat: Of this rank.
        timeout_minutes: That of the process group.
        dump_stacks: Whether the ranks get SIGUSR2 before, at which those of a `debug` run write their stacks.
    """
    # A little earlier than the process group's own timeout, after which the others could not say who was at fault.
    watchdog = _Watchdog(heartbeat, 60 * timeout_minutes * 0.9, dump_stacks)
    dist.barrier()  # all have published a note
    watchdog.thread.start()
    try:
        yield
    finally:
        watchdog.ended.set()
        watchdog.thread.join()


class _Watchdog:
    """Publishes the notes of this rank and obeys rank 0, in a thread; there it also watches the notes of all.

    Args:
        heartbeat: Of this rank.
        limit: Seconds without progress. Only the time in which rank 0 runs counts: suspending the whole training
            (SIGSTOP to the process group, a laptop that sleeps) does not end it.
        dump_stacks: As for `watched`.
    """

    def __init__(self, heartbeat: Heartbeat, limit: float, dump_stacks: bool) -> None:
        self._heartbeat, self._limit, self._dump_stacks = heartbeat, limit, dump_stacks
        self._interval = limit / _CHECKS
        # Its own name for each start: torchrun keeps its store, and the last signal in it, when it restarts the ranks.
        # Its own connection: the main thread may wait in the store for minutes.
        name = run_on_rank0(lambda: secrets.token_hex(4))
        self._store = dist.PrefixStore(f"watchdog {name}", _get_default_store()).clone()  # type: ignore[attr-defined]
        self._beat = 0
        self._num_obeyed = 0
        self._idle: dict[tuple[int, int, int], float] = {}
        """Seconds since a rank has written its note of a number, or gone on with it."""
        self._silent: dict[tuple[int, int], int] = {}
        """How often the beat of a rank was found to be the same."""
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self._publish(has_ended=False)

    def _publish(self, has_ended: bool) -> None:
        self._beat += 1
        rank, node = dist.get_rank(), os.environ.get("SLURMD_NODENAME", os.uname().nodename)
        now = self._heartbeat
        note = Note(rank, node, now.number, now.activity, now.pieces, has_ended, self._beat)
        self._store.set(f"note {rank}", json.dumps(note))

    def _run(self) -> None:
        # An error of the store may pass, as a full /tmp does. If the store has ended, with its rank or agent,
        # collectives fail, which ends this rank.
        while not self.ended.wait(self._interval):
            with suppress(dist.DistError):
                self._publish(has_ended=False)
                if dist.get_rank() == 0:
                    self._watch()
                self._obey()
        with suppress(dist.DistError):
            self._publish(has_ended=True)

    def _obey(self) -> None:
        while self._store.check([f"signal {self._num_obeyed}"]):
            number = int(self._store.get(f"signal {self._num_obeyed}"))
            self._num_obeyed += 1
            if dist.get_rank() == 0:  # the last one: the store may end with it
                time.sleep(2 * self._interval)
            os.kill(os.getpid(), number)

    def _watch(self) -> None:
        texts = self._store.multi_get([f"note {rank}" for rank in range(dist.get_world_size())])
        # Without those that have ended, whose notes no longer change while others still save.
        notes = [note for note in (Note(*json.loads(text)) for text in texts) if not note.has_ended]
        # Counted in intervals of this loop, not by a clock, which would also count while this process is suspended.
        keys = [(note.rank, note.number, note.pieces) for note in notes]
        self._idle = {key: self._idle.get(key, -self._interval) + self._interval for key in keys}
        beats = [(note.rank, note.beat) for note in notes]
        self._silent = {key: self._silent.get(key, -1) + 1 for key in beats}
        # The shortest: while one rank still writes its share, the others wait for it.
        if self._num_obeyed or min(self._idle.values(), default=0) < self._limit:
            return
        stopped = [note for note in notes if self._silent[note.rank, note.beat] >= _SILENT]
        with suppress(OSError):  # a terminal that is closed: the ranks must end nevertheless
            print(f"error: {describe(notes, stopped, max(self._idle.values()))}", file=sys.stderr, flush=True)
        # All: those that wait for it would only report a timeout. Not SIGTERM, after which a rank finishes its step and
        # saves: one that hangs cannot.
        for place, number in enumerate((signal.SIGUSR2, signal.SIGKILL) if self._dump_stacks else (signal.SIGKILL,)):
            self._store.set(f"signal {place}", str(int(number)))


def describe(notes: list[Note], stopped: list[Note], seconds: float) -> str:
    """Which rank the others wait for, and what each of them does."""
    # Those that are stopped are named first: they may have written as many notes as those that wait for them.
    fewest = min(note.number for note in notes)
    behind = stopped or [note for note in notes if note.number == fewest]
    text = " and ".join(f"{note} made no progress for {seconds:.0f} s: {note.activity}" for note in behind)
    if stopped:
        text += " (the process is stopped, as by SIGSTOP, or its node is lost)"
    waiting = [f"{note} in {note.activity}" for note in notes if note not in behind]
    return text + (f"; waiting for it: {', '.join(waiting)}" if waiting else "")
