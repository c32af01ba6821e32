"""JSON files that pass from one stage to the next: each is a frozen dataclass whose fields are its keys.

Types are checked on read, so that an old or edited file is one clear error and not a KeyError in a later stage.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, TypeAdapter, ValidationError

from stages.base import publish
from stages.base.errors import StageError
from stages.base.names import is_file_name, is_inside
from stages.base.shared_disk import find_size

R = TypeVar("R", bound="JsonFile")


def _inside(path: str) -> str:
    if not is_inside(path):
        raise ValueError("it must be a relative path without `..`")
    return path


def _beside(name: str) -> str:
    if not is_file_name(name):
        raise ValueError("it must be the name of a file, without a directory")
    return name


RelativePath = Annotated[str, AfterValidator(_inside)]
"""In a manifest, of a file below its directory."""
FileName = Annotated[str, AfterValidator(_beside)]
"""In a manifest, of a file beside it."""

WRITTEN = "check the disk, and that no other process writes there"
"""What to do about a file that is not what this process has just written."""


class DamagedFile(StageError):
    """A file is missing, or is not what was recorded of it."""


@dataclass(frozen=True)
class FileEntry:
    """What a file must be, to be the one that a record names."""

    size: int
    """Bytes."""
    sha256: str

    @classmethod
    def of(cls, path: Path, goes_on: Callable[[], None] = lambda: None) -> "FileEntry":
        """The entry of a file as it is now; `goes_on` is called as it is read."""
        return cls(path.stat().st_size, publish.sha256_file(path, goes_on))

    @classmethod
    def of_text(cls, text: str) -> "FileEntry":
        """The entry of a file that has this text, in UTF-8."""
        content = text.encode()
        return cls(len(content), hashlib.sha256(content).hexdigest())


def check_files(files: Mapping[Path, FileEntry | str], remedy: str, contents: bool = True) -> None:
    """Compare files with what was recorded of them.

    Args:
        files: Each with its entry, or with its SHA-256 where nothing else was recorded.
        remedy: What to do about one that differs.
        contents: Whether to hash the files too, or only to compare their sizes.

    Raises:
        DamagedFile: naming the file that is missing, has another size, or another SHA-256.
    """
    for path, entry in files.items():  # sizes first: a truncated file is found without reading gigabytes
        expected = None if isinstance(entry, str) else entry.size
        size = find_size(path, expected)
        if size is None:
            raise DamagedFile(f"{path} is missing: {remedy}")
        if expected not in (None, size):
            raise damaged(path, f"it has {size} bytes instead of {expected}", remedy)
    threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))  # hashing leaves the interpreter to other threads
    try:
        digests = threads.map(publish.sha256_file, files if contents else ())
        for (path, entry), found in zip(files.items(), digests, strict=False):
            compare(path, entry if isinstance(entry, str) else entry.sha256, found, remedy)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def compare(path: Path | str, recorded: str, found: str, remedy: str) -> None:
    """Raise what `check_files` does where a file, which the caller has read anyway, has another SHA-256."""
    if found != recorded:
        raise damaged(path, f"its SHA-256 is {found[:12]}... instead of {recorded[:12]}...", remedy)


def damaged(path: Path | str, problem: str, remedy: str) -> DamagedFile:
    """The error for a file that is there, but is not what was recorded of it."""
    return DamagedFile(f"{path} is damaged or was changed: {problem}: {remedy}")


@dataclass(frozen=True)
class JsonFile:
    """The base of these dataclasses. Keys are written in the order of the fields; unknown keys are ignored on read."""

    STAGE: ClassVar[str]
    """The stage that writes the file, named in error messages."""
    PATH: ClassVar[Path]
    """Where it is, if that is always the same."""
    LARGEST: ClassVar[int] = publish.LARGEST
    """Bytes."""

    @classmethod
    def read(cls: type[R], path: Path | None = None) -> R:
        """Read a file that `write` wrote.

        Raises:
            StageError: it is missing, or a field is missing or has another type.
        """
        path = path or cls.PATH
        try:
            return TypeAdapter(cls).validate_json(publish.read_bytes(path, cls.LARGEST))
        except (FileNotFoundError, NotADirectoryError):
            raise StageError(f"{path} is missing: run `dvc repro {cls.STAGE}`") from None
        except ValidationError as error:
            raise StageError(
                f"{path} is not valid ({first_problem(error)}): run `dvc repro -f -s {cls.STAGE}`"
            ) from None

    def write(self, path: Path | None = None) -> None:
        """Write the file, atomically."""
        # DVC hashes bytes: keys in another order would run all later stages again.
        publish.write_json(path or self.PATH, self)


@dataclass(frozen=True)
class SealedJsonFile(JsonFile):
    """A record with a digest of itself in `sealed`, because no other file has one: a byte that changed is noticed."""

    @classmethod
    def read(cls: type[R], path: Path | None = None) -> R:
        """Read a file that `write` wrote.

        Raises:
            StageError: it is missing, it was changed, or a field is missing or has another type.
        """
        record = super().read(path)
        read_sealed(path or cls.PATH, f"run `dvc repro -f -s {cls.STAGE}`")
        return record

    def write(self, path: Path | None = None) -> None:
        """Write the file, atomically."""
        write_sealed(path or self.PATH, dataclasses.asdict(self))


def write_sealed(path: Path, content: dict[str, Any], key: str = "sealed") -> None:
    """Write a JSON file, atomically, with a digest of its content as the last key."""
    content = json.loads(json.dumps(content))  # as it will be read, with lists for tuples
    publish.write_json(path, {**content, key: publish.sha256_json(content)})


def read_sealed(path: Path, remedy: str, key: str = "sealed") -> dict[str, Any]:
    """The content of a file that `write_sealed` wrote.

    Raises:
        DamagedFile: it was changed.
    """
    try:
        content: dict[str, Any] = publish.read_json(path)
        stated = content.pop(key, None)
        if stated == publish.sha256_json(content):
            return content
    except publish.Unreadable as error:
        raise DamagedFile(f"{error}: {remedy}") from None
    except (ValueError, TypeError, AttributeError):
        stated = ""
    if stated is None:
        raise DamagedFile(f"{path} states no SHA-256 of itself, so it is of an older version, or was changed: {remedy}")
    raise damaged(path, "it has not the SHA-256 that it states of itself", remedy)


def first_problem(error: ValidationError) -> str:
    """The first field of a file that is missing or has another type, and why."""
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field}: {first['msg']}" if field else str(first["msg"])
