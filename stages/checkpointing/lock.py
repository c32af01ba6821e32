"""Who may write into the directory of a run.

Three locks (flock) in it are held by open files, so the kernel releases them when their process ends, however it ends:

    writer.lock    exclusive, by the launcher: a second training of the same run is refused
    ranks.lock     shared, by each rank while it lives: ranks may outlive a launcher that was killed by a second or so,
                   and the next launcher waits for the last one of them before it starts
    readers.lock   shared, by those who read checkpoints of a run that is not their own; exclusive, by the run while it
                   deletes old ones. It never waits for readers: what it cannot delete now, it deletes at a later save

Locks of flock belong to an open file, and Python's files are not inherited by the programs that a process starts: so
the ranks do not keep the launcher's lock. The files are never deleted: a lock on a deleted file excludes no one who
creates the file again.
"""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from stages.artifacts.errors import StageError

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
        while not _flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
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
        with _open(directory, _RANKS) as ranks:
            _flock(ranks, fcntl.LOCK_EX)

        _set_status(lock, "running")
        yield partial(_set_status, lock)


@contextmanager
def try_writer_lock(directory: Path, status: str) -> Iterator[bool]:
    """Hold a run's directory if no training writes into it; yields whether it is held.

    `status` is what a launcher shows meanwhile.
    """
    # The ranks' too: a training without a launcher has only that one.
    with _open(directory, _WRITER) as lock, _open(directory, _RANKS) as ranks:
        is_held = all(_flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) for file in (lock, ranks))
        if is_held:
            _set_status(lock, status)
        yield is_held


@contextmanager
def rank_lock(directory: Path) -> Iterator[None]:
    """Held by each rank while it lives: no other training starts before the last one of them has ended."""
    with _open(directory, _RANKS) as lock:
        _flock(lock, fcntl.LOCK_SH)
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
                _flock(lock, fcntl.LOCK_SH)
        yield


@contextmanager
def try_delete_lock(directory: Path) -> Iterator[bool]:
    """Keep others from reading the checkpoints of a run; yields whether nobody was reading."""
    with _open(directory, _READERS) as lock:
        yield _flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _open(directory: Path, name: str) -> IO[str]:
    directory.mkdir(parents=True, exist_ok=True)
    # For reading and writing: on NFS a shared lock needs the first, an exclusive one the second. Not "w+", which would
    # erase the status of the launcher that has the lock.
    return (directory / name).open("a+")


def _flock(lock: IO[str], operation: int) -> bool:
    """Lock a file; False where another process has it and the operation is not to wait."""
    try:
        fcntl.flock(lock, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        raise StageError(
            f"{lock.name} cannot be locked ({error.strerror}), and without locks two trainings could write into one "
            "directory: mount its file system with locks (Lustre: -o flock or -o localflock; NFS: a server with a lock "
            "manager, or -o local_lock=flock on a single machine), or set CHECKPOINT_ROOT to another file system"
        ) from None
    return True


def _set_status(lock: IO[str], status: str) -> None:
    lock.seek(0)
    lock.truncate()
    lock.write(f"{status}, process {os.getpid()} on {os.uname().nodename}")
    lock.flush()  # for other processes to read; a power cut ends the lock too, so no fsync


def _status(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read() or "starting"
