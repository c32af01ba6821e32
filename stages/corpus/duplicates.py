"""Dropping strings that occurred before, in the same split or an earlier one: exactly, and with bounded memory.

Strings are compared by 128 bits of BLAKE2b. That two of a trillion different strings share them has a chance below one
in 10^14, so in practice what is dropped is a duplicate. Each split writes a file of its digests, sorted and each once.
Then all these files are merged, one range of digests after the other: memory holds a range, and a byte for each string.
"""

import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from stages.artifacts.dataset import Shard
from stages.corpus import arrow

# 24 bytes. Little-endian, since on a cluster one machine may read what another one wrote.
_ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<u8")])


class Filter(NamedTuple):
    """A shard from which rows are to be dropped."""

    source: Path
    target: Path
    features: arrow.Features
    """Of both."""
    is_first: NDArray[np.bool_]
    """Which rows stay: (rows,)."""


class Filtered(NamedTuple):
    """A shard without its duplicates."""

    shard: Shard
    duplicates: int
    characters: int
    """In the duplicates."""


def write_digests(shard: Path) -> Path:
    """Write the digests of a shard's strings beside it, sorted, each once and with its first row; return the file.

    Memory: about 100 bytes for each string of the shard.
    """
    # A record batch at a time: as Python objects, the strings of an entire shard would need more than their bytes.
    parts = [
        b"".join(blake2b(text.encode(), digest_size=16).digest() for text in column.to_pylist())
        for column in (arrow.read_batch(shard, offset)["text"] for offset in arrow.batch_offsets(shard))
    ]
    digests = np.frombuffer(b"".join(parts), "<u8").reshape(-1, 2)  # (rows, 2)
    entries = np.empty(len(digests), _ENTRY)
    entries["high"], entries["low"], entries["row"] = digests[:, 0], digests[:, 1], np.arange(len(digests))
    entries = entries[np.lexsort((entries["low"], entries["high"]))]  # stable: equal ones in the order of their rows
    target = shard.with_suffix(".digests")
    entries[_is_first(entries)].tofile(target)
    return target


def find(digests: Sequence[Path], num_rows: Sequence[int], num_at_once: int) -> list[NDArray[np.bool_]]:
    """For each split which of its rows have a string that occurs for the first time: (rows,) bool.

    Args:
        digests: The files that `write_digests` wrote, in the order of the splits.
        num_rows: Of each split.
        num_at_once: Digests that are compared at once, about: 40 bytes each.
    """
    flags = [np.zeros(count, np.bool_) for count in num_rows]
    # Mapped, so that a range is read where it is needed. A file of no bytes cannot be mapped.
    tables = [np.memmap(path, _ENTRY, "r") if os.path.getsize(path) else np.empty(0, _ENTRY) for path in digests]
    num_ranges = -(-sum(map(len, tables)) // num_at_once)
    # Digests are evenly distributed, so ranges of equal width have about equally many. Python's integers are exact.
    limits = np.array([index * 2**64 // num_ranges for index in range(1, num_ranges)], np.uint64)
    bounds = [[0, *np.searchsorted(table["high"], limits).tolist(), len(table)] for table in tables]
    for index in range(num_ranges):  # equal digests are in one range, so ranges are independent
        pieces = [table[ends[index] : ends[index + 1]] for table, ends in zip(tables, bounds, strict=True)]
        entries = np.concatenate(pieces)
        split = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        order = np.lexsort((entries["low"], entries["high"]))  # stable: equal ones in the order of their splits
        first = order[_is_first(entries[order])]
        for number, flags_of_split in enumerate(flags):
            flags_of_split[entries["row"][first[split[first] == number]]] = True
    return flags


def _is_first(entries: NDArray[np.void]) -> NDArray[np.bool_]:
    """Whether each entry is the first of its digest; (n,) sorted."""
    is_first = np.ones(len(entries), np.bool_)
    high, low = entries["high"], entries["low"]
    is_first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    return is_first


def drop(task: Filter) -> Filtered:
    """Write the target of a filter."""
    source, target, features, is_first = task
    row = characters = 0
    with arrow.StreamWriter(target, features) as stream:
        for offset in arrow.batch_offsets(source):
            batch = arrow.read_batch(source, offset)
            keep = pa.array(is_first[row : row + len(batch)])
            row += len(batch)
            # The sum of nothing is null.
            characters += pc.sum(pc.utf8_length(batch["text"].filter(pc.invert(keep)))).as_py() or 0
            if kept := batch.filter(keep):  # a batch of no rows is not written
                stream.write(*kept.columns)
        return Filtered(stream.close(), row - stream.rows, characters)
