"""Sizes that bound the memory of `extract`. They are passed as an argument, so that a test can set small ones."""

import os
from dataclasses import dataclass

# The stage imports this module before pyarrow, whose own allocator takes a gibibyte at once: within that, no limit of
# memory holds (`tables.py`). That of the system is as fast here.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


@dataclass(frozen=True)
class Limits:
    """With these, a worker of `extract` needs less than 1 GiB for any files and any parameters.

    That is the peak of its resident memory (VmHWM), with the interpreter and its libraries (tests/test_memory.py).
    """

    chunk: int = 1 << 20
    """Bytes of a file that are read at once, and characters that the YAML reader hands on at once."""
    batch: int = 4 << 20
    """Characters of a record batch, unless a single string is longer, and of JSON that is parsed at once."""
    longest_document: int = 1 << 20
    """Bytes of UTF-8: a longer string becomes several documents, unless it is a conversation."""
    longest_string: int = 32 << 20
    """Bytes of UTF-8 of a string in JSON or YAML, which is in memory several times while it is read."""
    longest_record: int = 32 << 20
    """Characters of a record that a rule reads, which is in memory as a whole."""
    most_values: int = 2 << 20
    """Values, about, of such a record: each may be an object of a hundred bytes."""
    deepest: int = 1 << 20
    """Levels of JSON that is read element by element."""
    table: int = 512 << 20
    """Bytes that pyarrow may need for some pages of Parquet, or for a record batch of Arrow."""
    most_bare_rows: int = 4 << 20
    """Rows of a table that may need nothing, as one run of 2^40 nulls does; beyond them a row has a bit of the file."""
    num_listed: int = 1000
    """Rejections of one file that are listed in data/extract.json. All are counted."""
    most_listed: int = 100_000
    """Rejections that are listed of a split, and of all files: more would be too large a file for later stages."""


LIMITS = Limits()
"""Those of the stage."""
