"""A shard of strings, written record by record, with memory for one record batch and one string."""

import io
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from stages.base.dataset import Shard
from stages.formats.limits import LIMITS, Limits
from stages.formats.raw_content import Rejected
from stages.formats.rules import TEXT
from stages.work.arrow import Mark, StreamWriter, slices

SHORT = 20
"""Characters below which a string is a label, a name or a unit rather than text."""

_AT_ONCE = 1000  # strings that are Python objects, which need up to 80 bytes each, beside what they contain


class TextWriter:
    """Where the formats put strings, record by record: a row a string. A rejected record leaves no row.

    Rows in a record batch are of one column: documents, or conversations, where the stream has a column for them.

    A string that is longer than `limits.longest_document` becomes several documents.

    Strings of several records make one record batch of `limits.batch` characters. A record that is longer than that
    is written while it is read, so that memory holds a batch of it; if it is rejected, the stream is cut back.
    """

    def __init__(
        self,
        stream: StreamWriter,
        min_chars: int,
        report: Callable[[Rejected], None],
        limits: Limits = LIMITS,
    ) -> None:
        self.records = 0
        self.characters = 0
        """Of complete records."""
        self.short_strings = 0
        """Strings with fewer than `SHORT` characters, of those in the stream."""
        self.column = 0
        """Of the rows that are added."""
        self.has_text = False
        """Whether any string was added since somebody set this to False, however short. Empty ones are none."""
        self.report = report
        """Called with each record that is rejected."""
        self._stream, self._min_chars, self._limits = stream, min_chars, limits
        # Rows wait here, and go into the stream in this order. Those of the current record join the complete ones when
        # it ends, and these the earlier ones when another file begins.
        self._earlier = _Rows()  # of earlier files
        self._complete = _Rows()  # of complete records of the current file
        self._size = 0  # characters of both
        self._current = _Rows()  # of the current record
        self._current_size = 0  # characters of this record, with those in the stream
        # Where to cut the stream, if it already has rows of the current record, or of the current file.
        self._record_start: _Start | None = None
        self._file_start: _Start | None = None
        self.begin_file()

    def begin_file(self) -> None:
        """What follows is of another file, of which `undo` drops all."""
        self._earlier.extend_rows(self._complete)
        self._complete = _Rows()
        self.has_text = False
        self._before: tuple[int, int, int] = self.records, self.characters, self._size
        self._file_start = None

    def undo(self) -> None:
        """Drop all strings of the current file."""
        self.drop()
        if self._file_start is not None:
            self._cut(self._file_start)
            self._before = *self._before[:2], 0  # rows of earlier files were written before
        self._complete = _Rows()
        self.records, self.characters, self._size = self._before
        self.begin_file()

    def use(self, column: int) -> None:
        """Add rows of another column from now on. The current record must be complete."""
        if column != self.column:
            self._write_complete()
        self.column = column

    def add(self, strings: list[str]) -> None:
        """Add strings of the current record, in order; a record may need several calls.

        Raises:
            Rejected: one is too long.
        """
        self.has_text = self.has_text or any(strings)
        texts = [string for string in strings if self.column or len(string) >= self._min_chars]
        characters = sum(map(len, texts))
        # A character has at most 4 bytes. Most calls end with these comparisons, without a look at each string.
        longest = self._limits.longest_document // 4
        if characters > longest and max(map(len, texts)) > longest:
            texts = [document for text in texts for document in self._documents(text)]
        self._extend(texts, characters)

    def _documents(self, text: str) -> Iterable[str]:
        if len(text) <= self._limits.longest_document // 4:  # which spares it the encoding
            return [text]
        content, longest = replace_surrogates(text).encode(), self._limits.longest_string
        if len(content) > longest:
            raise Rejected("string too long", f"a string has more than {longest} bytes of UTF-8: split it")
        return documents(io.BytesIO(content), self._limits.longest_document) if self.column == TEXT else [text]

    def _extend(self, texts: list[str], characters: int) -> None:
        self._current.extend(texts)
        self._current_size += characters
        if self._size + self._current_size > self._limits.batch:
            self._write_current()

    def add_text(self, stream: BinaryIO) -> None:
        """Add an entire file, as a stream of UTF-8, which is the only string of the current record."""
        for document in documents(stream, self._limits.longest_document):
            self.has_text = True
            self._extend([document], len(document))
        if self._current_size < self._min_chars:
            self.drop()

    def end(self, records: int = 1) -> None:
        """The current record is complete, or `records` together are: keep their strings."""
        self.records += records
        self.characters += self._current_size
        self._complete.extend_rows(self._current)
        self._size += 0 if self._record_start else self._current_size
        self._begin()

    def reject(self, rejected: Rejected) -> None:
        """Drop the strings of the current record and report why."""
        self.report(rejected)
        self.drop()

    def drop(self) -> None:
        """Drop the strings of the current record."""
        if self._record_start is not None:
            self._cut(self._record_start)  # complete records before it were written first, and stay
        self._begin()

    def close(self) -> Shard:
        """Write what is left of the complete records and end the shard."""
        self.begin_file()  # so that the last file needs no record batch of its own
        self._write_complete()
        return self._stream.close()

    def _begin(self) -> None:
        self._current = _Rows()
        self._current_size = 0
        self._record_start = None

    def _write_current(self) -> None:
        """Write what there is of a long record; what precedes it must be in the stream before it."""
        if self._record_start is None:
            self._write_complete()
            self._record_start = _Start(self._stream.mark(), self.short_strings)
        self._write(self._current, pc.utf8_length)

    def _write_complete(self) -> None:
        self._write(self._earlier, pc.binary_length)
        if self._file_start is None:
            self._file_start = _Start(self._stream.mark(), self.short_strings)
        self._write(self._complete, pc.binary_length)
        self._size = 0

    def _write(self, rows: "_Rows", lengths: Callable[[pa.Array], pa.Array]) -> None:
        """Move rows into the stream: record batches of at most `limits.batch`, as `lengths` measures, or of one row."""
        if arrays := rows.take():
            strings = pa.concat_arrays(arrays)
            for batch in slices(strings, lengths(strings), self._limits.batch):
                self._stream.write_column(batch, self.column)
                self.short_strings += pc.sum(pc.less(pc.utf8_length(batch), SHORT)).as_py()

    def _cut(self, start: "_Start") -> None:
        self._stream.cut(start.mark)
        self.short_strings = start.short_strings


