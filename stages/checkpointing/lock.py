"""Who may write into the directory of a run.

Two locks (flock) in it are held by open files, so the kernel releases them when their process ends, however it ends:

    writer.lock    exclusive, by the launcher: a second training of the same run is refused
    ranks.lock     shared, by each rank while it lives: ranks may outlive a launcher that was killed by a second or so,
                   and the next launcher waits for the last one of them before it starts

Locks of flock belong to an open file, and Python's files are not inherited by the programs that a process starts: so
the ranks do not keep the launcher's lock. The files are never deleted: a lock on a deleted file excludes no one who
creates the file again.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from stages.artifacts.errors import StageError

_WRITER, _RANKS = "writer.lock", "ranks.lock"


@contextmanager
def writer_lock(directory: Path, report: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Hold a run's directory; yields a function that sets the status that other launchers show.

    A second writer fails with a clear error. It waits only where the first one was asked to stop and is saving its last
    checkpoint; `report` is then called with a message.

    Raises:
        StageError: another training writes into the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / _WRITER).open("a+") as lock:  # not "w+", which would erase the status of the one who has the lock
        waiting = False
        while not _try_lock(lock):
            status = _status(lock)
            # A `dvc` that is stopped ends before the training has saved: `dvc repro` right after it waits, and resumes.
            if "stopping" not in status:
                raise StageError(
                    f"another training writes into {directory} ({status}): wait for it, or stop it with SIGTERM"
                )
            if not waiting:
                report(f"waiting for a training that is saving its last checkpoint ({status})")
            waiting = True
            time.sleep(0.5)  # polled: a third launcher may get the lock first, and then this one must fail
        # Released at once: it only shows that all ranks have ended, and the new ones are about to lock it themselves.
        with (directory / _RANKS).open("a") as ranks:
            fcntl.flock(ranks, fcntl.LOCK_EX)

        def set_status(status: str) -> None:
            lock.seek(0)
            lock.truncate()
            lock.write(f"{status}, process {os.getpid()} on {os.uname().nodename}")
            lock.flush()  # for other processes to read; a power cut ends the lock too, so no fsync

        set_status("running")
        yield set_status


@contextmanager
def try_writer_lock(directory: Path) -> Iterator[bool]:
    """Hold a run's directory if no training writes into it or reads from it; yields whether it is held."""
    # Both: a training without a launcher has only the second, and so has a run that reads from this one.
    with (directory / _WRITER).open("a+") as lock, (directory / _RANKS).open("a+") as ranks:
        yield _try_lock(lock) and _try_lock(ranks)


@contextmanager
def rank_lock(directory: Path) -> Iterator[None]:
    """Held by each rank while it lives: no other training starts before the last one of them has ended.

    A rank that resumes from another run's checkpoint also holds that run's directory while it reads, so that
    `checkpoints prune` does not delete what is being read.
    """
    with (directory / _RANKS).open("a") as lock:
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
