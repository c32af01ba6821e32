"""Dropping strings that occurred before, in the same split or an earlier one: exactly, and with bounded memory.

Strings are compared by 128 bits of BLAKE2b. That two of a trillion different strings share them has a chance below one
in 10^14, so in practice what is dropped is a duplicate. Each split writes its digests down, sorted and each once; then
all splits are gone through together, one range of digests after the other: memory holds a range, and a byte a string.
"""

import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from stages.corpus import arrow

RANGE = 4 << 20  # strings looked at together, about: 40 bytes each

_ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<u8")])


class Filtered(NamedTuple):
    """A shard without its duplicates."""

    shard: arrow.Shard
    duplicates: int
    characters: int
    """In the duplicates."""


def write_digests(shard: Path) -> Path:
    """Write the digests of a shard's strings beside it, sorted, each with the first row that it is of.

    Memory: 100 bytes a string of the shard, about.
    """
    parts = [
        b"".join(blake2b(text.encode(), digest_size=16).digest() for text in column.to_pylist())
        for column in (arrow.read_batch(shard, offset)["text"] for offset in arrow.batch_offsets(shard))
    ]
    digests = np.frombuffer(b"".join(parts), "<u8").reshape(-1, 2)
    entries = np.empty(len(digests), _ENTRY)
    entries["high"], entries["low"], entries["row"] = digests[:, 0], digests[:, 1], np.arange(len(digests))
    entries = entries[np.lexsort((entries["low"], entries["high"]))]  # stable: equal ones in the order of their rows
    target = shard.with_suffix(".digests")
    entries[_is_first(entries)].tofile(target)
    return target


def find(digests: Sequence[Path], num_rows: Sequence[int]) -> list[NDArray[np.bool_]]:
    """For each split which of its rows are the first of their kind, given the files that `write_digests` wrote."""
    flags = [np.zeros(count, np.bool_) for count in num_rows]
    tables = [np.memmap(path, _ENTRY, "r") if os.path.getsize(path) else np.empty(0, _ENTRY) for path in digests]
    num_ranges = -(-sum(map(len, tables)) // RANGE)
    limits = np.array([index * 2**64 // num_ranges for index in range(1, num_ranges)], np.uint64)
    bounds = [[0, *np.searchsorted(table["high"], limits).tolist(), len(table)] for table in tables]
    for index in range(num_ranges):
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


def drop(task: tuple[Path, Path, dict[str, Any], NDArray[np.bool_]]) -> Filtered:
    """Write a shard anew without the rows that are not the first of their kind.

    Given source, target, the features of both, and flags.
    """
    source, target, features, is_first = task
    row = characters = 0
    with arrow.StreamWriter(target, features) as stream:
        for offset in arrow.batch_offsets(source):
            batch = arrow.read_batch(source, offset)
            keep = pa.array(is_first[row : row + len(batch)])
            row += len(batch)
            characters += pc.sum(pc.utf8_length(batch["text"].filter(pc.invert(keep)))).as_py() or 0
            if kept := batch.filter(keep):
                stream.write(*kept.columns)
        return Filtered(stream.close(), row - stream.rows, characters)
