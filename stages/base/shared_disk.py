"""Files on a disk that several nodes share: what one of them reads after another has written.

NFS is consistent from close to open: who opens a file or a directory sees what others have closed before. It is not
for names: that a name does not exist, a node remembers for up to a minute (acdirmax), for `open` too, until it opens
the directory. So each name that another node may just have created is looked up after `refresh`.
"""

import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_OF_ONE_NODE = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"}


def refresh(directories: Iterable[Path]) -> None:
    """Have the file system ask its server again what is in some directories. Missing ones are no error."""
    # From the top: a name that another node has replaced is looked up again in the directory above.
    for path in sorted({above for directory in directories for above in (directory, *directory.parents)}):
        with suppress(OSError):
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


def wait_for_file(path: Path, size: int | None, seconds: float) -> bool:
    """Whether this node sees a file with a size, or with any if that is None, at the latest after `seconds`."""
    end = time.monotonic() + seconds
    while (found := find_size(path, size)) is None or size not in (None, found):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
        refresh([path.parent])
    return True


def find_size(path: Path, expected: int | None = None) -> int | None:
    """The size of a file, in bytes; None: there is no such file.

    Args:
        path: The file.
        expected: Its size, if that is known: where `stat` returns another one, that may be a minute old.
    """
    try:
        found = path.stat()
        if expected not in (None, found.st_size):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
            found = os.fstat(descriptor)
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def mounted(path: Path) -> tuple[str, list[str]]:
    """The file system of a path, which need not exist, and its mount options; "" where that is not known."""
    path = path.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    if not mounts:
        return "", []
    # Of several on one directory the last one is on top.
    mount = max(reversed(mounts), key=lambda mount: len(mount.mountpoint))
    return mount.fstype, mount.opts.split(",")


def may_be_shared(path: Path) -> bool:
    """Whether other nodes may have the disk of a path too: not where its file system is known to be of one node."""
    return mounted(path)[0] not in _OF_ONE_NODE
