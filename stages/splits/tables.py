"""Parquet and Arrow files: where their row groups and record batches begin, so that a large one fills all splits.

A part has the units (row groups, record batches) that begin in its range. What decides how each of them is read, the
footer of Parquet or the schema of Arrow, belongs to the digest of every part.

The file format of Arrow is a stream of the same messages between two marks, so both formats are read as streams.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from stages.splits.footer import row_groups
from stages.splits.suffixes import TABLES

ARROW_FILE = b"ARROW1\0\0"
"""What an Arrow file begins with, before the stream."""

_PARQUET = ".parquet"
_MARK = b"PAR1"
_LONGEST_FRAME = 16 << 20  # bytes: a hundred thousand columns of row groups, read in seconds
_ABOUT_DATASETS = ("dataset_info.json", "state.json")  # `save_to_disk` writes them beside its Arrow files


def is_table(path: str) -> bool:
    """Whether a file has units."""
    return path.lower().endswith(TABLES)


def read_frame(file: IO[bytes], path: str) -> bytes:
    """What decides how each part of a table is read; nothing of other files, and of one that is damaged."""
    size = os.fstat(file.fileno()).st_size
    if path.lower().endswith(_PARQUET):
        file.seek(max(0, size - 8))
        tail = file.read(8)
        start = size - 8 - int.from_bytes(tail[:4], "little")
        if start < len(_MARK) or not tail.endswith(_MARK):
            return b""
        length = size - start
    elif is_table(path):
        file.seek(0)
        begin = file.read(len(ARROW_FILE) + 8)
        start = len(ARROW_FILE) if begin.startswith(ARROW_FILE) else 0
        length = int.from_bytes(begin[start + 4 : start + 8], "little") + 8
    else:
        return b""
    file.seek(start)
    return file.read(length) if length <= min(size, _LONGEST_FRAME) else b""


def find_units(path: Path, frame: bytes) -> list[int]:
    """Where the units of a table with such a frame begin, in bytes, the first one at 0.

    Raises:
        ValueError: it is damaged, or has dictionaries, which precede the record batches that need them.
    """
    begin = row_groups(frame[:-8]) if path.name.lower().endswith(_PARQUET) else (*_record_batches(path),)
    if any(first >= second for first, second in zip([0, *begin], begin, strict=False)):
        raise ValueError("its units are not in order")
    return [0, *begin[1:]]


def _record_batches(path: Path) -> Iterator[int]:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file:  # a body is skipped, not read
            if file.read(len(ARROW_FILE)) != ARROW_FILE:
                file.seek(0)
            pa.ipc.read_message(file)  # the schema
            while True:
                offset = file.tell()
                try:
                    message = pa.ipc.read_message(file)
                except EOFError:  # the end of the stream
                    return
                if message.type != "record batch":
                    raise ValueError(f"it has a {message.type}")
                yield offset
    except (pa.ArrowException, OSError, EOFError) as error:
        raise ValueError(str(error)) from None


def find_metadata(paths: Iterable[str]) -> set[str]:
    """The files that are about the Arrow files beside them, or caches of these, in directories of `save_to_disk`."""
    names: dict[str, set[str]] = {}  # by directory
    for path in paths:
        directory, _, name = path.rpartition("/")
        if name in _ABOUT_DATASETS or name.endswith(".arrow"):
            names.setdefault(directory, set()).add(name)
    found: set[str] = set()
    for directory, of_directory in names.items():
        if of_directory.issuperset(_ABOUT_DATASETS) and len(of_directory) > len(_ABOUT_DATASETS):
            caches = [name for name in of_directory if name.startswith("cache-")]
            found |= {f"{directory}/{name}".lstrip("/") for name in (*_ABOUT_DATASETS, *caches)}
            found.add(f"{directory.rpartition('/')[0]}/dataset_dict.json".lstrip("/"))
    return found.intersection(paths)
