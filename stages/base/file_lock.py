"""Advisory locks on files (flock): the kernel releases them when the process that holds them ends, however it ends.

A lock of flock belongs to an open file, and Python's files are not inherited by the programs that a process starts: so
workers and ranks do not keep the lock of the process that started them. Lock files are never deleted: a lock on a
deleted file excludes no one who creates the file again.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import IO, Any

from stages.base.errors import StageError, naming
from stages.base.names import printable
from stages.base.shared_disk import mounted


def open_lock(path: Path) -> IO[str]:
    """Open a lock file, which is created if it is missing. Closing it releases its lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # For reading and writing: on NFS a shared lock needs the first, an exclusive one the second. Not "w+", which would
    # erase the status of the process that has the lock.
    return path.open("a+")


def exclusive(lock: IO[Any]) -> None:
    """Lock a file for this process alone, once no other process has it.

    Raises:
        StageError: its file system has no locks; so do the other two.
    """
    _flock(lock, fcntl.LOCK_EX)


def try_exclusive(lock: IO[Any]) -> bool:
    """Lock a file for this process alone; False where another process has it."""
    return _flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def shared(lock: IO[Any]) -> None:
    """Lock a file together with others that share it, once no other process has it alone."""
    _flock(lock, fcntl.LOCK_SH)


def _flock(lock: IO[Any], operation: int) -> bool:
    try:
        fcntl.flock(lock, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        raise StageError(
            f"{lock.name} cannot be locked ({error.strerror}), and without locks two runs could write into one "
            "directory: mount its file system with locks (Lustre: -o flock; NFSv3: a server with a lock manager; on a "
            "single node also -o localflock or -o local_lock=flock), or use another one (for checkpoints, set "
            "CHECKPOINT_ROOT)"
        ) from None
    return True


def set_status(lock: IO[str], status: str) -> None:
    """Write into a lock file what its holder does, and which process it is."""
    # Not through the file's buffer: closing the file would try again to write what a full disk refused.
    with naming(Path(lock.name)):
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"{status}, process {os.getpid()} on {os.uname().nodename}".encode())
        os.fsync(lock.fileno())  # NFS would keep it on this node for as long as the file is open


def read_status(lock: IO[str]) -> str:
    """What the holder of a lock has written."""
    # Opened again: NFS looks for what other nodes have written when a file is opened.
    return printable(Path(lock.name).read_text(errors="replace")) or "starting"


def is_of_another_node(status: str) -> bool:
    """Whether the holder of a lock, by its status, is not on this node, or has not written yet where it is."""
    _, on, node = status.rpartition(" on ")
    return not on or node != os.uname().nodename


def local_locks(path: Path) -> str | None:
    """The file system and the mount option which make the locks of `path` exclude only processes of this node."""
    kind, options = mounted(path)
    # NFSv3, that is: version 4 ignores these options.
    wanted = {"nfs": ("nolock", "local_lock=all", "local_lock=flock"), "lustre": ("localflock",), "cifs": ("nobrl",)}
    local = [option for option in wanted.get(kind, ()) if option in options]
    return f"{kind} mounted with {local[0]}" if local else None
