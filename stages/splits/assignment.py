"""Which split each file belongs to: equal counts, and few files move when one is added."""

import os
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from stages.base.splitmix64 import finalize

Keys = NDArray[np.uint64]
Indices = NDArray[np.int64]


def assign(paths: Sequence[str], num_splits: int, first: int = 0) -> Indices:
    """Assign each path to a split, so that the counts differ by at most one and few paths move when one is added.

    Rendezvous hashing (Thaler and Ravishankar, 1998) ranks the splits for each path. In their sorted order, each path
    gets the first split of its ranking that is not full; the `i`-th split, counted from `first`, has room for
    `(n + num_splits - 1 - i) // num_splits` of the `n` paths. One more path, or one less, shifts a single place from
    one split to the next as they fill up, so that fewer than `num_splits` other paths move.

    The implementation assigns all paths at once: each gets its favourite split, and those that come after it was full
    choose again, until no split overflows. Each round fills a split, so there are at most `num_splits` rounds, over
    the few paths that are left.

    Args:
        paths: In an order that does not change.
        num_splits: At least 1.
        first: The split that gets one more before the others do, modulo `num_splits`.

    Returns:
        (n,) int64, from 0 to `num_splits - 1`.
    """
    # (n,), of the paths' bytes, so that names that are not UTF-8 have a key, too; little-endian on every machine.
    keys: Keys = np.frombuffer(b"".join(blake2b(os.fsencode(path), digest_size=8).digest() for path in paths), "<u8")
    splits = np.arange(num_splits)
    # (num_splits,): the first ones get one more
    room = (len(paths) + num_splits - 1 - (splits - first) % num_splits) // num_splits
    is_open = room > 0  # with fewer files than splits some have no room from the start
    choice = _favourites(keys, splits[is_open])
    start = 0  # the paths before it have their place
    while start < len(paths):
        # Of the splits that would fill up now, only the first is certain to: the others may gain paths from it, and so
        # fill up earlier.
        waiting = choice[start:]
        counts = np.bincount(waiting, minlength=num_splits)
        full = np.flatnonzero(is_open & (counts >= room))
        first_of_split = np.cumsum(counts) - counts
        # The path that takes the last place of each of these splits. Stable: equal choices stay in the order of paths.
        places = np.argsort(waiting, kind="stable")[first_of_split[full] + room[full] - 1]
        split, place = full[places.argmin()], int(places.min())
        room -= np.bincount(waiting[: place + 1], minlength=num_splits)
        is_open[split] = False
        start += place + 1
        # Those that come after it and had chosen the same split; all others keep their choice.
        late = start + np.flatnonzero(choice[start:] == split)
        choice[late] = _favourites(keys[late], splits[is_open])
    return choice


def _favourites(keys: Keys, splits: Indices) -> Indices:
    """The split with the highest weight for each key: (n,) int64. `splits` may be empty only if `keys` is."""
    best = np.zeros(len(keys), np.uint64)
    choice = np.full(len(keys), splits[0] if len(splits) else 0)
    for split in splits:
        # An array of one element: NumPy warns where the product of two scalars overflows.
        weight = finalize(keys ^ finalize(np.full(1, split + 1, np.uint64)))
        better = weight > best  # of equal weights the lower split wins, on every machine
        best[better], choice[better] = weight[better], split
    return choice
