"""Files that are read line by line, or by row groups, cut into parts, so that one large file fills all splits.

A part has the lines that begin in one range of `size` bytes, aligned to `size`, so lines that are appended to a file
change its last part only. Only UTF-8 is cut: there a byte 10 is always a line end, and each part can be decoded alone.
Memory holds a chunk of a part, however long the part and its lines are.

Tables are cut between their units, row groups or record batches: a part has the units from one number to another, and
the digest of the entire file.
"""

import codecs
import hashlib
import json
import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

from stages.splits import tables, tree
from stages.splits.manifests import Part, RawFile

PARTS_PER_SPLIT = 8
"""At least, if the corpus is one large file: counts that differ by one then differ by at most an eighth."""
SMALLEST = 16 << 10
"""Bytes: files up to this size are never cut. 20 splits of one file need 320 KB."""

_CHUNK = 1 << 20  # bytes read at once
_HEAD = 1 << 16  # bytes in which the first two lines are looked at


class Range(NamedTuple):
    """A range of a file."""

    file: Path
    start: int
    """Offset, a multiple of the size of the ranges."""
    end: int
    size: int
    """Of the ranges, of which this one may have several."""


class Measured(NamedTuple):
    """The lines that begin in a range; without any, `start` is `end`. Of tables, units take the place of lines."""

    start: int
    """Offset, or number of the unit."""
    end: int
    size: int
    """In bytes; of a table the share that so many units have of the file."""
    num_lines: int
    digest: str


def size_of(num_bytes: int, num_splits: int, smallest: int) -> int:
    """The size of the parts of a corpus: a power of two, so that it stays the same until the corpus has doubled."""
    share = num_bytes // (num_splits * PARTS_PER_SPLIT)
    return max(smallest, 1 << share.bit_length() >> 1)


def tasks(file: Path, num_bytes: int, size: int) -> list[Range]:
    """What `measure` must be called with for a file of so many bytes, in order."""
    if tables.is_table(file.name):
        return [Range(file, 0, num_bytes, size)]
    return [Range(file, start, start + size, size) for start in range(0, num_bytes, size)]


def measure(task: Range) -> list[Measured] | None:
    """Measure the parts in a range.

    None: it is not UTF-8, is no JSON Lines, or cannot be read.
    """
    try:
        with open(tree.open_regular(task.file), "rb") as file:
            if tables.is_table(task.file.name):
                return _measure_table(task)
            if task.start == 0 and is_one_document(file.read(_HEAD)):
                return None  # so that it is rejected once, and not by each part
            start = _line_start(file, task.start, task.end)
            # A line that begins in this range may go beyond it, and one that began before may go beyond this range.
            return [_measure(file, start, _line_start(file, task.end) if start < task.end else start)]
    except (ValueError, OSError):
        return None


def is_one_document(begin: bytes) -> bool:
    """Whether a file begins as a JSON document over several lines does, and so is no JSON Lines."""
    # Without NULs and byte order marks, so that it may be in UTF-16, too.
    first, end, rest = begin[:_HEAD].translate(None, b"\0\xef\xbb\xbf\xff\xfe").partition(b"\n")
    if not end or first.strip() not in (b"[", b"{", b"[{"):
        return False
    try:
        json.loads(rest.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return True
    return False  # a damaged first line


def join(path: str, measured: Iterable[Measured]) -> list[RawFile]:
    """The lines of the manifest for all parts of a file, in order."""
    files: list[RawFile] = []
    line = 1
    for start, end, size, num_lines, digest in measured:
        files.append(RawFile(path, size, digest, Part(start, end, line)))
        line += num_lines
    *others, last = files
    assert last.part
    return [*others, last._replace(part=last.part._replace(end=None))]


def name(file: RawFile, size: int) -> str:
    """By which a part is assigned to a split: it stays the same when the lines in it, or after it, change."""
    assert file.part
    number = file.part.start if tables.is_table(file.path) else file.part.start // size
    return f"{file.path}\0{number}"  # NUL is in no path


def _line_start(file: BinaryIO, offset: int, limit: int | None = None) -> int:
    """The offset of the first line that begins at `offset` or later; if there is none, the size of the file.

    If no line begins before `limit`, the result is `limit`: the rest of a very long line is not read.
    """
    if offset == 0:
        return 0
    file.seek(offset - 1)
    # In chunks: a line may be longer than the memory.
    while chunk := file.readline(min(_CHUNK, limit - file.tell()) if limit else _CHUNK):
        if chunk.endswith(b"\n"):
            break
    return min(file.tell(), os.fstat(file.fileno()).st_size)  # a file may be sought beyond its end


def _measure(file: BinaryIO, start: int, end: int) -> Measured:
    """Raises ValueError if it is not UTF-8."""
    digest, decoder, num_lines = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")(), 0
    file.seek(start)
    offset = start
    while offset < end and (chunk := file.read(min(_CHUNK, end - offset))):
        digest.update(chunk)
        decoder.decode(chunk)
        num_lines += chunk.count(b"\n")
        offset += len(chunk)
    decoder.decode(b"", final=True)
    return Measured(start, offset, offset - start, num_lines, digest.hexdigest())


def _measure_table(task: Range) -> list[Measured] | None:
    """None: it is not worth a cut. Raises ValueError if it cannot be cut."""
    total = tables.count_units(task.file)
    step = max(1, total * task.size // task.end)  # units of a part
    if step >= total:
        return None
    _, digest = tree.measure(task.file)
    bounds = [*range(0, total, step), total]
    offsets = [task.end * bound // total for bound in bounds]
    return [
        Measured(start, end, last - first, end - start, digest)
        for (start, end), (first, last) in zip(pairwise(bounds), pairwise(offsets), strict=True)
    ]
