"""JSON Lines: each line is a record; a line that cannot be read does not affect the others.

Several documents in one line are one record.
"""

import io
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from stages.formats import json
from stages.formats.source import Pieces, Rejected, Source
from stages.formats.writer import TextWriter
from stages.splits.parts import is_one_document

if TYPE_CHECKING:
    from stages.formats.limits import Limits
    from stages.formats.records import Records


def read(source: Source, sink: TextWriter) -> None:
    """Put the strings of each line into `sink`.

    Raises:
        Rejected: it is one document over several lines.
    """
    _check_lines(source)
    stream, limits = source.stream(), source.limits
    # With a limit: a line may be longer than the memory.
    for number, begin in enumerate(iter(partial(stream.readline, limits.largest_held), b""), source.first_line):
        is_entire = begin.endswith(b"\n") or len(begin) < limits.largest_held
        if is_entire and json.is_document(begin, limits):
            sink.add_json(begin)
            continue
        rest = Pieces(_rest(begin, stream, limits.chunk))
        line = io.BytesIO(begin) if is_entire else io.BufferedReader(rest, limits.chunk)
        try:
            # Also for lines that are not valid: the scanner finds out why, and may still accept NaN.
            json.scan(line.read, sink, number, limits)
        except Rejected as rejected:
            sink.reject(Rejected(rejected.reason, rejected.detail, f"line {number}"))
            while line.read(limits.chunk):  # up to its end, where the next record begins
                pass


def read_records(source: Source, records: "Records") -> None:
    """Put the document of each line into `records`, or the documents.

    Raises:
        Rejected: it is one document over several lines.
    """
    _check_lines(source)
    stream, limits = source.stream(), source.limits
    number = source.first_line
    while piece := stream.read(limits.chunk):
        rest = b"" if piece.endswith(b"\n") else stream.readline(limits.longest_record)
        is_cut = len(rest) == limits.longest_record and not rest.endswith(b"\n")
        piece = piece[: piece.rfind(b"\n") + 1] if is_cut else piece + rest
        texts = records.lines.read(piece) if records.lines else None
        if texts is None:
            _read_lines(piece.decode(), number, records, limits)
        else:
            assert records.lines
            records.note_columns(records.lines.find_columns(piece))
            records.take_texts(texts)
        number += piece.count(b"\n")
        if is_cut:
            records.position = f"line {number}".__str__
            records.reject(json.TooLarge(limits))
            number += 1
            while (rest := stream.readline(limits.chunk)) and not rest.endswith(b"\n"):
                pass


def _check_lines(source: Source) -> None:
    if source.first_line == 1 and is_one_document(source.begin):  # once, and not for each of its lines
        detail = "a JSON document over several lines, and no JSON Lines: rename it to end in .json"
        raise Rejected("invalid JSON", detail)


def _read_lines(text: str, first: int, records: "Records", limits: "Limits") -> None:
    """Put the documents of some lines into `records`. `first` is the number of the first one."""
    decode_at, add = json.decode_at, records.add  # local names, as this runs for each record
    number = first
    records.position = lambda: f"line {number}"
    for number, line in enumerate(text.removesuffix("\n").split("\n"), first):  # noqa: B007 - `position` uses it
        if len(line) > limits.chunk and json.is_too_large(line, limits):
            records.reject(json.TooLarge(limits))
            continue
        try:
            document, end = decode_at(line)
        except (ValueError, RecursionError):
            end = len(line) + 1
        if end == len(line) or line[end:] == "\r":
            add(document)
        elif line.strip():  # several documents, or an error
            try:
                for document in json.documents(line, limits):
                    add(document)
            except Rejected as rejected:
                records.reject(rejected)


def _rest(begin: bytes, stream: BinaryIO, size: int) -> Iterator[bytes]:
    """A line that is too long to be held, given what was read of it, in pieces."""
    yield begin
    while piece := stream.readline(size):
        yield piece
        if piece.endswith(b"\n"):
            return
