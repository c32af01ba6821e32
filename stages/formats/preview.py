"""The first rows that would be made of a file."""

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from stages.base.errors import StageError
from stages.formats import json_values, readers, rules
from stages.formats.advice import find_advice
from stages.formats.limits import LIMITS
from stages.formats.records import Records
from stages.formats.rules import MESSAGES, TEXT, Rule
from stages.formats.source import Changed, Rejected
from stages.formats.writer import TextWriter, documents
from stages.splits import suffixes, tree
from stages.splits.manifests import RawFile

_NUM_ROWS = 5
_LONGEST = 1000  # characters of a text that are shown


def preview(
    file: Path, raw_dir: str, given: Sequence[Rule] | None, fallback_encoding: str | None, min_chars: int
) -> str:
    """The first rows of a raw file, as text. `file` may be given from here, or below `raw_dir`.

    Raises:
        StageError: it is not below `raw_dir`, or is not read by its name.
    """
    path = os.path.relpath(file if file.exists() else Path(raw_dir, file), raw_dir)
    if path.startswith("..") or not Path(raw_dir, path).is_file() or not suffixes.find(path):
        raise StageError(f"{file} is no raw file below {raw_dir} that is read: name one, such as {raw_dir}/a.jsonl")
    index, rule = rules.find(given, path) or (None, None)
    sink = _Preview(min_chars)
    records = None if rule is None else Records(rule, sink, min_chars, LIMITS)
    begin = b""
    try:
        raw = RawFile(path, *tree.measure(Path(raw_dir, path)))
        with readers.open_source(raw_dir, raw, fallback_encoding, LIMITS) as source:
            try:
                readers.read(path, source, sink, records)
            finally:
                begin = source.begin
    except Rejected as rejected:
        sink.reject(rejected)
    except Changed:
        raise StageError(f"{file} changes while it is read: try again when it is complete") from None
    except _Enough:
        pass
    decides = "no rule: each string is a document" if rule is None else f"records.{index}"
    if rule is None and (advice := find_advice(path, begin)):
        decides += f". It looks like conversations: for these, write this in params.yaml:\nrecords:\n- {advice[0]}"
    problem = records.problem() if records else None
    return "\n".join([f"{path}: {decides}", *sink.show(), *([problem] if problem else [])])


class _Enough(BaseException):
    """There are as many rows as are shown. No `Exception`, after which the rest of the file would be hashed."""


class _Preview(TextWriter):
    """Keeps some rows, of which it writes none, and then raises `_Enough`."""

    def __init__(self, min_chars: int) -> None:
        self.column = TEXT
        self.rows: list[tuple[int, str, int]] = []
        """The column, the beginning, and the characters of all of it."""
        self.rejected: list[Rejected] = []
        self.report = self.rejected.append
        self._min_chars, self._num_short = min_chars, 0

    def use(self, column: int) -> None:
        self.column = column

    def add(self, strings: list[str]) -> None:
        for string in strings:
            if self.column == MESSAGES:
                self._add(string)
            else:
                self.add_text(io.BytesIO(string.encode()))

    def _add(self, row: str) -> None:
        self.rows.append((self.column, row[: None if self.column == MESSAGES else _LONGEST], len(row)))
        if len(self.rows) >= _NUM_ROWS:
            raise _Enough

    def add_text(self, stream: BinaryIO) -> None:
        for number, document in enumerate(documents(stream, LIMITS.longest_document)):
            if not number and len(document) < self._min_chars:
                self._num_short += 1
                return
            self._add(document)

    def add_json(self, record: bytes) -> None:
        for strings in json_values.strings([record], LIMITS.chunk):
            self.add(strings.to_pylist())

    def end(self, records: int = 1) -> None:
        """Rows of one record are no different from those of several."""

    def drop(self) -> None:
        """What was added of a record that is rejected is shown, too."""

    def reject(self, rejected: Rejected) -> None:
        self.rejected.append(rejected)

    def show(self) -> list[str]:
        """The rows, and why others are missing."""
        shown = [_show(number, *row) for number, row in enumerate(self.rows[:_NUM_ROWS], 1)]
        problems = [
            f"rejected: {each.reason}" + f" at {each.position}" * bool(each.position) + f": {each.detail}"
            for each in self.rejected[:_NUM_ROWS]
        ]
        short = f": {self._num_short} strings have fewer characters than min_chars ({self._min_chars})"
        return [*shown, *problems] or ["no rows" + short * (self._num_short > 0)]


def _show(number: int, column: int, row: str, size: int) -> str:
    if column == MESSAGES:
        return f"--- {number}: a conversation\n{json.dumps(json.loads(row), indent=2, ensure_ascii=False)}"
    more = f"... ({size} characters)" * (size > _LONGEST)
    return f"--- {number}: a document\n{row[:_LONGEST]}{more}"
