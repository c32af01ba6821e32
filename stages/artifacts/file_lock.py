"""Advisory locks on files (flock): the kernel releases them when the process that holds them ends, however it ends.

A lock of flock belongs to an open file, and Python's files are not inherited by the programs that a process starts: so
workers and ranks do not keep the lock of the process that started them. Lock files are never deleted: a lock on a
deleted file excludes no one who creates the file again.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

from stages.artifacts.errors import StageError, naming


def open_lock(path: Path) -> IO[str]:
    """Open a lock file, which is created if it is missing. Closing it releases its lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # For reading and writing: on NFS a shared lock needs the first, an exclusive one the second. Not "w+", which would
    # erase the status of the process that has the lock.
    return path.open("a+")


def flock(lock: IO[str], operation: int) -> bool:
    """Lock a file; False where another process has it and the operation is not to wait.

    Raises:
        StageError: its file system has no locks.
    """
    try:
        fcntl.flock(lock, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        raise StageError(
            f"{lock.name} cannot be locked ({error.strerror}), and without locks two runs could write into one "
            "directory: mount its file system with locks (Lustre: -o flock or -o localflock; NFS: a server with a lock "
            "manager, or -o local_lock=flock on a single machine), or use another one (for checkpoints, set "
            "CHECKPOINT_ROOT)"
        ) from None
    return True


def set_status(lock: IO[str], status: str) -> None:
    """Write into a lock file what its holder does, and which process it is."""
    # Not through the file's buffer: closing the file would try again to write what a full disk refused. No fsync: a
    # power cut ends the lock, too.
    with naming(Path(lock.name)):
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"{status}, process {os.getpid()} on {os.uname().nodename}".encode())


def read_status(lock: IO[str]) -> str:
    """What the holder of a lock has written."""
    lock.seek(0)
    return lock.read() or "starting"
