"""Files and directories that appear complete or not at all: written beside their place, synced, renamed.

Each stage reads what another one wrote, so a kill or a power cut must leave the old file, the new one or none, never a
part that looks finished. The price is an fsync for each file and its directory. A lock on each output keeps two runs of
a stage from writing side by side.
"""

import dataclasses
import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.base.errors import StageError, naming
from stages.base.file_lock import exclusive, open_lock, read_status, set_status, try_exclusive

LARGEST = 128 << 20
"""Bytes of a file that is read as a whole: a tokenizer.json has up to 40 MB, and JSON takes up to 20 times its size."""


class Unreadable(StageError, ValueError):
    """Not what is read as a whole: a pipe would wait for a writer, and a file may be larger than the memory."""


@contextmanager
def lock(target: Path) -> Iterator[None]:
    """Hold an output of a stage: another run of the stage in this working copy waits, and prints for whom.

    It waits rather than fails, because a stage may outlive a killed `dvc` for a moment, and the next `dvc repro` must
    not fail for that. What killed runs have left of `directory` is removed.
    """
    target = _real(target)
    with open_lock(lock_file(target)) as file:
        if not try_exclusive(file):
            print(f"waiting for another run that writes {target} ({read_status(file)})", flush=True)
            exclusive(file)
        set_status(file, "running")
        for leftover in target.parent.glob(_temporary_name(target.name, "[0-9a-f]" * 8)):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """An empty directory for the time of the block, for one process at a time; what a killed one left is removed."""
    with lock(path):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def lock_file(target: Path) -> Path:
    """What `lock` locks: not inside of the target, which is replaced."""
    return target.with_name(f".{target.name.lstrip('.')}.lock")


def _real(target: Path) -> Path:
    """Where an output is a link, as to a larger disk, what it links to is replaced, not the link."""
    return target.resolve() if target.is_symlink() else target


def _temporary_name(name: str, random: str) -> str:
    return f"{name}.{random}.tmp"  # ignored by .dvcignore


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, dataclasses by their fields; a reader sees the old file or the new one."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=_fields) + "\n")


def _fields(value: Any) -> dict[str, Any]:
    # Not `dataclasses.asdict`, which copies everything deeply: seconds for a million entries.
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} has no JSON")
    return vars(value)


@contextmanager
def together(*paths: Path) -> Iterator[None]:
    """Remove these files after an error, Ctrl-C too: a stage publishes all of them, or none."""
    try:
        yield
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        # newline: the same line ends, and digest, on each system
        with naming(path), temporary.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)  # replaces the old file in one step; both are in one directory, so on one file system
    except BaseException:  # Ctrl-C, too
        temporary.unlink(missing_ok=True)
        raise


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """Read a small file, which somebody else may have made.

    Raises:
        Unreadable: it has more than `largest` bytes, or is a pipe or a device.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise Unreadable(f"{path} is no regular file")
        if found.st_size > largest:
            raise Unreadable(f"{path} has {found.st_size:,} bytes, and at most {largest:,} are read")
        return file.read()


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: it is not valid.
    """
    try:
        return json.loads(read_bytes(path).decode())
    except RecursionError:
        raise ValueError(f"{path} is nested too deep") from None


@contextmanager
def directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory to fill; on success it is synced and takes the place of `target`.

    On an error nothing of it stays, and `target` is as it was. What a killed process left is removed by `lock`.
    """
    target = _real(target)
    # On the same file system. Of this run alone: a worker that outlives its stage, as on a cluster, must not write
    # into the directory of the next run.
    temporary, old = (target.with_name(_temporary_name(target.name, secrets.token_hex(4))) for _ in range(2))
    temporary.mkdir(parents=True)
    try:
        with naming(target):
            yield temporary
            sync_tree(temporary)
        # A rename replaces no directory with files in it, so the old one goes aside. Removing it first would take
        # seconds, in which a kill leaves neither.
        if target.exists():
            rename(target, old)
        rename(temporary, target)
    except BaseException:  # Ctrl-C, too
        if old.exists() and not target.exists():
            rename(old, target)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def link(source: str | Path, target: str | Path) -> None:
    """Make `target` a hard link to `source`, or a copy where that is not possible."""
    try:
        os.link(source, target)
    except FileNotFoundError:  # a copy would not find it either
        raise
    except OSError:  # another file system, or one without links, or too many of them
        shutil.copyfile(source, target)


def sync_tree(path: Path) -> None:
    """Flush a directory and all files below it to the disk."""
    # File by file, and each directory for its entries: os.sync would wait for all other writers of the machine.
    for root, _, files in os.walk(path):
        for name in files:
            with open(os.path.join(root, name), "rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(root))


def rename(source: Path, target: Path) -> None:
    """Rename a file or a directory, and flush that; a file `target`, or an empty directory, is replaced.

    The content must be on the disk before: file systems may write the new name before the data, and a power cut would
    then leave an empty file where a valid one was.
    """
    inode = source.stat().st_ino
    try:
        source.rename(target)
    except FileNotFoundError:
        # NFS repeats a request whose answer was lost, and the second one finds that the first one has renamed it.
        if not target.exists() or target.stat().st_ino != inode:
            raise
    sync_directory(target.parent)


def sync_directory(path: Path) -> None:
    """Flush the entries of one directory, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of a file system that cannot sync directories, as some on a network
            raise
    finally:
        os.close(descriptor)


def sha256_file(path: Path, goes_on: Callable[[], None] = lambda: None) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal; `goes_on` is called after every part of it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            goes_on()
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """The SHA-256 of a JSON value in canonical form: sorted keys, no spaces."""
    # ASCII: a lone surrogate, as in a file name that is not UTF-8, can be escaped but not encoded.
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
