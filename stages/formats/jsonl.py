"""JSON Lines: each line is a record; a line that cannot be read does not affect the others.

Several documents in one line are one record, or under a rule one each.
"""

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from stages.formats import json_format
from stages.formats.limits import Limits
from stages.formats.raw_content import Chunks, RawContent, Rejected
from stages.formats.writer import TextWriter
from stages.splits.parts import is_one_document

if TYPE_CHECKING:
    from stages.formats.records import Records


def read(content: RawContent, sink: TextWriter) -> None:
    """Put the strings of each line into `sink`.

    Raises:
        Rejected: it is one document over several lines.
    """
    into = json_format.Strings(sink, content.limits)
    try:
        read_records(content, into)
    finally:
        into.flush()


def read_records(content: RawContent, into: "json_format.Strings | Records") -> None:
    """Put the document of each line, or the documents, into `into`.

    Raises:
        Rejected: it is one document over several lines.
    """
    if content.first_line == 1 and is_one_document(content.begin):  # once, and not for each of its lines
        detail = "a JSON document over several lines, and no JSON Lines: rename it to end in .json"
        raise Rejected("invalid JSON", detail)
    stream, limits = content.stream(), content.limits
    number = content.first_line
    while chunk := stream.read(limits.chunk):
        chunk += b"" if chunk.endswith(b"\n") else stream.readline(limits.chunk)
        end = len(chunk) if chunk.endswith(b"\n") else chunk.rfind(b"\n") + 1
        lines, rest = chunk[:end], chunk[end:]
        _read_lines(lines.decode(), number, into, limits)
        number += lines.count(b"\n")
        if rest:  # the last line, or one that is longer than a chunk
            into.position = f"line {number}".__str__
            _read_line(io.BufferedReader(Chunks(_rest(rest, stream, limits.chunk)), limits.chunk), into, limits)
            number += 1


def _read_lines(text: str, first: int, into: "json_format.Strings | Records", limits: Limits) -> None:
    """Read some lines. `first` is the number of the first one."""
    decode_at, add, end_record = into.decode_at, into.add, into.end  # local names, as this runs for each record
    number = first
    into.position = lambda: f"line {number}"
    for number, line in enumerate(text.split("\n")[:-1], first):  # noqa: B007 - `position` uses it
        try:
            document, end = decode_at(line, 0)
        except (ValueError, RecursionError):
            end = len(line) + 1
        if end == len(line) or line[end:] == "\r":
            add(document)
            end_record()
        elif line.strip():  # several documents, or an error
            _read_line(io.BytesIO(line.removesuffix("\r").encode()), into, limits)


def _read_line(line: BinaryIO, into: "json_format.Strings | Records", limits: Limits) -> None:
    """Read a line of any length, given as a stream."""
    try:
        json_format.read_record(line.read, into, limits)
    except Rejected as rejected:
        into.reject(rejected)
        into.end()
        while line.read(limits.chunk):  # up to its end, where the next record begins
            pass


def _rest(begin: bytes, stream: BinaryIO, size: int) -> Iterator[bytes]:
    """A line of which some was read, in chunks."""
    yield begin
    while not begin.endswith(b"\n") and (begin := stream.readline(size)):
        yield begin
