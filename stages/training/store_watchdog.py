"""The watchdog of ranks that another launcher has started, such as torchrun on several nodes.

There is no process of ours beside the ranks, so rank 0 watches itself and all others: each publishes its notes in the
store of the process group, and ends when rank 0 asks for it there. The thread that does this runs while its rank waits
for another one, or for a file. If rank 0 itself is stopped, the others end at the timeout of the process group.
"""

import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from stages.training.distributed import run_on_rank0
from stages.training.params import TrainRuntime
from stages.training.watchdog import Heartbeat, Note, Watchdog, check_interval

_SILENT = 10
"""A rank that has published nothing in so many intervals is stopped, or its node is lost."""


@contextmanager
def watched(heartbeat: Heartbeat, runtime: TrainRuntime) -> Iterator[None]:
    """Watch all ranks in the block, and kill them if one makes no progress; a collective at its start."""
    limit = 60 * runtime.timeout_minutes * 0.9  # a little earlier than the process group's own timeout
    ranks = _StoreRanks(heartbeat, check_interval(limit))
    dist.barrier()  # all have published a note
    is_rank0 = dist.get_rank() == 0
    with ranks, Watchdog(ranks, limit, runtime.debug, _print_error) if is_rank0 else nullcontext():
        yield


def _print_error(reason: str) -> None:
    print(f"error: {reason}", file=sys.stderr, flush=True)


class _StoreRanks:
    """Publishes the notes of this rank and obeys rank 0, in a thread; there it also reads the notes of all."""

    def __init__(self, heartbeat: Heartbeat, interval: float) -> None:
        self._heartbeat, self._interval = heartbeat, interval
        # A copy each: the main thread may wait in the store for minutes, and the others need theirs meanwhile.
        # Its own name for each start: torchrun keeps its store, and the last signal in it, when it restarts the ranks.
        name = run_on_rank0(lambda: secrets.token_hex(4))
        store = dist.PrefixStore(f"watchdog {name}", _get_default_store())
        self._store, self._reader = (store.clone() for _ in range(2))  # type: ignore[attr-defined]
        self._beats = 0
        self._silent: dict[int, tuple[int, int]] = {}
        """Of each rank its last beat, and how often it was read again."""
        self._num_sent = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._publish(is_alive=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def notes(self) -> list[Note]:
        """The newest note of each rank."""
        notes = []
        try:
            texts = self._reader.multi_get([f"note {rank}" for rank in range(dist.get_world_size())])
        except dist.DistError:  # see `_serve`
            return []
        for rank, text in enumerate(texts):
            node, number, activity, is_alive, beat = json.loads(text)
            last, times = self._silent.get(rank, (0, 0))
            self._silent[rank] = (beat, times + 1 if beat == last else 0)
            notes.append(Note(rank, node, number, activity, is_alive, self._silent[rank][1] >= _SILENT))
        return notes

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all ranks, this one too."""
        self._reader.set(f"signal {self._num_sent}", str(int(number)))
        self._num_sent += 1

    def _publish(self, is_alive: bool) -> None:
        self._beats += 1
        note = (os.uname().nodename, self._heartbeat.number, self._heartbeat.activity, is_alive, self._beats)
        self._store.set(f"note {dist.get_rank()}", json.dumps(note))

    def _serve(self) -> None:
        num_received = 0
        try:
            while not self._ended.wait(self._interval):
                self._publish(is_alive=True)
                while self._store.check([f"signal {num_received}"]):
                    number = int(self._store.get(f"signal {num_received}"))
                    num_received += 1
                    if dist.get_rank() == 0:  # the last one: the store may end with it
                        time.sleep(2 * self._interval)
                    os.kill(os.getpid(), number)
            self._publish(is_alive=False)
        except dist.DistError:
            pass  # the store ends with its rank or agent: collectives fail then, which ends this rank
