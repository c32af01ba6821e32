"""JSON Lines: each line is a record; a line that cannot be read does not affect the others.

Several documents in one line are one record.
"""

import io
from functools import partial
from typing import BinaryIO

from stages.formats import json
from stages.formats.source import Rejected, Source
from stages.formats.writer import TextWriter


def read(source: Source, sink: TextWriter) -> None:
    """Put the strings of each line into `sink`."""
    stream, limits = source.stream(), source.limits
    # With a limit: a line may be longer than the memory.
    for number, begin in enumerate(iter(partial(stream.readline, limits.largest_held), b""), source.first_line):
        is_entire = begin.endswith(b"\n") or len(begin) < limits.largest_held
        if is_entire and json.is_document(begin, limits):
            sink.add_json(begin)
            continue
        line = io.BytesIO(begin) if is_entire else _Line(begin, stream)
        try:
            # Also for lines that are not valid: the scanner finds out why, and may still accept NaN.
            json.scan(line.read, sink, number, limits)
        except Rejected as rejected:
            sink.reject(Rejected(rejected.reason, rejected.detail, f"line {number}"))
            while line.read(limits.chunk):  # up to its end, where the next record begins
                pass


class _Line:
    """The rest of a line that is too long to be held, as a file."""

    def __init__(self, begin: bytes, stream: BinaryIO) -> None:
        self._begin, self._stream = io.BytesIO(begin), stream
        self._is_ended = False

    def read(self, size: int, /) -> bytes:
        piece = self._begin.read(size)
        if not piece and not self._is_ended:
            piece = self._stream.readline(size)
            self._is_ended = not piece or piece.endswith(b"\n")
        return piece
