"""The reader of each format that `suffixes.py` names."""

from collections.abc import Callable

from stages.formats import json, jsonl, yaml
from stages.formats.source import Source
from stages.formats.writer import TextWriter


def _read_text(source: Source, sink: TextWriter) -> None:
    """Plain text, Markdown, CSV: the entire file is one record of one string, exactly as it is."""
    sink.add_text(source.stream(), source.utf8_size)
    sink.end()


READERS: dict[str, Callable[[Source, TextWriter], None]] = {
    "text": _read_text,
    "json": json.read,
    "jsonl": jsonl.read,
    "yaml": yaml.read,
}
"""Each puts all strings of a source into a sink, and raises `Rejected` where nothing more can be read."""
