"""What stages raise for people, which is shown without a traceback, and how errors of others become that.

Those of the operating system, and memory that ran out, are turned into it here, for the boundary of a stage
(`command.run`); those of torch in stages/ranks/torch_errors.py, for the boundary of a rank.
"""

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.base.names import printable

_REMEDIES = dict.fromkeys(
    (errno.ENOSPC, errno.EDQUOT),
    ": free some space on that file system (data/.reuse of the project has results of earlier runs), and run again",
) | {
    errno.EFBIG: ": raise the limit on the size of files (`ulimit -f unlimited`), and run again",
    errno.EMFILE: ": raise the limit on open files (`ulimit -n 4096`), and run again",
}

_OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE}

MAY_PASS = frozenset(
    (errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH,
     errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN, errno.EREMOTEIO)
)  # fmt: skip
"""Errors that a file system gives while its server is away, or is being repaired."""

_OUT_OF_MEMORY = re.compile(
    r"MemoryError|bad_alloc|DefaultCPUAllocator|can't allocate memory|can't start new thread|out of memory|"
    r"_ALLOC_FAILED|cudaError: 2\b"
)
"""In the class or the message: of Python, C++, the CPU allocator, threads, CUDA and NCCL, cuBLAS, and pinned memory."""


class StageError(Exception):
    """A mistake that the user can fix. Its message states what was given, what is allowed and what to do.

    Each argument is a line of it, whatever the names in it contain: none of them can begin a line of its own.
    """

    def __str__(self) -> str:
        return "\n".join(map(printable, self.args))


class Unavailable(StageError):
    """A file system failed in a way that may pass: trying again a moment later makes sense."""


def as_stage_error(error: StageError | OSError) -> StageError:
    """One line for an error of the operating system: the path, the cause, and for a full disk the remedy.

    `Unavailable`, if it may pass. What is a StageError stays as it is.
    """
    if isinstance(error, StageError):
        return error
    remedy = _REMEDIES.get(error.errno or 0, "")
    # Of a copy, the second name is the file that is written.
    path = (remedy and error.filename2) or error.filename
    message = f"{path}: " * bool(path) + f"{error.strerror or error}{remedy}"
    return (Unavailable if error.errno in MAY_PASS else StageError)(message)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: most libraries have no class of their own for it."""
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, (MemoryError, RuntimeError)) and _OUT_OF_MEMORY.search(text) is not None


def one_line(error: object) -> str:
    """The message of a library, which may have many lines, for a line of ours."""
    return printable(" ".join(str(error).split())[:500])


@contextmanager
def explained(
    make: Callable[[str], StageError], goes_on: Callable[[BaseException], bool] = is_out_of_memory
) -> Iterator[None]:
    """Have an error of any class, as libraries raise them at what somebody else has written, be one for people.

    Args:
        make: Makes it, of the class and the message of that error.
        goes_on: Whether an error is none of these.
    """
    try:
        yield
    except (StageError, MemoryError):
        raise
    except BaseException as error:
        if isinstance(error, SystemError) and "without setting an exception" in str(error):
            raise MemoryError from None  # which C code has lost
        is_panic = type(error).__module__ == "pyo3_runtime"  # of Rust, which makes no Exception of it
        is_of_system = isinstance(error, OSError) and error.errno is not None  # of a disk, for one
        if not (isinstance(error, Exception) or is_panic) or is_of_system or goes_on(error):
            raise
        # The first sentence: libraries go on with advice to whoever calls them.
        problem = f"{type(error).__name__}: {one_line(error).partition('. ')[0]}"
        raise make(problem) from None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in the error of a disk, which names no file if it comes from writing to an open one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _OF_DISKS:
            error.filename = str(path)
        raise
