"""Sizes that bound the memory of `extract`. They are passed as an argument, so that a test can set small ones."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """All but `longest_string` and `num_listed` trade memory, of one worker, for speed."""

    chunk: int = 1 << 20
    """Bytes of a file that are read at once, and characters that the YAML reader hands on at once."""
    largest_held: int = 64 << 20
    """Bytes of a decompressed file: a larger one is streamed, and read twice."""
    batch: int = 4 << 20
    """Characters of a record batch, unless a single string is longer."""
    digests: int = 4 << 20
    """Strings, about, that are compared at once when duplicates are dropped: 40 bytes each."""
    longest_string: int = 2**31 - 1
    """Bytes of UTF-8: the offsets of Arrow's `string` have 32 bits."""
    num_listed: int = 1000
    """Rejections of one file that are listed in data/extract.json. All are counted."""


LIMITS = Limits()
"""Those of the stage."""
