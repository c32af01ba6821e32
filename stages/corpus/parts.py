"""Files that are read line by line, cut into parts, so that one large file fills all splits.

A part has the lines that begin in one range of `size` bytes, aligned to `size`, so lines that are appended to a file
change its last part only. Only UTF-8 is cut: there a byte 10 is always a line end, and each part can be decoded alone.
Memory holds a piece of a part, however long the part and its lines are.
"""

import codecs
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from stages.corpus import tree
from stages.corpus.splits import Part, RawFile

PARTS_PER_SPLIT = 8
"""At least, if the corpus is one large file: counts that differ by one then differ by at most an eighth."""
SMALLEST = 16 << 10
"""Bytes: files up to this size are never cut. 20 splits of one file need 320 KB."""

_CHUNK = 1 << 20  # bytes read at once


class Task(NamedTuple):
    """Consecutive parts of a file."""

    file: Path
    start: int
    """Offset of the first one, a multiple of `size`."""
    end: int
    """Offset after the last one, a multiple of `size`."""
    size: int
    """Of a part."""


class Measured(NamedTuple):
    """A part that has lines."""

    start: int
    end: int
    num_lines: int
    digest: str


def size_of(num_bytes: int, num_splits: int, smallest: int) -> int:
    """The size of the parts of a corpus: a power of two, so that it stays the same until the corpus has doubled."""
    share = num_bytes // (num_splits * PARTS_PER_SPLIT)
    return max(smallest, 1 << share.bit_length() >> 1)


def tasks(file: Path, num_bytes: int, size: int, bytes_per_task: int) -> list[Task]:
    """What `measure` must be called with for a file of so many bytes, in order."""
    step = size * max(1, bytes_per_task // size)
    end = -(-num_bytes // size) * size
    return [Task(file, start, min(start + step, end), size) for start in range(0, end, step)]


def measure(task: Task) -> list[Measured] | None:
    """Measure parts, in order, without those in which no line begins.

    None: the file is not UTF-8, or cannot be read.
    """
    try:
        with open(tree.open_regular(task.file), "rb") as file:
            measured = []
            start = _line_start(file, task.start, task.end)
            for place in range(task.start + task.size, task.end + 1, task.size):
                if start >= place:  # no line begins in this part: one that began before goes beyond it
                    continue
                end = _line_start(file, place)
                if start < end:
                    measured.append(_measure(file, start, end))
                start = end
            return measured
    except (UnicodeDecodeError, OSError):
        return None


def join(path: str, measured: Iterable[Measured]) -> list[RawFile]:
    """The lines of the manifest for all parts of a file, in order."""
    files: list[RawFile] = []
    line = 1
    for start, end, num_lines, digest in measured:
        files.append(RawFile(path, end - start, digest, Part(start, end, line)))
        line += num_lines
    *others, last = files
    assert last.part
    return [*others, last._replace(part=last.part._replace(end=None))]


def name(file: RawFile, size: int) -> str:
    """By which a part is assigned to a split: it stays the same when the lines in it, or after it, change."""
    assert file.part
    return f"{file.path}\0{file.part.start // size}"  # NUL is in no path


def _line_start(file: BinaryIO, place: int, limit: int | None = None) -> int:
    """The offset of the first line that begins at `place` or later; if there is none, the size of the file.

    If no line begins before `limit`, the result is some offset beyond it: the rest of a very long line is not read.
    """
    if place == 0:
        return 0
    file.seek(place - 1)
    while piece := file.readline(_CHUNK):  # with a limit: a line may be longer than the memory
        if piece.endswith(b"\n") or (limit and file.tell() >= limit):
            break
    return min(file.tell(), os.fstat(file.fileno()).st_size)  # a file may be sought beyond its end


def _measure(file: BinaryIO, start: int, end: int) -> Measured:
    """Raises UnicodeDecodeError if it is not UTF-8."""
    digest, decoder, num_lines = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")(), 0
    file.seek(start)
    place = start
    while place < end and (piece := file.read(min(_CHUNK, end - place))):
        digest.update(piece)
        decoder.decode(piece)
        num_lines += piece.count(b"\n")
        place += len(piece)
    decoder.decode(b"", final=True)
    return Measured(start, place, num_lines, digest.hexdigest())
