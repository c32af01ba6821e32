"""Formats: one module each, and one line each in `FORMATS`."""

from stages.corpus.formats import json, jsonl, text, yaml
from stages.corpus.formats.base import Format

FORMATS = (
    Format((".txt", ".md", ".csv"), text.read),
    Format((".json",), json.read),
    Format((".jsonl", ".ndjson"), jsonl.read),
    Format((".yaml", ".yml"), yaml.read),
)
COMPRESSIONS = (".gz", ".zst")

_BY_SUFFIX = {suffix: format for format in FORMATS for suffix in format.suffixes}


def find(path: str) -> tuple[Format, str] | None:
    """The format of a file and the suffix of its compression, or "", by its name in any letter case.

    None: not a file that is read.
    """
    name = path.lower()
    compression = next((suffix for suffix in COMPRESSIONS if name.endswith(suffix)), "")
    name = name.removesuffix(compression)
    format = _BY_SUFFIX.get(name[name.rfind(".") :])
    return (format, compression) if format else None


def suffixes() -> list[str]:
    """All suffixes of files that are read, without those of compressions."""
    return list(_BY_SUFFIX)
