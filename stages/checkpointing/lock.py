"""Who may write into the directory of a run.

Three locks (flock) in it are held by open files, so the kernel releases them when their process ends, however it ends:

    writer.lock    exclusive, by the launcher: a second training of the same run is refused
    ranks.lock     shared, by each rank while it lives: ranks may outlive a launcher that was killed by a second or so,
                   and the next launcher waits for the last one of them before it starts
    readers.lock   shared, by those who read checkpoints of a run that is not their own; exclusive, by the run while it
                   deletes old ones. It never waits for readers: what it cannot delete now, it deletes at a later save

stages/artifacts/file_lock.py describes what such a lock is.
"""

import errno
import fcntl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from stages.artifacts.errors import StageError
from stages.artifacts.file_lock import flock, open_lock, read_status, set_status

_WRITER, _RANKS, _READERS = "writer.lock", "ranks.lock", "readers.lock"


@contextmanager
def writer_lock(directory: Path, report: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Hold a run's directory; yields a function that sets the status that other launchers show.

    A second writer fails with a clear error. It waits only where the first one was asked to stop and is saving its last
    checkpoint; `report` is then called with a message.

    Raises:
        StageError: another training writes into the directory.
    """
    with _open(directory, _WRITER) as lock:
        waiting = False
        while not flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            status = read_status(lock)
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
        with _open(directory, _RANKS) as ranks:
            flock(ranks, fcntl.LOCK_EX)

        set_status(lock, "running")
        yield partial(set_status, lock)


@contextmanager
def try_writer_lock(directory: Path, status: str) -> Iterator[bool]:
    """Hold a run's directory if no training writes into it; yields whether it is held.

    `status` is what a launcher shows meanwhile.
    """
    # The ranks' too: a training without a launcher has only that one.
    with _open(directory, _WRITER) as lock, _open(directory, _RANKS) as ranks:
        is_held = all(flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) for file in (lock, ranks))
        if is_held:
            set_status(lock, status)
        yield is_held


@contextmanager
def rank_lock(directory: Path) -> Iterator[None]:
    """Held by each rank while it lives: no other training starts before the last one of them has ended."""
    with _open(directory, _RANKS) as lock:
        flock(lock, fcntl.LOCK_SH)
        yield


@contextmanager
def read_lock(directories: Iterable[Path]) -> Iterator[None]:
    """Held while checkpoints of other runs are read: none of them is deleted meanwhile.

    A directory that this process may read but not write, as that of another user, is read without a lock.
    """
    with ExitStack() as stack:
        for directory in directories:
            try:
                lock = stack.enter_context(_open(directory, _READERS))
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
            else:
                flock(lock, fcntl.LOCK_SH)
        yield


@contextmanager
def try_delete_lock(directory: Path) -> Iterator[bool]:
    """Keep others from reading the checkpoints of a run; yields whether nobody was reading."""
    with _open(directory, _READERS) as lock:
        yield flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _open(directory: Path, name: str) -> IO[str]:
    return open_lock(directory / name)