class _Start(NamedTuple):
    """Of a record or a file, where to cut the stream."""

    mark: Mark
    short_strings: int


class _Rows:
    """Strings in order: in Arrow arrays, and a few in a Python list after them."""

    def __init__(self) -> None:
        self._arrays: list[pa.Array] = []
        self._strings: list[str] = []

    def extend(self, strings: Iterable[str]) -> None:
        self._strings += strings
        if len(self._strings) > _AT_ONCE:
            self._convert()

    def extend_rows(self, rows: "_Rows") -> None:
        if rows._arrays:
            self._convert()
            self._arrays += rows._arrays
        self.extend(rows._strings)

    def take(self) -> list[pa.Array]:
        """Remove all rows and return them."""
        self._convert()
        arrays, self._arrays = self._arrays, []
        return arrays

    def _convert(self) -> None:
        if self._strings:
            try:
                array = pa.array(self._strings, pa.string())
            except UnicodeEncodeError:
                array = pa.array([*map(replace_surrogates, self._strings)], pa.string())
            self._arrays.append(array)
            self._strings = []


def documents(stream: BinaryIO, size: int) -> Iterator[str]:
    """Cut UTF-8 into documents of at most `size` bytes: after the last line end, else space, else character in them.

    Joined they are the text.
    """
    rest = b""
    while len(rest := rest + stream.read(size + 1 - len(rest))) > size:
        end = rest.rfind(b"\n", 0, size) + 1 or rest.rfind(b" ", 0, size) + 1
        document = rest[: end or size].decode(errors="ignore")  # at most a character is cut
        yield document
        rest = rest[end or len(document.encode()) :]
    if rest:
        yield rest.decode()


def replace_surrogates(value: str) -> str:
    """Join pairs of surrogates, and replace the others by U+FFFD: UTF-8 cannot express them."""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
