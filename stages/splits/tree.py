"""Which files of a directory are read, and why the others are skipped.

Written for millions of small files: paths are strings, joined as such, and not Path objects. `organize` needs 9.2 s for
a million files with two processes (docs/benchmarks.md).
"""

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from stages.base.errors import StageError, one_line
from stages.splits.manifests import PassedOver

NOT_REGULAR = "not a regular file"
"""Why a pipe, a socket or a device is skipped."""
OTHER_SUFFIX = "other suffix"
"""Why a file of another format is."""

_CHUNK = 1 << 20  # bytes read at once


def by_path(item: PassedOver) -> tuple[str, str]:
    """The key of the order in summary.json."""
    return item.path, item.reason


def walk(root: Path, is_wanted: Callable[[str], bool]) -> tuple[list[str], list[PassedOver]]:
    """List all files at any depth whose name `is_wanted`; no file is opened, so nothing can block.

    A link to a file is read if the file is under `root` and is not read under another name: so the snapshots of a
    Hugging Face cache are read through their links. A link into the cache of this project's DVC is the file. Links to
    directories are not followed: everything under `root` is found without them, and a loop cannot arise.

    Returns:
        The paths relative to `root`, sorted, and what was skipped, sorted. In a name that is not UTF-8 the invalid
        bytes are lone surrogates, as `os.fsdecode` makes them.
    """
    files: list[str] = []
    links: list[str] = []
    passed_over: list[PassedOver] = []
    directories = [""]  # a stack of our own: depth is not limited by recursion
    while directories:
        directory = directories.pop()
        try:
            with os.scandir(root / directory) as listing:
                entries = list(listing)  # an error in the middle drops all of a directory, not a random part
        except OSError as error:
            passed_over.append(PassedOver(directory, f"unreadable: {error.strerror}"))
            continue
        for entry in entries:
            path = directory + entry.name
            if entry.name.startswith("."):
                passed_over.append(PassedOver(path + "/" * entry.is_dir(follow_symlinks=False), "hidden"))
            elif entry.is_file(follow_symlinks=False):  # first, as most are
                if is_wanted(entry.name):
                    files.append(path)
                else:
                    passed_over.append(PassedOver(path, OTHER_SUFFIX))
            elif entry.is_symlink():  # later: whether its target is read anyway is known only when all files are
                links.append(path)
            elif entry.is_dir(follow_symlinks=False):
                directories.append(path + "/")
            else:
                passed_over.append(PassedOver(path, NOT_REGULAR))
    real_root = os.path.realpath(root)  # raw_dir itself may be a link to another disk
    taken = {os.path.join(real_root, path) for path in files} if links else set()
    cache = _dvc_cache() if links else None
    for path in sorted(links):  # of several links to one file the first in this order is read, on every machine
        target = os.path.realpath(root / path)
        if reason := _objection(path, target, real_root, cache, taken, is_wanted):
            passed_over.append(PassedOver(path, reason))
        else:
            files.append(path)
            taken.add(target)
    return sorted(files), sorted(passed_over, key=by_path)  # os.scandir has the order of the file system


# These reasons are values in summary.json, so they keep their words: another word would change the output.
def _objection(
    path: str, target: str, real_root: str, cache: str | None, taken: set[str], is_wanted: Callable[[str], bool]
) -> str | None:
    if not os.path.exists(target):
        return "broken link"  # its target is missing, or it leads back to itself
    # Files with the same bytes are one there, and each of them is read, as if DVC had made copies.
    is_cached = cache is not None and _is_in(target, cache)
    if not (is_cached or _is_in(target, real_root)):
        return "link that leaves the directory"
    if os.path.isdir(target):
        return "link to a directory"
    if not os.path.isfile(target):
        return NOT_REGULAR
    if not is_wanted(path):
        return OTHER_SUFFIX
    return "link to a file that is already read" if target in taken and not is_cached else None


def _is_in(path: str, directory: str) -> bool:
    # With a slash at the end of both: `raw-old` is not inside `raw`, but a link to `raw` itself leaves nothing.
    return os.path.join(path, "").startswith(os.path.join(directory, ""))


def _dvc_cache() -> str | None:
    """The directory into which DVC links the files that it tracks (`cache.type`); None: there is no DVC here."""
    if not os.path.isdir(".dvc"):
        return None
    from dvc.config import Config, ConfigError  # takes half a second

    try:
        config = Config(".dvc")
    except ConfigError as error:
        raise StageError(f"{one_line(error)}: correct .dvc/config") from None
    return os.path.realpath(config["cache"].get("dir") or ".dvc/cache")


def size(path: str) -> int:
    """The size of a file in bytes; 0 where it cannot be found: whoever reads it reports why."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def open_regular(path: str | Path) -> int:
    """Open a file for reading and return its descriptor, without waiting, whatever has become of it since the walk.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    # Without O_NONBLOCK a pipe would wait for a writer before it could be recognized; a regular file ignores the flag.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, NOT_REGULAR, os.fspath(path))
    return descriptor


def measure(path: str | Path) -> tuple[int, str]:
    """The size of a file in bytes and the SHA-256 of its bytes, in hexadecimal.

    SHA-256 because current processors have instructions for it (1.8 GB/s a core, twice as fast as BLAKE2b), because
    DVC and the Hugging Face Hub show it too, and because equal digests must mean equal content.
    """
    digest, size = hashlib.sha256(), 0
    descriptor = open_regular(path)  # a descriptor is a third faster than `open` for a million small files
    try:
        while chunk := os.read(descriptor, _CHUNK):
            digest.update(chunk)
            size += len(chunk)
    finally:
        os.close(descriptor)
    return size, digest.hexdigest()
