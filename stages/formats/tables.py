"""Tables: Parquet and Arrow, a row group or record batch at a time, by pyarrow; CSV and TSV row by row.

A row is a record with the columns as keys. A null in it, or in a struct, is a key that is missing: tables have no other
way to leave one out.
"""

import csv
import io
import os
import re
import resource
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from stages.base.errors import one_line
from stages.base.summary import counted
from stages.formats import json_format, paths
from stages.formats.limits import LIMITS, Limits
from stages.formats.raw_content import Changed, RawContent, Rejected, may_be_changed, open_raw, state, verify_table
from stages.formats.writer import TextWriter
from stages.splits import tables
from stages.splits.manifests import Part
from stages.work import arrow

if TYPE_CHECKING:
    from stages.formats.records import Records

_ROWS_AT_ONCE = 512  # as Python objects
_PAGE = resource.getpagesize()
_SURROGATES = re.compile(r"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(u[dD][89a-fA-F]\w\w)|.)", re.DOTALL)
"""Escapes in JSON; the group is half a pair, without the other half."""

Choose = Callable[[pa.Schema], list[str]]
"""The columns to read, given the schema."""


class Rows(NamedTuple):
    """Consecutive rows of a table."""

    unit: str
    """The row group or record batch, such as `row group 1`."""
    first: int
    """The number of the first row in it, from 1."""
    names: list[str]
    columns: list[list[Any]]
    number: int
    """Of the rows, which may have no column."""
    not_text: dict[str, str]
    """Columns with bytes that are not UTF-8, and their types."""

    def each(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The position and the values of each row."""
        rows = zip(*self.columns, strict=True) if self.columns else [()] * self.number
        for number, row in enumerate(rows, self.first):
            yield f"{self.unit}, row {number}", row


class Table:
    """A Parquet or Arrow file, or some row groups or record batches of one. Used like `RawContent`, with `with`.

    The file is hashed after it was read, once in a process for all of its parts: what was made of one that has changed
    is dropped.
    """

    def __init__(self, path: str | Path, digest: str, limits: Limits = LIMITS, part: Part | None = None) -> None:
        self.limits = limits
        self._path, self._digest, self._part = os.fspath(path), digest, part
        self._file = io.FileIO(open_raw(path))
        self._state = state(self._file.fileno())

    def __enter__(self) -> "Table":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._file:
            if may_be_changed(error):
                verify_table(self._path, self._digest, self._state)
                if state(self._file.fileno()) != self._state:
                    raise Changed

    def rows(self, choose: Choose) -> "Iterator[Rows | Rejected]":
        """The rows, about `limits.chunk` bytes at once, and those that cannot be read.

        Raises:
            Rejected: nothing that follows can be read, or it needs too much memory.
        """
        begin, end, _ = self._part or Part(0, None, 1)

        read = self._parquet if self._path.lower().endswith(tables.PARQUET) else self._arrow
        try:
            yield from _bounded(read(choose, begin, end), self.limits.table)
        except MemoryError:
            detail = f"more than {self.limits.table >> 20} MiB at once: write it with smaller pages or record batches"
            raise Rejected("table too large", detail) from None
        except (pa.ArrowException, EOFError, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno:  # of the disk: damage has no number
                raise
            raise Rejected("damaged table", one_line(error)) from None

    def _check_number(self, num_rows: int) -> None:
        most = self.limits.most_bare_rows + 8 * os.fstat(self._file.fileno()).st_size
        if num_rows > most:
            raise Rejected("table too large", f"{num_rows} rows, with less than a bit for each: {most} are allowed")

    def _parquet(self, choose: Choose, begin: int, end: int | None) -> "Iterator[Rows | Rejected]":
        # Without read-ahead: of a row group of any size memory holds some pages.
        file = pq.ParquetFile(self._file, pre_buffer=False, buffer_size=self.limits.chunk)
        metadata, names = file.metadata, choose(file.schema_arrow)
        # Never `column`: where the size statistics of one are damaged, it ends the process (pyarrow 26).
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        if metadata.num_rows != sum(group.num_rows for group in groups):
            raise ValueError(f"the footer gives {metadata.num_rows} rows, and its row groups have others")
        self._check_number(metadata.num_rows)
        for index, group in islice(enumerate(groups), begin, end):
            step = min(_ROWS_AT_ONCE, max(1, self.limits.chunk * group.num_rows // max(1, group.total_byte_size)))
            number = 0
            for batch in file.iter_batches(step, [index], names, use_threads=False):
                yield from _slices(batch, f"row group {index + 1}", number, self.limits.chunk)
                number += batch.num_rows
            if number != group.num_rows:
                raise ValueError(f"row group {index + 1} has {number} rows instead of {group.num_rows}")

    def _arrow(self, choose: Choose, begin: int, end: int | None) -> "Iterator[Rows | Rejected]":
        file = self._file
        if file.read(len(arrow.FILE_MARK)) != arrow.FILE_MARK:
            file.seek(0)
        with pa.ipc.open_stream(pa.PythonFile(file, "r")) as reader:
            names = choose(reader.schema)
            chosen = [column for column, name in enumerate(reader.schema.names) if name in names]
            if begin:  # the reader goes on from there
                file.seek(next(islice(arrow.find_batches(Path(f"/proc/self/fd/{file.fileno()}")), begin, None), 0))
            number = 0
            for index, batch in enumerate(islice(reader, end and end - begin), begin + 1):
                number += batch.num_rows
                self._check_number(number)
                yield from _slices(batch.select(chosen), f"record batch {index}", 0, self.limits.chunk)
        if end is None:
            file.seek(-len(arrow.END_OF_STREAM), os.SEEK_CUR)
            if file.read(len(arrow.END_OF_STREAM)) != arrow.END_OF_STREAM:  # pyarrow takes the end of a file for it
                raise ValueError("it ends before its end")


def _bounded(items: "Iterator[Rows | Rejected]", size: int) -> "Iterator[Rows | Rejected]":
    """The items, with at most `size` bytes more of memory for each.

    pyarrow allocates what a page or a compressed buffer says that it needs, gigabytes of a file of kilobytes.
    """
    data = int(Path("/proc/self/statm").read_text().split()[5]) * _PAGE
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data + size if soft == resource.RLIM_INFINITY else min(data + size, soft)
    while True:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        try:
            item = next(items, None)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        if item is None:
            return
        yield item


def _slices(batch: pa.RecordBatch, name: str, first: int, size: int) -> "Iterator[Rows | Rejected]":
    """The rows of a record batch in pieces of about `size` bytes. `first` is the number of those before them."""
    try:
        batch.validate(full=True)  # offsets in a damaged file lead anywhere
    except pa.ArrowInvalid as error:
        if batch.num_rows == 1:
            yield Rejected("damaged table", one_line(error), f"{name}, row {first + 1}")
            return
        batch.validate()
        for row in range(batch.num_rows):  # most often one that is not UTF-8
            yield from _slices(batch.slice(row, 1), name, first + row, size)
        return
    step = min(_ROWS_AT_ONCE, max(1, size * batch.num_rows // max(1, batch.nbytes)))
    for start in range(0, batch.num_rows, step):
        yield from _rows(batch.slice(start, step), name, first + start)


def _rows(piece: pa.RecordBatch, name: str, first: int) -> "Iterator[Rows | Rejected]":
    position = f"{name}, row {first + 1}"
    not_text: dict[str, str] = {}
    try:
        columns = [
            _values(column, partial(not_text.setdefault, field.name, str(field.type)))
            for field, column in zip(piece.schema, piece.columns, strict=True)
        ]
    except OverflowError as error:
        if piece.num_rows == 1:
            yield Rejected("value out of range", one_line(error), position)
            return
        for row in range(piece.num_rows):
            yield from _rows(piece.slice(row, 1), name, first + row)
    else:
        yield Rows(name, first + 1, piece.schema.names, columns, piece.num_rows, not_text)


def _values(column: pa.Array, refuse: Callable[[], object]) -> list[Any]:
    """The values of a column as JSON has them, where it can. `refuse` is called for bytes that are not UTF-8."""
    convert = _converter(column.type, refuse)
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    try:
        values: list[Any] = column.to_pylist()
    except (pa.ArrowInvalid, KeyError):  # for which pyarrow blames a missing package
        raise ValueError(f"an unknown time zone: {column.type}") from None
    return values if convert is None else [None if value is None else convert(value) for value in values]


def _converter(kind: pa.DataType, refuse: Callable[[], object]) -> Callable[[Any], Any] | None:
    """What makes a value of `to_pylist` one of JSON, which is not null; None: it is one."""
    if isinstance(kind, pa.BaseExtensionType):
        return _parsed if kind.extension_name == "arrow.json" else _converter(kind.storage_type, refuse)
    if pa.types.is_struct(kind):
        fields = {field.name: _converter(field.type, refuse) for field in kind}
        return lambda value: {
            key: convert(child) if (convert := fields[key]) else child
            for key, child in value.items()
            if child is not None
        }
    if pa.types.is_map(kind):
        of_key = _converter(kind.key_type, refuse) or (lambda value: value)
        of_item = _converter(kind.item_type, refuse) or (lambda value: value)
        return lambda value: paths.make_object(
            [(str(of_key(key)), None if child is None else of_item(child)) for key, child in value]
        )
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _converter(kind.value_type, refuse)
    if hasattr(kind, "value_type"):  # lists of all kinds
        of_value = _converter(kind.value_type, refuse)
        return of_value and (lambda value: [None if child is None else of_value(child) for child in value])
    if _is_binary(kind):
        return lambda value: _text(value, refuse)
    return None


def _parsed(text: str) -> Any:
    """The value of a cell of type JSON; what is not valid stays text."""
    try:
        return json_format.decode(_SURROGATES.sub(lambda escape: r"\ufffd" if escape[1] else escape[0], text))
    except (ValueError, RecursionError):
        return text


def _is_binary(kind: pa.DataType) -> bool:
    """Whether values may be text without an annotation, as older writers have it; those of a fixed size are ids."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _text(value: bytes, refuse: Callable[[], object]) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        refuse()
        return value


def _has_strings(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_map(kind):
        return _has_strings(kind.item_type)
    if hasattr(kind, "value_type"):  # lists of all kinds, dictionaries
        return _has_strings(kind.value_type)
    if pa.types.is_struct(kind) or pa.types.is_union(kind):
        return any(_has_strings(kind.field(index).type) for index in range(kind.num_fields))
    is_string = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return bool(is_string or _is_binary(kind))


def read(table: Table, sink: TextWriter) -> None:
    """Put the strings of each row into `sink`, in the order of the columns."""
    not_text: set[str] = set()
    for rows in table.rows(lambda schema: [field.name for field in schema if _has_strings(field.type)]):
        if isinstance(rows, Rejected):
            sink.report(rows)
            continue
        for column, kind in rows.not_text.items():
            if column not in not_text:  # once
                not_text.add(column)
                sink.report(_not_text(column, kind))
        for position, row in rows.each():
            try:
                sink.add([string for value in row for string in paths.strings(value)])
                sink.end()
            except Rejected as rejected:
                sink.reject(Rejected(rejected.reason, rejected.detail, position))


def _not_text(column: str, kind: str) -> Rejected:
    detail = "it has bytes that are not UTF-8: write them as UTF-8, or name the column that has the text by a rule"
    return Rejected("not text", detail, f"column {column} ({kind})")


def read_records(table: Table, records: "Records") -> None:
    """Put each row into `records`."""
    not_text: dict[str, str] = {}

    def choose(schema: pa.Schema) -> list[str]:
        if records.each is None:
            records.names = dict.fromkeys(schema.names)  # also those that are not read
            records.note_columns(schema.names)
        return [name for name in schema.names if records.columns is None or name in records.columns]

    for rows in table.rows(choose):
        if isinstance(rows, Rejected):
            records.position = (rows.position or "").__str__
            records.reject(rows)
            continue
        not_text |= rows.not_text
        for position, row in rows.each():
            records.position = position.__str__
            pairs = [(name, value) for name, value in zip(rows.names, row, strict=True) if value is not None]
            records.add(paths.make_object(pairs))
    for column, kind in not_text.items():
        problem = _not_text(column, kind)
        records.position = str(problem.position).__str__
        records.reject(problem)


def read_delimited(content: RawContent, records: "Records", delimiter: str) -> None:
    """Put each row of CSV or TSV into `records`, of which the first row has the keys; all values are strings.

    Not by pyarrow: of a file with one row in disorder it loses a block of rows, and no row may be longer than a block.
    """
    limits, text = content.limits, io.TextIOWrapper(content.stream(), "utf-8", newline="")
    size = num_values = 0  # of the row so far, about: characters, and values

    def lines() -> Iterator[str]:
        nonlocal size, num_values
        while line := text.readline(limits.longest_record + 1):
            size, num_values = size + len(line), num_values + line.count(delimiter)
            if size > limits.longest_record or num_values > limits.most_values:
                raise json_format.TooLarge(limits, f"line {first}")
            yield line

    csv.field_size_limit(limits.longest_record)
    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    first = 0  # the line with which the row begins
    records.position = lambda: f"lines {first} to {last}" if (last := reader.line_num) > first else f"line {first}"
    names: list[str] | None = None
    while True:
        size = num_values = 0
        first = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            records.reject(Rejected("invalid CSV", str(error)))
            continue
        if row is None:
            break
        if names is None:
            names = row or None  # not an empty line
        elif len(row) == len(names):
            records.add(paths.make_object([*zip(names, row, strict=True)]))
        elif row:  # not an empty line
            records.reject(Rejected("invalid CSV", f"{counted(len(row), 'column')} instead of {len(names)}"))
