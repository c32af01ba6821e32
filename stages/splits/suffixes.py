"""Which files are read: format and compression by the end of a file's name.

Apart from the readers, because `organize` needs the names only: an edit of a parser must not run it again.
"""

import os
from functools import lru_cache

FORMATS = {
    ".txt": "text",
    ".md": "text",
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
"""Suffixes in lower case, without that of a compression, and the names of formats in `readers.READERS`."""
COMPRESSIONS = (".gz", ".zst")
TABLES = tuple(suffix for suffix, format in FORMATS.items() if format in ("parquet", "arrow"))
"""Suffixes of files that are read by row groups or record batches; they compress what they contain themselves."""
DIVISIBLE = (*TABLES, *(suffix for suffix, format in FORMATS.items() if format == "jsonl"))
"""Suffixes of files that may be cut, at the start of any line or unit: compressed ones cannot be entered there."""


def ending(path: str) -> str:
    """The suffix of any file, in lower case; two where the last is of a compression; "" where there is none."""
    stem, suffix = os.path.splitext(os.path.basename(path).lower())
    return os.path.splitext(stem)[1] + suffix if suffix in COMPRESSIONS else suffix


@lru_cache(maxsize=1)  # `extract` asks several times in a row for each file
def find(path: str) -> tuple[str, str] | None:
    """The name of a file's format and the suffix of its compression, or "". The letter case does not matter.

    None: a file that is not read.
    """
    name = path.lower()
    compression = next((suffix for suffix in COMPRESSIONS if name.endswith(suffix)), "")
    name = name.removesuffix(compression)  # one only: `.json.gz.gz` is not read
    suffix = name[name.rfind(".") :]
    if compression and suffix in TABLES:
        return None
    return (FORMATS[suffix], compression) if suffix in FORMATS else None
