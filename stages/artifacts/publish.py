"""Files and directories that appear complete or not at all: written beside their place, synced, renamed.

Each stage reads what another one wrote, so a kill or a power cut must leave the old file, the new one or none, never a
part that looks finished. The price is an fsync for each file and its directory.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, dataclasses by their fields; a reader sees the old file or the new one."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=_fields) + "\n")


def _fields(value: Any) -> dict[str, Any]:
    # Not `dataclasses.asdict`, which copies everything deeply: seconds for a million entries.
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} has no JSON")
    return vars(value)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:  # the same line ends, and digest, on each system
        file.write(text)
        # Before the rename: file systems may write the new name before the data, and a power cut would then leave an
        # empty file where a valid one was.
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)  # replaces the old file in one step; both are in one directory, so on one file system
    sync_directory(path.parent)


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def directory(target: Path) -> Iterator[Path]:
    """Yield `<target>.tmp`, an empty directory to fill; on success it is synced and takes the place of `target`.

    On an error nothing of it stays. What a killed process left is removed by the next one.
    """
    temporary = target.with_name(target.name + ".tmp")  # on the same file system, and ignored by .dvcignore
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_tree(temporary)
        # A rename replaces no directory with files in it. Under DVC there is none: it removes outputs before it runs a
        # stage. A stage run by hand that is killed right here leaves the old directory incomplete, or none.
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        sync_directory(target.parent)
    except BaseException:  # Ctrl-C, too
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def sync_tree(path: Path) -> None:
    """Flush a directory and all files below it to the disk."""
    # File by file, and each directory for its entries: os.sync would wait for all other writers of the machine.
    for root, _, files in os.walk(path):
        for name in files:
            with open(os.path.join(root, name), "rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(root))


def sync_directory(path: Path) -> None:
    """Flush the entries of one directory, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """The SHA-256 of a JSON value in canonical form: sorted keys, no spaces."""
    # ASCII: a lone surrogate, as in a file name that is not UTF-8, can be escaped but not encoded.
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
