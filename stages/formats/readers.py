"""The reader of each format that `suffixes.py` names.

To add a format, write a module with a function `read(content, sink)`. `content.stream()` is a file of UTF-8 bytes of
any length, to be read in pieces. Compression, hash and encoding are handled before. For each record call
`sink.add(strings)` any number of times and `sink.end()` once. `sink.reject` drops what was added since the last `end`,
and reading goes on. Raise `Rejected(reason, detail, position)` where nothing more can be read. Lines of the form
`speaker: text`, for example:

    def read(content: RawContent, sink: TextWriter) -> None:
        for number, line in enumerate(content.stream(), 1):
            _, colon, text = line.decode().strip().partition(": ")
            if not colon:
                sink.reject(Rejected("invalid dialogue", "no speaker", f"line {number}"))
                continue
            sink.add([text])
            sink.end()

Then add its suffixes to `FORMATS` in `suffixes.py`, and the function to `READERS` here. They are two tables because
`organize` reads the first one only, and so does not run again when a reader is edited. For rules, a second function
`read_records(content, records)` passes each record to `records.add(document)`, as dictionaries, lists and strings. Its
table is `RECORD_READERS`.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from stages.formats import json_format, jsonl, tables, yaml_format
from stages.formats.limits import Limits
from stages.formats.raw_content import UTF_8, Changed, RawContent, Rejected, Unreadable
from stages.formats.records import Records
from stages.formats.rules import TEXT, Rule
from stages.formats.writer import TextWriter
from stages.splits import suffixes
from stages.splits.manifests import RawFile


def read(raw_dir: str, file: RawFile, encoding: str, limits: Limits, sink: TextWriter, records: Records | None) -> None:
    """Put the strings of a file, or of a part of one, into a sink; or under a rule its records into `records`.

    Raises:
        Changed: it has another digest, or is gone.
        Unreadable: it is damaged, or looks like another encoding.
        Rejected: nothing more can be read.
    """
    found = suffixes.find(file.path)
    assert found, "organize lists no other files"
    format, compression = found
    raw = os.path.join(raw_dir, file.path)
    content = (
        tables.Table(raw, file.digest, limits, file.part)  # which has no encoding
        if format in ("parquet", "arrow")
        else RawContent(raw, compression, file.digest, encoding, limits, file.part)
    )
    with content:
        if records is None:
            sink.use(TEXT)
            READERS[format](content, sink)
            return
        try:
            RECORD_READERS[format](content, records)
        finally:
            records.flush()


class _FirstRecord(Records):
    """Ends the reading of a file at its first record, without a look at the rest."""

    class Found(BaseException):
        """It has the record: no `Exception`, after which the whole file is hashed."""

    def take(self, record: Any) -> None:
        raise self.Found({**dict.fromkeys(self.names or (), ""), **record} if type(record) is dict else None)

    def reject(self, rejected: Rejected) -> None:
        raise self.Found(None)


def first_record(raw_dir: str, path: str, fallback_encoding: str | None, limits: Limits) -> Any:
    """The first record of a raw file as a rule gets it, with "" for null in a table; None: it cannot be read."""
    sink: Any = None  # gets nothing
    # It is only looked at, beside the results of the stage.
    limits = replace(limits, longest_record=limits.longest_record // 32, table=limits.table // 8)
    for encoding in filter(None, (UTF_8, fallback_encoding)):
        records = _FirstRecord(Rule("*", text="$"), sink, 1, limits)
        try:
            read(raw_dir, RawFile(path, 0, ""), encoding, limits, sink, records)
        except _FirstRecord.Found as found:
            return found.args[0]
        except (Changed, Rejected, Unreadable, OSError):
            pass
    return None


def _read_text(content: RawContent, sink: TextWriter) -> None:
    """Plain text, Markdown, CSV: the entire file is one record of one string, exactly as it is."""
    sink.add_text(content.stream())
    sink.end()


# Any: what `read` opens for the format.
READERS: dict[str, Callable[[Any, TextWriter], None]] = {
    "text": _read_text,
    "csv": _read_text,
    "tsv": _read_text,
    "json": json_format.read,
    "jsonl": jsonl.read,
    "yaml": yaml_format.read,
    "parquet": tables.read,
    "arrow": tables.read,
}
"""Each puts all strings of a file into a sink, and raises `Rejected` where nothing more can be read."""

RECORD_READERS: dict[str, Callable[[Any, Records], None]] = {
    "csv": partial(tables.read_delimited, delimiter=","),
    "tsv": partial(tables.read_delimited, delimiter="\t"),
    "json": json_format.read_records,
    "jsonl": jsonl.read_records,
    "yaml": yaml_format.read_records,
    "parquet": tables.read_records,
    "arrow": tables.read_records,
}
"""The same for records under a rule, which the other formats do not have."""
