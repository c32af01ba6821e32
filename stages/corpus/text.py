"""A shard of strings, written document by document."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate

import pyarrow as pa

from stages.corpus.arrow import Shard, StreamWriter
from stages.corpus.source import LONGEST_STRING, Rejected

BATCH = 4 << 20  # characters of a record batch, unless a single string is longer


class TextWriter:
    """The `Sink` of the formats: a row a string; a rejected document leaves no row, also where it was long."""

    def __init__(self, stream: StreamWriter, min_chars: int, report: Callable[[Rejected], None]) -> None:
        self.documents = 0
        self.characters = 0
        """Of whole documents."""
        self._stream, self._min_chars, self._report = stream, min_chars, report
        self._whole: list[str] = []  # of whole documents, not yet written
        self._whole_size = 0  # characters
        self._current: list[str] = []  # of the current document, not yet written
        self._current_size = 0  # characters, with those already written
        self._start: tuple[int, int] | None = None  # of the current document in the stream, if parts of it are there

    def add(self, strings: list[str]) -> None:
        """Take strings of the current document, in order.

        Raises:
            Rejected: one is too long for Arrow's `string`.
        """
        if self._min_chars == 1:
            strings = list(filter(None, strings))
        else:
            strings = [string for string in strings if len(string) >= self._min_chars]
        size = sum(map(len, strings))
        if size > LONGEST_STRING // 4 and max(len(string.encode()) for string in strings) > LONGEST_STRING:
            raise Rejected("string too long", f"a string holds at most {LONGEST_STRING} bytes: split it")
        self._current += strings
        self._current_size += size
        if self._whole_size + self._current_size > BATCH:
            if self._start is None:
                self._write(self._whole)
                self._whole, self._whole_size = [], 0
                self._start = self._stream.mark()
            for batch in _batches(self._current):
                self._write(batch)
            self._current = []

    def end(self) -> None:
        """The current document is whole: keep its strings."""
        self.documents += 1
        self.characters += self._current_size
        self._whole += self._current
        self._whole_size = 0 if self._start else self._whole_size + self._current_size
        self._begin()

    def reject(self, rejected: Rejected) -> None:
        """Drop the strings of the current document and report why."""
        self._report(rejected)
        if self._start is not None:
            self._stream.cut(self._start)
        self._begin()

    def close(self) -> Shard:
        """Write what is left of the whole documents and end the shard."""
        self._write(self._whole)
        return self._stream.close()

    def _begin(self) -> None:
        self._current, self._current_size, self._start = [], 0, None

    def _write(self, batch: list[str]) -> None:
        if batch:
            self._stream.write(pa.array(batch, pa.string()))


def _batches(strings: list[str]) -> Iterator[list[str]]:
    """Cut a list of any size into batches."""
    ends = list(accumulate(map(len, strings)))
    first = 0
    while first < len(strings):
        limit = BATCH + (ends[first - 1] if first else 0)
        last = max(bisect_right(ends, limit, first), first + 1)
        yield strings[first:last]
        first = last
