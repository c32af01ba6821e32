"""Dividing files into splits, and the manifests that say which file lies in which.

A manifest is `split_00.jsonl`, a line a file, sorted by path; `summary.json` holds the manifests' own digests.
"""

import json
import os
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stages.artifacts.command import StageError
from stages.artifacts.publish import sha256_file

SUMMARY = "summary.json"

Keys = NDArray[np.uint64]
Indices = NDArray[np.int64]


class RawFile(NamedTuple):
    """A line of a manifest."""

    path: str
    """Relative to `raw_dir`, with forward slashes."""
    size: int
    """In bytes."""
    digest: str
    """SHA-256 of the bytes, in hexadecimal."""


def assign(paths: Sequence[str], num_splits: int) -> Indices:
    """Assign each path to a split, so that the counts differ by at most one and few paths move when one is added.

    Rendezvous hashing (Thaler and Ravishankar, 1998) ranks the splits for each path; the path goes to the first one
    on its list that is not full, where split `i` takes `(n + num_splits - 1 - i) // num_splits` of the `n` paths.
    Paths are served in their sorted order. A path more or less then shifts one place through splits that fill up one
    after the other, so that fewer than `num_splits` other paths move.

    Paths are served all at once, not one by one: each goes to its favourite; those that come after their favourite
    was full choose again, until no split overflows. A split fills up once, so this takes `num_splits` rounds at
    most, each over the few paths that are left.

    Args:
        paths: Sorted.
        num_splits: At least 1.

    Returns:
        (n,) int64, from 0 to `num_splits - 1`.
    """
    keys: Keys = np.frombuffer(b"".join(blake2b(os.fsencode(path), digest_size=8).digest() for path in paths), "<u8")
    splits = np.arange(num_splits)
    room = (len(paths) + num_splits - 1 - splits) // num_splits
    is_open = room > 0
    choice = _favourites(keys, splits[is_open])
    start = 0
    while start < len(paths):
        # Of the splits that will fill up as matters stand, only the first one is certain: the others may gain paths.
        waiting = choice[start:]
        counts = np.bincount(waiting, minlength=num_splits)
        full = np.flatnonzero(is_open & (counts >= room))
        first_of_split = np.cumsum(counts) - counts
        places = np.argsort(waiting, kind="stable")[first_of_split[full] + room[full] - 1]
        split, place = full[places.argmin()], int(places.min())
        room -= np.bincount(waiting[: place + 1], minlength=num_splits)
        is_open[split] = False
        start += place + 1
        late = start + np.flatnonzero(choice[start:] == split)
        choice[late] = _favourites(keys[late], splits[is_open])
    return choice


def _favourites(keys: Keys, splits: Indices) -> Indices:
    """For each key the split with the highest weight: (n,) int64. `splits` may be empty only if `keys` is."""
    best = np.zeros(len(keys), np.uint64)
    choice = np.full(len(keys), splits[0] if len(splits) else 0)
    for split in splits:
        weight = _mix(keys ^ _mix(np.full(1, split + 1, np.uint64)))
        better = weight > best
        best[better], choice[better] = weight[better], split
    return choice


def _mix(x: Keys) -> Keys:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): each bit of `x` changes half of the result's."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Keys = x ^ (x >> np.uint64(31))
    return result


def manifest_name(split: int) -> str:
    """The file name of a split's manifest."""
    return f"split_{split:02d}.jsonl"


def write_manifest(path: Path, files: Iterable[RawFile]) -> str:
    """Write a manifest and return its SHA-256.

    The JSON is ASCII: a path that is no UTF-8 keeps its odd bytes as escaped lone surrogates.
    """
    with path.open("w", encoding="ascii", newline="") as manifest:
        # Not by `json.dumps` as a whole, which takes as long as reading the file.
        manifest.writelines(
            f'{{"path": {json.dumps(file.path)}, "size": {file.size}, "digest": "{file.digest}"}}\n' for file in files
        )
    return sha256_file(path)


def read_manifest(path: Path, digest: str) -> list[RawFile]:
    """Read a manifest.

    Raises:
        StageError: its bytes are not those that `organize` wrote.
    """
    if sha256_file(path) != digest:
        raise StageError(f"{path} was changed after organize wrote it: run `dvc repro --force organize`")
    return [RawFile(**json.loads(line)) for line in path.read_text(encoding="ascii").splitlines()]
