"""A shard of strings, written document by document."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.corpus import cut
from stages.corpus.arrow import Shard, StreamWriter
from stages.corpus.source import LONGEST_STRING, Rejected

BATCH = 4 << 20  # characters of a record batch, unless a single string is longer


class TextWriter:
    """The `Sink` of the formats: a row a string; a rejected document leaves no row, also where it was long."""

    def __init__(
        self, stream: StreamWriter, min_chars: int, report: Callable[[Rejected], None], keep_source: bool = False
    ) -> None:
        self.documents = 0
        self.characters = 0
        """Of whole documents."""
        self.keep_source = keep_source
        self.path = ""
        """Of the file that is read, for `keep_source`."""
        self._stream, self._min_chars, self._report = stream, min_chars, report
        # Not yet written, of whole documents:
        self._columns: list[tuple[pa.Array, ...]] = []  # text, and its source
        self._json: list[bytes] = []  # after those
        self._size = 0  # of both, characters
        # Not yet written, of the current document:
        self._strings: list[str] = []
        self._sources: list[str] = []
        self._current_size = 0  # characters, with those already written
        self._start: tuple[int, int] | None = None  # of the current document in the stream, if parts of it are there

    def add(self, strings: list[str], places: Sequence[str] = ()) -> None:
        """Take strings of the current document, in order, and their places, or none where they are the whole file.

        Raises:
            Rejected: one is too long for Arrow's `string`.
        """
        if self.keep_source:
            sources = [f"{self.path}#{place}" for place in places] if places else [self.path] * len(strings)
            kept = zip(strings, sources, strict=True)
            self._sources += [source for string, source in kept if len(string) >= self._min_chars]
        if self._min_chars == 1:
            strings = list(filter(None, strings))
        else:
            strings = [string for string in strings if len(string) >= self._min_chars]
        size = sum(map(len, strings))
        if size > LONGEST_STRING // 4 and max(len(string.encode()) for string in strings) > LONGEST_STRING:
            raise Rejected("string too long", f"a string holds at most {LONGEST_STRING} bytes: split it")
        self._strings += strings
        self._current_size += size
        if self._size + self._current_size > BATCH:
            if self._start is None:
                self._write_whole()
                self._start = self._stream.mark()
            for columns in self._take_current():
                self._stream.write(*columns)

    def end(self) -> None:
        """The current document is whole: keep its strings."""
        self._cut()
        self.documents += 1
        self.characters += self._current_size
        self._columns += self._take_current()
        self._size += 0 if self._start else self._current_size
        self._begin()

    def add_json(self, document: bytes) -> None:
        """Take a whole document that `json.is_document`, and keep its strings."""
        self.documents += 1
        self._json.append(document)
        self._size += len(document)
        if self._size > BATCH:
            self._write_whole()

    def reject(self, rejected: Rejected) -> None:
        """Drop the strings of the current document and report why."""
        self._report(rejected)
        if self._start is not None:
            self._stream.cut(self._start)
        self._begin()

    def close(self) -> Shard:
        """Write what is left of the whole documents and end the shard."""
        self._write_whole()
        return self._stream.close()

    def _begin(self) -> None:
        self._strings, self._sources, self._current_size, self._start = [], [], 0, None

    def _cut(self) -> None:
        """Turn the JSON into a column."""
        if self._json:
            strings = cut.strings(self._json)
            lengths = pc.utf8_length(strings)
            if self._min_chars > 1:
                is_kept = pc.greater_equal(lengths, self._min_chars)
                strings, lengths = strings.filter(is_kept), lengths.filter(is_kept)
            self.characters += pc.sum(lengths).as_py() or 0
            self._columns.append((strings,))
            self._json = []

    def _write_whole(self) -> None:
        self._cut()
        if self._columns:
            columns = [pa.concat_arrays(column) for column in zip(*self._columns, strict=True)]
            text = columns[0]
            offsets = np.frombuffer(text.buffers()[1], np.int32)[text.offset :][: len(text) + 1]
            for part in _batches(offsets[1:] - offsets[0]):
                self._stream.write(*(column[part] for column in columns))
        self._columns, self._size = [], 0

    def _take_current(self) -> Iterator[tuple[pa.Array, ...]]:
        """The strings of the current document that are not yet written, as columns, in batches."""
        columns = (self._strings, self._sources) if self.keep_source else (self._strings,)
        for part in _batches(list(accumulate(map(len, self._strings)))):
            yield tuple(pa.array(column[part], pa.string()) for column in columns)
        self._strings, self._sources = [], []


def _batches(ends: Sequence[int]) -> Iterator[slice]:
    """Where to cut strings of which `ends` gives the lengths, summed up."""
    first = 0
    while first < len(ends):
        limit = BATCH + (ends[first - 1] if first else 0)
        last = max(bisect_right(ends, limit, first), first + 1)
        yield slice(first, last)
        first = last
