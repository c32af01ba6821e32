"""What stages raise for people, which is shown without a traceback."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REMEDIES = dict.fromkeys(
    (errno.ENOSPC, errno.EDQUOT),
    ": free some space on that file system (data/.reuse of the project has results of earlier runs), and run again",
) | {errno.EFBIG: ": raise the limit on the size of files (`ulimit -f unlimited`), and run again"}

_OF_DISKS = {*_REMEDIES, errno.EIO, errno.EROFS, errno.ESTALE}


class StageError(Exception):
    """A mistake that the user can fix. Its message states what was given, what is allowed and what to do."""


class Unavailable(StageError):
    """A file system failed in a way that may pass: trying again a moment later makes sense."""


def describe(error: OSError) -> str:
    """One line for an error of the operating system: the path, the cause, and for a full disk the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "")
    # Of a copy, the second name is the file that is written.
    path = (remedy and error.filename2) or error.filename or "a file"
    return f"{path}: {error.strerror or error}{remedy}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in the error of a disk, which names no file if it comes from writing to an open one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _OF_DISKS:
            error.filename = str(path)
        raise
