"""A shard of strings, written record by record, with memory for one record batch."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.artifacts.dataset import Shard
from stages.corpus import json_values
from stages.corpus.arrow import StreamWriter
from stages.corpus.limits import LIMITS, Limits
from stages.corpus.source import Rejected


class TextWriter:
    """The `Sink` of the formats: a row a string. A rejected record leaves no row, not even a long one.

    Strings of several records make one record batch of `limits.batch` characters. A record that is longer than that
    is written while it is read, so that memory holds a batch of it; if it is rejected, the stream is cut back.
    """

    def __init__(
        self,
        stream: StreamWriter,
        min_chars: int,
        report: Callable[[Rejected], None],
        keep_source: bool = False,
        limits: Limits = LIMITS,
    ) -> None:
        self.records = 0
        self.characters = 0
        """Of complete records."""
        self.keep_source = keep_source
        self.path = ""
        """Of the file that is read, for `keep_source`."""
        self._stream, self._min_chars, self._report, self._limits = stream, min_chars, report, limits
        # Not yet written, of complete records:
        self._columns: list[tuple[pa.Array, ...]] = []  # text, and its source
        self._json: list[bytes] = []  # after those
        self._size = 0  # of both, characters
        # Not yet written, of the current record:
        self._strings: list[str] = []
        self._sources: list[str] = []
        self._current_size = 0  # characters, with those already written
        self._start: tuple[int, int] | None = None  # of the current record in the stream, if parts of it are there

    def add(self, strings: list[str], places: Sequence[str] = ()) -> None:
        """Add strings of the current record, in order, and their places, or none where a string is the entire file.

        Raises:
            Rejected: one is too long for Arrow's `string`.
        """
        if self.keep_source:
            sources = [f"{self.path}#{place}" for place in places] if places else [self.path] * len(strings)
            kept = zip(strings, sources, strict=True)
            self._sources += [source for string, source in kept if len(string) >= self._min_chars]
        if self._min_chars == 1:
            strings = list(filter(None, strings))  # the default, min_chars: 1, without a Python loop
        else:
            strings = [string for string in strings if len(string) >= self._min_chars]
        size = sum(map(len, strings))
        longest = self._limits.longest_string
        # A character has at most 4 bytes. Most calls end with this comparison, which spares them the encoding.
        if size > longest // 4 and max(len(string.encode()) for string in strings) > longest:
            raise Rejected("string too long", f"a string holds at most {longest} bytes: split it")
        self._strings += strings
        self._current_size += size
        if self._size + self._current_size > self._limits.batch:
            if self._start is None:  # the first part of a long record: what precedes it must be in the stream before
                self._write_complete()
                self._start = self._stream.mark()
            for columns in self._take_current():
                self._stream.write(*columns)

    def end(self) -> None:
        """The current record is complete: keep its strings."""
        self._convert_json()  # of earlier records: rows keep the order of the files
        self.records += 1
        self.characters += self._current_size
        self._columns += self._take_current()
        self._size += 0 if self._start else self._current_size
        self._begin()

    def add_json(self, record: bytes) -> None:
        """Add a complete record for which `json.is_document` holds, and keep its strings."""
        self.records += 1
        self._json.append(record)  # cut later, many at once
        self._size += len(record)  # bytes, at least as many as characters
        if self._size > self._limits.batch:
            self._write_complete()

    def reject(self, rejected: Rejected) -> None:
        """Drop the strings of the current record and report why."""
        self._report(rejected)
        if self._start is not None:
            self._stream.cut(self._start)  # complete records before it were written first, and stay
        self._begin()

    def close(self) -> Shard:
        """Write what is left of the complete records and end the shard."""
        self._write_complete()
        return self._stream.close()

    def _begin(self) -> None:
        self._strings, self._sources, self._current_size, self._start = [], [], 0, None

    def _convert_json(self) -> None:
        """Turn the JSON documents into a column of their strings."""
        if self._json:
            strings = json_values.strings(self._json)
            lengths = pc.utf8_length(strings)
            if self._min_chars > 1:
                is_kept = pc.greater_equal(lengths, self._min_chars)
                strings, lengths = strings.filter(is_kept), lengths.filter(is_kept)
            self.characters += pc.sum(lengths).as_py() or 0
            self._columns.append((strings,))
            self._json = []

    def _write_complete(self) -> None:
        self._convert_json()
        if self._columns:
            columns = [pa.concat_arrays(column) for column in zip(*self._columns, strict=True)]
            text = columns[0]
            # An array may be a slice of a larger one: its offsets begin at text.offset, and not at 0.
            offsets = np.frombuffer(text.buffers()[1], np.int32)[text.offset :][: len(text) + 1]
            for part in _batches(offsets[1:] - offsets[0], self._limits.batch):
                self._stream.write(*(column[part] for column in columns))
        self._columns, self._size = [], 0

    def _take_current(self) -> Iterator[tuple[pa.Array, ...]]:
        """The strings of the current record that are not yet written, as columns, in batches."""
        columns = (self._strings, self._sources) if self.keep_source else (self._strings,)
        for part in _batches(list(accumulate(map(len, self._strings))), self._limits.batch):
            yield tuple(pa.array(column[part], pa.string()) for column in columns)
        self._strings, self._sources = [], []


def _batches(ends: Sequence[int], size: int) -> Iterator[slice]:
    """Batches of at most `size`, or of one string, given the cumulative lengths of the strings."""
    first = 0
    while first < len(ends):
        limit = size + (ends[first - 1] if first else 0)
        last = max(bisect_right(ends, limit, first), first + 1)
        yield slice(first, last)
        first = last
