"""JSON files that pass from one stage to the next: each is a frozen dataclass whose fields are its keys.

Types are checked on read, so that an old or edited file is one clear error and not a KeyError in a later stage.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import TypeAdapter, ValidationError

from stages.artifacts import publish
from stages.artifacts.errors import StageError

R = TypeVar("R", bound="Record")


@dataclass(frozen=True)
class FileEntry:
    """What a file must be, to be the one that a record names."""

    size: int
    """Bytes."""
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "FileEntry":
        """The entry of a file as it is now."""
        return cls(path.stat().st_size, publish.sha256_file(path))


@dataclass(frozen=True)
class Record:
    """The base of these dataclasses. Keys are written in the order of the fields; unknown keys are ignored on read."""

    STAGE: ClassVar[str]
    """The stage that writes the file, named in error messages."""

    @classmethod
    def read(cls: type[R], path: Path) -> R:
        """Read a file that `write` wrote.

        Raises:
            StageError: it is missing, or a field is missing or has another type.
        """
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise StageError(f"{path} is missing: run `dvc repro {cls.STAGE}`") from None
        except ValidationError as error:
            raise StageError(
                f"{path} is not valid ({first_problem(error)}): run `dvc repro -f -s {cls.STAGE}`"
            ) from None

    def write(self, path: Path) -> None:
        """Write the file, atomically."""
        # DVC hashes bytes: keys in another order would run all later stages again.
        publish.write_json(path, self)


@dataclass(frozen=True)
class SealedRecord(Record):
    """A record with a digest of itself in `sealed`, because no other file has one: a byte that changed is noticed."""

    @classmethod
    def read(cls: type[R], path: Path) -> R:
        """Read a file that `write` wrote.

        Raises:
            StageError: it is missing, it was changed, or a field is missing or has another type.
        """
        record = super().read(path)
        content = publish.read_json(path)
        if content.pop("sealed", None) not in (None, publish.sha256_json(content)):  # None: of an older version
            raise StageError(f"{path} was changed since it was written: run `dvc repro -f -s {cls.STAGE}`")
        return record

    def write(self, path: Path) -> None:
        """Write the file, atomically."""
        content = json.loads(json.dumps(dataclasses.asdict(self)))
        publish.write_json(path, {**content, "sealed": publish.sha256_json(content)})


def first_problem(error: ValidationError) -> str:
    """The first field of a file that is missing or has another type, and why."""
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field}: {first['msg']}" if field else str(first["msg"])
