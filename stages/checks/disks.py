"""Directories that the pipeline writes into: space, and what it needs of their file systems."""

import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path

from stages.artifacts import publish
from stages.artifacts.command import format_gib
from stages.artifacts.errors import StageError
from stages.artifacts.file_lock import flock, local_locks, open_lock
from stages.checks.findings import Finding, error, ok, warning

_TRY_LOCK = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "a+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(3)
"""


def existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists: where it would be made."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def by_file_system(directories: Mapping[str, Path]) -> dict[str, Path]:
    """One directory of each file system, by the names of all that are on it."""
    return _group(directories, lambda path: path.stat().st_dev)


def by_directory(directories: Mapping[str, Path]) -> dict[str, Path]:
    """Each directory once, by its names: several that are missing would be made in the same one."""
    return _group(directories, lambda path: path)


def _group(directories: Mapping[str, Path], key: Callable[[Path], Hashable]) -> dict[str, Path]:
    """The first existing directory of each group with the same key, by the names of all that are in it."""
    groups: dict[Hashable, dict[str, Path]] = {}
    for name, path in directories.items():
        path = existing(path)
        groups.setdefault(key(path), {})[name] = path
    return {", ".join(group): next(iter(group.values())) for group in groups.values()}


def check_space(names: str, path: Path, wanted: int = 2**30) -> Iterator[Finding]:
    """Free bytes and files of a file system; what the checkpoints need is compared by `stages.plan`."""
    free = shutil.disk_usage(path).free
    statistics = os.statvfs(path)
    what = f"{names}: {format_gib(free)} free"
    remedy = "free some space (data/.reuse has results of earlier runs), or move it to a larger disk"
    if free < wanted / 64:  # less than what the sample corpus leaves
        yield error(what, remedy)
    elif statistics.f_files and statistics.f_favail < 1000:
        yield error(f"{what}, but only {statistics.f_favail:,} more files fit", "delete files (`df -i` counts them)")
    elif free < wanted:
        yield warning(what, remedy)
    else:
        yield ok(what)


def check_file_system(names: str, path: Path, num_nodes: int = 1, slow_seconds: float = 1.0) -> Iterator[Finding]:
    """Locks between processes, a rename that replaces a file, and fsync, in a temporary directory below `path`.

    Args:
        names: Of what is, or will be, in this directory.
        path: The directory: of two on one file system one may be mounted read-only, or belong to somebody else.
        num_nodes: On several, locks of one node only are an error.
        slow_seconds: For an fsync of a small file.
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
        target = directory / "file"
        start = time.monotonic()
        publish.write_text(target, "old")  # fsync of the file and the directory, and a rename
        publish.write_text(target, "new")
        seconds = (time.monotonic() - start) / 2
        if target.read_text() != "new":
            yield error(f"{names}: {path} does not replace a file by a rename", "use another file system")
        elif seconds > slow_seconds:
            yield warning(f"{names}: an fsync takes {seconds:.1f} s", "a faster disk: each save waits for several")
        else:
            yield ok(f"{names}: rename and fsync work, in {1000 * seconds:.0f} ms")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _check_locks(names: str, directory: Path, num_nodes: int) -> Iterator[Finding]:
    path = directory / "lock"
    mount = "mount its file system with locks that all nodes see (docs/shared-disks.md), or use another one"
    try:
        with open_lock(path) as lock:
            flock(lock, fcntl.LOCK_EX)
            # In another process: NFS makes them locks of POSIX, which never exclude their own process.
            status = subprocess.run([sys.executable, "-ISc", _TRY_LOCK, str(path)], capture_output=True).returncode
    except StageError as problem:
        yield Finding("error", f"{names}: {problem}")
        return
    if status != 3:
        yield error(f"{names}: a lock does not exclude another process", mount)
    elif option := local_locks(directory):
        level = error if num_nodes > 1 else warning
        yield level(f"{names}: locks exclude only processes of this node ({option})", mount)
    else:
        yield ok(f"{names}: a lock excludes other processes")
