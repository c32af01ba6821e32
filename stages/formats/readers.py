"""The reader of each format that `suffixes.py` names."""

from collections.abc import Callable

from stages.formats import json, jsonl, text, yaml
from stages.formats.source import Source
from stages.formats.writer import TextWriter

READERS: dict[str, Callable[[Source, TextWriter], None]] = {
    "text": text.read,
    "json": json.read,
    "jsonl": jsonl.read,
    "yaml": yaml.read,
}
"""Each puts all strings of a source into a sink, and raises `Rejected` where nothing more can be read."""
