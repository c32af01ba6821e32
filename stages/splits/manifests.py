"""What `organize` writes and `extract` reads: `data/splits/summary.json`, and a manifest of its files for each split.

A manifest is `split_00.jsonl`: a line for each file, or part of a file, sorted by path and position. The summary
contains the SHA-256 of each manifest.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from stages.base.errors import StageError
from stages.base.files import JsonFile, check_files, damaged
from stages.base.names import is_inside
from stages.base.origin import Origin
from stages.base.publish import sha256_file
from stages.splits import suffixes

SPLITS = Path("data/splits")
SUMMARY = "summary.json"


class Part(NamedTuple):
    """A range of a file, from the start of a line to the start of another, or to the end.

    In tables it is a range of units: row groups or record batches.
    """

    start: int
    """Offset of the first byte, or number of the first unit, from 0."""
    end: int | None
    """Offset after the last byte, or number after the last unit; None: the end of the file, so that a file that grows
    is a changed one."""
    line: int
    """Number of the first line or unit in the file, from 1."""


class RawFile(NamedTuple):
    """A line of a manifest."""

    path: str
    """Relative to `raw_dir`, with forward slashes."""
    size: int
    """In bytes, of the file or the part; of a part of a table, its share of the file."""
    digest: str
    """SHA-256 of these bytes, in hexadecimal; of a part of a table, of the entire file."""
    part: Part | None = None
    """None: the entire file."""


@dataclass(frozen=True)
class Split:
    """A split in the summary."""

    manifest: str
    """File name, in the directory of the summary."""
    files: int
    """Of which the split has all or a part."""
    bytes: int
    """Of its raw files, as they are stored."""
    digest: str
    """SHA-256 of the manifest."""


@dataclass(frozen=True)
class Format:
    """The raw files of a format, as `jsonl` or, compressed, `jsonl.gz`."""

    files: int
    bytes: int
    """As they are stored."""


@dataclass(frozen=True)
class PassedOver:
    """A file or directory that is not read. Directories end with a slash."""

    path: str
    reason: str


@dataclass(frozen=True)
class Summary(JsonFile):
    """`data/splits/summary.json`. Paths in it are `printable`; of each kind it lists the first ones."""

    STAGE: ClassVar[str] = "organize"

    files: int
    bytes: int
    formats: dict[str, Format]
    splits: list[Split]
    """As many of each source, in the order of `sources`."""
    sources: list[str]
    """Directories in `raw_dir`; none: the splits are of all files."""
    names_not_utf8: list[str]
    passed_over_counts: dict[str, int]
    """By reason."""
    passed_over: list[PassedOver]
    origin: Origin

    def source(self, index: int) -> str | None:
        """That of a split; None: the splits are of all files."""
        return self.sources[index * len(self.sources) // len(self.splits)] if self.sources else None


def manifest_name(number: str) -> str:
    """The file name of the manifest of a split."""
    return f"split_{number}.jsonl"


def read_summary(directory: Path) -> Summary:
    """Read the summary of the splits in a directory.

    Raises:
        StageError: it is missing or not valid, or lists other manifests than there are: those that it lacks would
            silently be left out.
    """
    summary = Summary.read(directory / SUMMARY)
    number = len([*directory.glob(manifest_name("*"))])
    # In this order, too: the last ones are held out.
    if [split.manifest for split in summary.splits] != [manifest_name(f"{index:02d}") for index in range(number)]:
        raise StageError(
            f"{directory / SUMMARY} does not list the manifests in {directory}: run `dvc repro -f -s organize`"
        )
    return summary


def write_manifest(path: Path, files: Iterable[RawFile]) -> str:
    """Write a manifest and return its SHA-256.

    The JSON is ASCII: in a path that is not UTF-8 the invalid bytes stay as escaped lone surrogates.
    """
    # newline="": the same bytes on every system, as the digest is part of the key of a split in the store.
    with path.open("w", encoding="ascii", newline="") as manifest:
        # `json.dumps` of a dictionary for each line would be as slow as reading the file.
        manifest.writelines(
            f'{{"path": {json.dumps(file.path)}, "size": {file.size}, "digest": "{file.digest}"'
            + (f', "part": {json.dumps(file.part._asdict())}' if file.part else "")
            + "}\n"
            for file in files
        )
    return sha256_file(path)


def read_manifest(path: Path, digest: str) -> list[RawFile]:
    """Read a manifest.

    Raises:
        StageError: its bytes are not those that `organize` wrote, or it names a file outside the directory.
    """
    remedy = "run `dvc repro -f -s organize`"
    check_files({path: digest}, remedy)  # all that follows trusts the digests in it
    try:
        return [_read_line(line) for line in path.read_text(encoding="ascii").splitlines()]
    except (ValueError, TypeError, AttributeError, RecursionError):  # with its digest in summary.json: not by a fault
        raise damaged(path, "a line of it names no raw file", remedy) from None


def _read_line(line: str) -> RawFile:
    values = json.loads(line)
    part = values.pop("part", None)
    file = RawFile(**values, part=part and Part(**part))
    if not (is_inside(file.path) and suffixes.find(file.path)):
        raise ValueError(file.path)
    return file


def sort_key(file: RawFile) -> tuple[str, int]:
    """By which the lines of a manifest are sorted."""
    return file.path, file.part.start if file.part else 0
