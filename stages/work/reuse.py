"""Results that are kept under the digest of everything that decides them, and used again when the digest recurs.

One store serves runs that were killed, small edits, and several machines or experiments that share a disk. A result is
a file and a value of one type. It is published by rename, complete or not at all, and its SHA-256 is verified before it
is published and at each use.

`rm -rf data/.reuse` clears the store at any time: what is not found is computed again.
"""

import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, TypeVar

from pydantic import Field, TypeAdapter

from stages.base import publish
from stages.base.files import WRITTEN, DamagedFile, check_files, compare, read_sealed, write_sealed
from stages.work import workers

Value = TypeVar("Value")

_FILE, _VALUE = "file", "value.json"
_TEMPORARY = ".tmp"  # the end of the name of an entry that is being published
_SECONDS_TO_PUBLISH = 24 * 3600  # an older temporary entry belongs to a process that was killed


@dataclass(frozen=True)
class Runtime(workers.Runtime):
    """Of a stage that keeps results."""

    reuse_gib: Annotated[float, Field(ge=0)]
    """Disk space for results of earlier runs, in GiB. What outputs and DVC's cache occupy anyway does not count."""


def root() -> Path:
    """The store of this project.

    It is resolved against `$DVC_ROOT`, which DVC sets, so that `dvc exp run --temp` and queued experiments, which run
    in a copy of the project, share it.
    """
    return Path(os.environ.get("DVC_ROOT", "."), "data", ".reuse").absolute()


@dataclass(frozen=True)
class Store(Generic[Value]):
    """A directory with an entry for each result: a directory with the file and the value."""

    path: Path
    value_type: type[Value]
    """What is stored beside a file: a dataclass, or another type that pydantic can write as JSON and read."""

    def fetch(self, key: str, target: Path) -> Value | None:
        """Put the file stored under `key` at `target`, replacing what is there; return the value stored with it.

        None: there is no such entry, or it is not as it was stored; then it is removed, and there is no `target`.
        """
        entry, remedy = self.path / key, "it is computed again"  # nobody reads that
        target.unlink(missing_ok=True)  # os.link replaces nothing, and a lost Dask worker may have left a file
        try:
            modes = [os.lstat(path).st_mode for path in (entry, entry / _FILE, entry / _VALUE)]
            if not (stat.S_ISDIR(modes[0]) and all(map(stat.S_ISREG, modes[1:]))):
                raise ValueError("a link could lead out of the store, and the next `put` with it")
            content = read_sealed(entry / _VALUE, remedy)
            publish.link(entry / _FILE, target)
            # Hashed at each use: an output may be a link to the entry, and somebody may have edited it in place. At its
            # new place, because another run may trim the entry at any time.
            check_files({target: content["sha256"]}, remedy)
            value = TypeAdapter(self.value_type).validate_python(content["value"])
            os.utime(entry)  # `trim` removes what was not used for the longest time
            return value
        except (FileNotFoundError, NotADirectoryError, DamagedFile, ValueError, KeyError):
            pass
        target.unlink(missing_ok=True)
        _remove(entry)
        return None

    def put(self, key: str, file: Path, sha256: str, value: Value) -> None:
        """Store a finished file and its value. The file must not be written to again: the store may link to it.

        Args:
            key: The digest of everything that decides the result.
            file: Its file.
            sha256: Of what was to be written to the file.
            value: Stored with it.

        Raises:
            DamagedFile: the file contains something else. A store that trusted it would seal the damage for all runs.
        """
        content = {"sha256": sha256, "value": TypeAdapter(self.value_type).dump_python(value, mode="json")}
        if os.path.lexists(self.path / key):
            return  # another run has published the same result
        try:
            with publish.directory(self.path / key) as entry:
                publish.link(file, entry / _FILE)
                write_sealed(entry / _VALUE, content)
                # Of the file in the store: it may be a copy on another disk.
                compare(file, sha256, publish.sha256_file(entry / _FILE), WRITTEN)
        except OSError:
            if not os.path.lexists(self.path / key):  # otherwise another run has done so meanwhile
                raise

    def trim(self, limit: int) -> None:
        """Remove the entries that were not used for the longest time until all together use at most `limit` bytes.

        A file that exists elsewhere too, as an output of the stage or in DVC's cache, counts nothing: it is a link.
        """
        entries = sorted(_entries(self.path), reverse=True)  # the last used first
        for used, _, entry in entries:
            if entry.suffix == _TEMPORARY and time.time() - used > _SECONDS_TO_PUBLISH:
                _remove(entry)
        total = 0
        for _, size, entry in entries:
            total += size  # temporary entries count, too, but belong to a run that is publishing
            if total > limit and entry.suffix != _TEMPORARY:
                _remove(entry)


def _remove(entry: Path) -> None:
    """Remove what is in the place of an entry: a directory, a file, or a link, and not what that leads to."""
    shutil.rmtree(entry, ignore_errors=True)
    with suppress(OSError):
        entry.unlink()


def _entries(path: Path) -> Iterator[tuple[float, int, Path]]:
    """For each entry the time of its last use, the bytes that only it uses, and its path."""
    for entry in path.iterdir() if path.is_dir() else ():
        try:
            files = [file.stat() for file in entry.iterdir()]
            yield entry.stat().st_mtime, sum(file.st_size for file in files if file.st_nlink == 1), entry
        except OSError:  # another run removed it
            continue
