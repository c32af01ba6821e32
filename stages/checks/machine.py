"""What the operating system allows, and the directories that the pipeline writes into."""

import getpass
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from stages.base.command import format_gib
from stages.base.errors import StageError
from stages.base.file_lock import exclusive, local_locks, open_lock
from stages.checks.findings import Finding, Found, collect, error, ok, warning

_GIB = 2**30

_TRY_LOCK = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "a+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(3)
"""


def check_user() -> Found[bool]:
    """The home directory and the name of the user, without which DVC cannot start; whether there are both."""
    unknown = []
    for name, find in {"HOME": Path.home, "USER": getpass.getuser}.items():
        try:
            find()
        except (RuntimeError, KeyError, OSError):  # OSError: since Python 3.13
            unknown.append(name)
    if not unknown:
        yield ok("the user has a name and a home directory")
        return True
    yield error(
        f"DVC cannot start: {' and '.join(unknown)} {'are' if len(unknown) > 1 else 'is'} not set, and the system "
        f"knows no user {os.getuid()}, as in a container that runs with --user",
        "`export HOME=/tmp/home USER=me`, with a directory that you can write to",
    )
    return False


def check_shared_memory(path: Path = Path("/dev/shm"), wanted: int = _GIB) -> Found[None]:
    """/dev/shm, in which the ranks of NCCL on one node exchange tensors; containers often have 64 MiB of it."""
    free = shutil.disk_usage(path).free
    what = f"{path} has {format_gib(free)} free"
    if free < wanted:
        remedy = "remove what others have left in it, or start the container with --shm-size=8g or --ipc=host"
        yield warning(f"{what}, and NCCL may need {format_gib(wanted)}", remedy)
    else:
        yield ok(what)


def check_directories(directories: Mapping[str, Path], num_nodes: int) -> Found[None]:
    """All that the pipeline writes into, by name: each file system once, and each directory once."""
    places: dict[Path, list[str]] = {}
    for name, path in directories.items():
        try:
            places.setdefault(existing(path), []).append(name)
        except StageError as problem:
            yield Finding("error", f"{name}: {problem}")
    for path in {path.stat().st_dev: path for path in reversed(places)}.values():
        yield from collect(check_space(path))
    for path, names in places.items():
        yield from collect(check_writing(", ".join(names), path, num_nodes))


def existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists: where it would be made.

    Raises:
        StageError: something else is in its place.
    """
    path = path.absolute()
    found = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not found.is_dir():
        raise StageError(f"{found} is not a directory, and stages make one there: move it away")
    return found


def check_space(path: Path) -> Found[None]:
    """Free bytes and files of a file system; what the checkpoints need is compared by `stages.plan`."""
    free, statistics = shutil.disk_usage(path).free, os.statvfs(path)
    what = f"the disk of {path} has {format_gib(free)} free"
    remedy = "free some space (data/.reuse has results of earlier runs), or move it to a larger disk"
    if statistics.f_files and statistics.f_favail < 1000:
        yield error(f"{what}, but only {statistics.f_favail:,} more files fit", "delete files (`df -i` counts them)")
    elif free < _GIB:
        # Less than a 64th is less than what the sample corpus leaves.
        yield (error if free < _GIB / 64 else warning)(what, remedy)
    else:
        yield ok(what)


def check_writing(names: str, path: Path, num_nodes: int) -> Found[None]:
    """Files, and locks between processes, in a temporary directory below `path`.

    Args:
        names: Of what is, or will be, in this directory.
        path: The directory: of two on one file system one may be mounted read-only, or belong to somebody else.
        num_nodes: On several, locks of one node only are an error.
    """
    directory = path / f".doctor-{secrets.token_hex(4)}"
    try:
        directory.mkdir()
    except OSError as problem:
        reason = problem.strerror or str(problem)
        yield error(f"{names}: cannot write into {path} ({reason})", "`chown` or remount it, or choose another place")
        return
    try:
        yield from _check_locks(names, directory, num_nodes)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _check_locks(names: str, directory: Path, num_nodes: int) -> Found[None]:
    path = directory / "lock"
    mount = "mount its file system with locks that all nodes see (docs/shared-disks.md), or use another one"
    with open_lock(path) as lock:
        exclusive(lock)
        # In another process: NFS makes them locks of POSIX, which never exclude their own process.
        status = subprocess.run([sys.executable, "-ISc", _TRY_LOCK, str(path)], capture_output=True).returncode
    if status != 3:
        yield error(f"{names}: a lock does not exclude another process", mount)
    elif option := local_locks(directory):
        level = error if num_nodes > 1 else warning
        yield level(f"{names}: locks exclude only processes of this node ({option})", mount)
    else:
        yield ok(f"{names}: a lock excludes other processes")
