"""Who may write into the directory of a run.

Two locks (flock) in it are held by open files, so the kernel releases them when their process ends, however it ends:

    writer.lock    exclusive, by the launcher: a second training of the same run is refused
    ranks.lock     shared, by each rank while it lives: ranks may outlive a launcher that was killed by a second or so,
                   and the next launcher waits for the last one of them before it starts. A node that was cut off from
                   the file server has lost it, so that rank 0 checks it before it publishes

stages/base/file_lock.py describes what such a lock is.
"""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from stages.base.errors import StageError, Unavailable, as_stage_error
from stages.base.file_lock import (
    is_of_another_node,
    local_locks,
    open_lock,
    read_status,
    set_status,
    shared,
    try_exclusive,
)

_WRITER, _RANKS = "writer.lock", "ranks.lock"

_LEASE_SECONDS = 200
"""A file server keeps the locks of a node that was lost for so long: NFS 90 s by default, Lustre 150 s."""

_POLL_SECONDS = 0.5


@contextmanager
def writer_lock(
    directory: Path, report: Callable[[str], None], lease_seconds: float = _LEASE_SECONDS, waits: bool = False
) -> Iterator[Callable[[str], None]]:
    """Hold a run's directory; yields a function that sets the status that other launchers show.

    A second writer fails with a clear error. It waits only with `waits`, where the first one was asked to stop and is
    saving its last checkpoint, and where it is on another node, which may be lost; `report` is then called with a
    message.

    Args:
        directory: Of the run.
        report: Called with messages.
        lease_seconds: How long it waits for a writer on another node, which may be lost.
        waits: Whether it waits for any writer to end, to take its result.

    Raises:
        StageError: another training writes into the directory.
    """
    if found := local_locks(directory):
        report(
            f"warning: the locks of {directory} exclude only trainings on this node ({found}): never start this run on "
            "two nodes at once, or mount it with locks that all nodes see (docs/shared-disks.md)"
        )
    with ExitStack() as stack:
        start, reported = time.monotonic(), ""
        while not try_exclusive(lock := stack.enter_context(open_lock(directory / _WRITER))):
            status = read_status(lock)
            stack.close()  # NFS reads what another node has written only when no process of this one has it open
            # A `dvc` that is stopped ends before the training has saved: `dvc repro` right after it waits, and resumes.
            if "stopping" in status:
                message = f"waiting for a training that is saving its last checkpoint ({status})"
            elif waits:
                message = f"waiting for another experiment that trains the same run ({status})"
            elif is_of_another_node(status) and time.monotonic() < start + lease_seconds:
                message = (
                    f"waiting up to {lease_seconds:.0f} s for another training ({status}): if its node was lost, the "
                    "file server releases its lock"
                )
            else:
                raise StageError(
                    f"another training writes into {directory} ({status}): wait for it, or stop it with SIGTERM"
                )
            if message != reported:
                report(message)
            reported = message
            time.sleep(_POLL_SECONDS)  # polled: a third launcher may get the lock first, and then this one must fail
        set_status(lock, "starting")  # others may poll while this waits for the ranks
        wait_for_ranks(directory, report)
        set_status(lock, "running")

        def update(status: str) -> None:
            # It only informs others, and a signal must stop the ranks on any disk; after them, the file may be closed.
            with suppress(OSError, ValueError):
                set_status(lock, status)

        yield update


def wait_for_ranks(
    directory: Path, report: Callable[[str], None], is_stopping: Callable[[], bool] = lambda: False
) -> None:
    """Wait until the last rank of an earlier start has ended, or until `is_stopping`."""
    # Released at once: it only shows that all ranks have ended, and the new ones are about to lock it themselves.
    with open_lock(directory / _RANKS) as ranks:
        start, is_reported = time.monotonic(), False
        while not try_exclusive(ranks) and not is_stopping():
            if not is_reported and time.monotonic() > start + 2:
                is_reported = True
                report(
                    f"waiting until the last rank of the training before has ended ({ranks.name} is locked); that of a "
                    "lost node has when the file server releases its lock"
                )
            time.sleep(_POLL_SECONDS)


@contextmanager
def try_writer_lock(directory: Path, status: str) -> Iterator[bool]:
    """Hold a run's directory if no training writes into it; yields whether it is held.

    `status` is what a launcher shows meanwhile.
    """
    # The ranks' too: a training without a launcher has only that one.
    with open_lock(directory / _WRITER) as lock, open_lock(directory / _RANKS) as ranks:
        is_held = all(try_exclusive(file) for file in (lock, ranks))
        if is_held:
            set_status(lock, status)
        yield is_held


@contextmanager
def rank_lock(directory: Path) -> Iterator[Callable[[], None]]:
    """Held by each rank while it lives: no other training starts before the last one of them has ended.

    Yields a function that raises an error where the lock is no longer held, or `Unavailable` where that is not known.
    """
    with open_lock(directory / _RANKS) as lock:
        shared(lock)
        yield partial(_confirm, lock)


def _confirm(lock: IO[str]) -> None:
    # A file server gives the locks of a node that it has not heard of for its lease to others. What the node then
    # writes through such a file fails (NFS: EIO), but nothing else that it writes does.
    try:
        set_status(lock, "training")
    except OSError as error:
        error.filename = lock.name
        if error.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
            raise
        problem = as_stage_error(error)
        try:
            with open_lock(Path(lock.name)) as opened_again:
                set_status(opened_again, "training")
        except OSError:
            raise Unavailable(str(problem)) from None  # the disk is away; the next try finds out about the lock
        raise StageError(
            f"{problem}: this node did not reach the file server for longer than its lease, so the lock is lost, and "
            "another training may have started; launch it again"
        ) from None
