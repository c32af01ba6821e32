"""Dropping strings that occurred before, in the same split or an earlier one: exactly, and with bounded memory.

Strings are compared by 128 bits of BLAKE2b. That two of a trillion different strings share them has a chance below one
in 10^14, so in practice what is dropped is a duplicate. Each split writes files of its digests, sorted and each once.
Then all these files are merged, one range of digests after the other: memory holds a range, and a byte for each string.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from stages.base.dataset import Shard
from stages.formats.writer import count_short
from stages.work import arrow

# 24 bytes. Little-endian, since on a cluster one machine may read what another one wrote.
_ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<u8")])


_ROWS_AT_ONCE = 1 << 14  # strings that are Python objects: 60 bytes each, beside what they contain


class DigestTask(NamedTuple):
    """A shard whose digests are to be written."""

    shard: Path
    num_at_once: int
    """Strings of which the digests are sorted at once, and written to one file: 100 bytes each."""


class Filter(NamedTuple):
    """A shard from which rows are to be dropped."""

    source: Path
    target: Path
    is_first: NDArray[np.bool_]
    """Which rows stay: (rows,)."""
    features: arrow.Features


class Filtered(NamedTuple):
    """A shard without its duplicates."""

    shard: Shard
    duplicates: int
    characters: int
    """In the duplicates."""
    num_short: int
    """Of the duplicates, as `count_short` counts them."""


def write_digests(split: DigestTask) -> list[Path]:
    """Write the digests of a shard's strings beside it, a file for each part of the shard; return the files.

    Those of a part are sorted, each is there once, with its first row in the shard.
    """
    targets: list[Path] = []
    row = 0
    for digests in _digests(split.shard, split.num_at_once):
        entries = np.empty(len(digests), _ENTRY)
        entries["high"], entries["low"], entries["row"] = digests[:, 0], digests[:, 1], np.arange(len(digests))
        entries["row"] += row
        row += len(digests)
        # Stable: equal ones stay in the order of their rows.
        entries = entries[np.lexsort((entries["low"], entries["high"]))]
        targets.append(split.shard.with_suffix(f".digests-{len(targets)}"))
        targets[-1].write_bytes(entries[_is_first(entries)].tobytes())  # `tofile` ignores a full disk
    return targets


def _digests(shard: Path, num_at_once: int) -> Iterator[NDArray[np.uint64]]:
    """The digests of a shard's strings, in order: (n, 2), with about `num_at_once` rows."""
    digests = bytearray()
    for strings, column in arrow.read_rows(shard):
        texts, key = strings.cast(pa.binary()), bytes([column])  # a text is no duplicate of a conversation
        for first in range(0, len(texts), _ROWS_AT_ONCE):
            for text in texts.slice(first, _ROWS_AT_ONCE).to_pylist():
                digests += blake2b(text, digest_size=16, key=key).digest()
        if len(digests) >= 16 * num_at_once:
            yield np.frombuffer(digests, "<u8").reshape(-1, 2)
            digests = bytearray()
    if digests:
        yield np.frombuffer(digests, "<u8").reshape(-1, 2)


def find(digests: Sequence[Sequence[Path]], num_rows: Sequence[int], num_at_once: int) -> list[NDArray[np.bool_]]:
    """For each split which of its rows have a string that occurs for the first time: (rows,) bool.

    Args:
        digests: The files that `write_digests` wrote, of each split, in the order of the splits.
        num_rows: Of each split.
        num_at_once: Digests that are compared at once, about: 40 bytes each.
    """
    flags = [np.zeros(count, np.bool_) for count in num_rows]
    paths = [*chain.from_iterable(digests)]
    split_of_path = np.repeat(np.arange(len(digests)), list(map(len, digests)))
    num_ranges = -(-sum(path.stat().st_size for path in paths) // (_ENTRY.itemsize * num_at_once))
    # Digests are evenly distributed, so ranges of equal width have about equally many. Python's integers are exact.
    limits = np.array([index * 2**64 // num_ranges for index in range(1, num_ranges)], np.uint64)
    bounds = [_bounds(path, limits) for path in paths]
    for index in range(num_ranges):  # equal digests are in one range, so ranges are independent
        pieces = [_read_entries(path, ends[index], ends[index + 1]) for path, ends in zip(paths, bounds, strict=True)]
        entries = np.concatenate(pieces)
        split = np.repeat(split_of_path, [len(piece) for piece in pieces])
        # Stable: equal ones in the order of their splits, and of their rows in one split.
        order = np.lexsort((entries["low"], entries["high"]))
        first = order[_is_first(entries[order])]
        for number, flags_of_split in enumerate(flags):
            flags_of_split[entries["row"][first[split[first] == number]]] = True
    return flags


def _read_entries(path: Path, first: int, end: int) -> NDArray[np.void]:
    """Some entries of a file of digests."""
    # Not mapped: what was read of a mapped file stays in memory. Not by numpy.fromfile, which takes an error of the
    # disk for the end of the file.
    with path.open("rb") as file:
        file.seek(first * _ENTRY.itemsize)
        return np.frombuffer(file.read((end - first) * _ENTRY.itemsize), _ENTRY)


def _bounds(path: Path, limits: NDArray[np.uint64]) -> list[int]:
    """Where the ranges between some limits begin in a file of digests, and where the last one ends."""
    table = np.memmap(path, _ENTRY, "r")  # of which the search reads little
    return [0, *np.searchsorted(table["high"], limits).tolist(), len(table)]


def _is_first(entries: NDArray[np.void]) -> NDArray[np.bool_]:
    """Whether each entry is the first of its digest; (n,) sorted."""
    is_first = np.ones(len(entries), np.bool_)
    high, low = entries["high"], entries["low"]
    is_first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    return is_first


def drop(task: Filter) -> Filtered:
    """Write the target of a filter."""
    source, target, is_first, features = task
    row = characters = num_short = 0
    with arrow.StreamWriter(target, features) as stream:
        for batch, column in arrow.read_rows(source):
            keep = pa.array(is_first[row : row + len(batch)])
            row += len(batch)
            duplicates = batch.filter(pc.invert(keep))
            characters += pc.sum(pc.utf8_length(duplicates)).as_py() or 0  # the sum of nothing is null
            num_short += count_short(duplicates)
            if kept := batch.filter(keep):  # a batch of no rows is not written
                stream.write_column(kept, column)
        return Filtered(stream.close(), row - stream.rows, characters, num_short)
