"""Which documents leave: those that are equal or similar to one that stays.

Equal documents have equal digests. Similar ones have equal values in at least one band of their signatures, with a
probability of 0.99 or more (locality-sensitive hashing: Leskovec, Rajaraman and Ullman, Mining of Massive Datasets,
chapter 3). Both are found alike: each split writes its entries as a sorted file, and all files are merged, one range
of keys after the other, so memory holds a range. Of similar documents one at a time decides, in a fixed order: it
leaves if its true similarity to one that has stayed is large enough, and stays otherwise. So a chain of versions does
not leave for the sake of its first one, as it would if all that are linked were one group.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from stages.base.splitmix64 import next_value
from stages.duplicates.signatures import NUM_HASHES, Signed

Documents = NDArray[np.int64]
"""Numbers of documents, over all splits."""

RECALL = 0.99
"""Of the pairs whose similarity is the threshold, those that share a band, at least."""
MOST_COMPARED = 1000
"""Documents that have stayed with the same band, with which another one is compared: the first of them."""
SIGMAS = 3.0
"""An estimate that is so many standard deviations below the threshold is not verified."""
AT_ONCE = 2 << 20
"""Entries that are merged at once: 100 bytes each."""
_ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<i8")])


class Dropped(NamedTuple):
    """The documents that leave, in order."""

    documents: Documents
    kept: Documents
    """For each of them, one that stays."""
    similarity: NDArray[np.float64]
    """Of both; 1: they are equal, or have the same shingles."""
    is_equal: NDArray[np.bool_]
    """Whether its bytes are those of another document."""


NOTHING = Dropped(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float64), np.empty(0, np.bool_))


class SignedCorpus:
    """The signatures of all splits, by numbers of documents.

    Args:
        splits: Their documents are numbered in this order.
        source_indices: Of each split, the position of its source among all.
    """

    def __init__(self, splits: Sequence[Signed], source_indices: Sequence[int]) -> None:
        self.splits = splits
        self.offsets = np.cumsum([0, *(len(split.heads) for split in splits)])
        self.source_indices = np.repeat(np.asarray(source_indices, np.int64), np.diff(self.offsets))
        words = [np.empty(0, np.int64), *(split.heads["words"].astype(np.int64) for split in splits)]
        self.words = np.concatenate(words)

    def numbers(self) -> Iterator[tuple[Signed, Documents]]:
        """Each split, and the numbers of its documents."""
        for split, (first, end) in zip(self.splits, pairwise(self.offsets.tolist()), strict=True):
            yield split, np.arange(first, end)

    def signatures(self, documents: Sequence[int]) -> NDArray[np.uint16]:
        """Those of some documents: (n, NUM_HASHES)."""
        numbers, found = np.asarray(documents), np.empty((len(documents), NUM_HASHES), np.uint16)
        where = np.searchsorted(self.offsets, numbers, "right") - 1
        for index in np.unique(where).tolist():
            own, split = where == index, self.splits[index]
            found[own] = split.signatures[split.heads["signature"][numbers[own] - self.offsets[index]]]
        return found


def bands(threshold: float) -> tuple[int, int]:
    """How many bands there are, and values in each: as many as possible, with RECALL at the threshold."""

    def recall(size: int) -> float:
        return 1 - (1 - threshold**size) ** (NUM_HASHES // size)

    size = max(size for size in range(1, NUM_HASHES + 1) if size == 1 or recall(size) >= RECALL)
    return NUM_HASHES // size, size


def find(
    corpus: SignedCorpus, threshold: float | None, similarity: Callable[[int, int], float], directory: Path,
    at_once: int = AT_ONCE,
) -> Dropped:  # fmt: skip
    """Decide which documents leave: of two, the one in the later source, then the shorter one, then the later one.

    Args:
        corpus: The signatures of all documents.
        threshold: The similarity from which on a document leaves; None: equal ones alone leave.
        similarity: The true similarity of two documents, by their numbers.
        directory: For temporary files.
        at_once: Entries that are merged at once.
    """
    kept = np.arange(len(corpus.words))
    entries = ((split.heads["high"], split.heads["low"], own) for split, own in corpus.numbers())
    for documents, sizes in _groups(entries, directory, at_once):
        kept[documents] = np.repeat(documents[np.cumsum(sizes) - sizes], sizes)
    is_equal = kept != np.arange(len(kept))
    similarities = is_equal.astype(np.float64)
    if threshold is not None:
        documents, buckets = _candidates(corpus, is_equal, bands(threshold), directory, at_once)
        order = np.lexsort((documents, -corpus.words[documents], corpus.source_indices[documents]))
        for document, other, found in _decide(corpus, documents[order], buckets[order], threshold, similarity):
            kept[document], similarities[document] = other, found
    # What is equal to a document that has left names what that one is similar to.
    similarities[is_equal] = np.where(kept[kept] != kept, similarities[kept], 1.0)[is_equal]
    kept = kept[kept]
    dropped = np.flatnonzero(kept != np.arange(len(kept)))
    return Dropped(dropped, kept[dropped], similarities[dropped], is_equal[dropped])


def _candidates(
    corpus: SignedCorpus, is_equal: NDArray[np.bool_], shape: tuple[int, int], directory: Path, at_once: int
) -> tuple[Documents, Documents]:
    """Documents that share a band with another one, (n,), and the bucket in which they do, (n,).

    Most of these documents are in several buckets.
    """
    num_bands, size = shape
    documents, buckets, num_buckets = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for band in range(num_bands):  # one after the other: each needs 24 bytes of disk space for a document
        entries = (_of_band(split, own, is_equal[own], band * size, size) for split, own in corpus.numbers())
        for found, sizes in _groups(entries, directory, at_once):
            documents.append(found)
            buckets.append(np.repeat(np.arange(num_buckets, num_buckets + len(sizes)), sizes))
            num_buckets += len(sizes)
    return np.concatenate(documents), np.concatenate(buckets)


def _of_band(
    split: Signed, own: Documents, is_equal: NDArray[np.bool_], first: int, size: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], Documents]:
    """Two hashes of some values of the signatures of a split, and its documents that have signatures: (n,) each.

    A text and a conversation never have the same: what is trained of them differs.
    """
    rows = np.flatnonzero((split.heads["signature"] >= 0) & ~is_equal)
    where = split.heads["signature"][rows]
    keys = np.uint64(first) + (split.heads["column"][rows].astype(np.uint64) << np.uint64(32))
    for index in range(first, first + size):
        keys = next_value(keys ^ split.signatures[where, index])
    return keys, next_value(~keys), own[rows]


def _decide(
    corpus: SignedCorpus, documents: Documents, buckets: Documents, threshold: float,
    similarity: Callable[[int, int], float],
) -> Iterator[tuple[int, int, float]]:  # fmt: skip
    """Yield each document that leaves, one that has stayed, and how similar they are.

    Args:
        corpus: The signatures of all documents.
        documents: In the order in which they decide, as often as they are in a bucket.
        buckets: Of each of them.
        threshold: Of the similarity.
        similarity: The true one.
    """
    least = threshold - SIGMAS * math.sqrt(threshold * (1 - threshold) / NUM_HASHES)
    stayed: dict[int, list[int]] = defaultdict(list)

    def match(document: int, others: list[int]) -> tuple[int, float] | None:
        signatures = corpus.signatures([document, *others])
        estimates = (signatures[1:] == signatures[0]).mean(axis=1)
        for index in np.argsort(-estimates, kind="stable")[: np.count_nonzero(estimates >= least)].tolist():
            if (found := similarity(document, others[index])) >= threshold:
                return others[index], found
        return None

    if not len(documents):
        return
    begins = np.flatnonzero(np.diff(documents, prepend=-1))
    each = zip(documents[begins].tolist(), np.split(buckets, begins[1:]), strict=True)
    for document, own in tqdm(each, total=len(begins), desc="deduplicate: compare", unit="document", disable=None):
        of_document = own.tolist()
        others = [*dict.fromkeys(other for bucket in of_document for other in stayed[bucket])]
        if others and (found := match(document, others)):
            yield document, *found
            continue
        for bucket in of_document:
            if len(stayed[bucket]) < MOST_COMPARED:
                stayed[bucket].append(document)


def _groups(
    entries: Iterable[tuple[NDArray[np.uint64], NDArray[np.uint64], Documents]], directory: Path, at_once: int
) -> Iterator[tuple[Documents, NDArray[np.int64]]]:
    """Documents with equal keys, group by group, in each by their numbers; and how many each group has, two or more.

    Args:
        entries: Of each split: the upper and lower half of the keys, and the documents, (n,) each.
        directory: For a sorted file of each split.
        at_once: Entries that are in memory, about.
    """
    runs = [_write(directory / f"run-{index}", *columns) for index, columns in enumerate(entries)]
    num_ranges = max(1, -(-sum(path.stat().st_size for path in runs) // (_ENTRY.itemsize * at_once)))
    # Keys are evenly distributed, so ranges of equal width have about equally many. Python's integers are exact.
    limits = np.array([index * 2**64 // num_ranges for index in range(1, num_ranges)], np.uint64)
    bounds = [_bounds(path, limits) for path in runs]
    for index in range(num_ranges):  # equal keys are in one range, so ranges are independent
        found = np.concatenate(
            [
                np.empty(0, _ENTRY),
                *(_read(path, *ends[index : index + 2]) for path, ends in zip(runs, bounds, strict=True)),
            ]
        )
        found = found[np.lexsort((found["document"], found["low"], found["high"]))]
        differs = (found["high"][1:] != found["high"][:-1]) | (found["low"][1:] != found["low"][:-1])
        sizes = np.diff(np.flatnonzero(np.concatenate([[True], differs, [True]]))) if len(found) else np.empty(0, int)
        yield found["document"][np.repeat(sizes > 1, sizes)], sizes[sizes > 1]


def _write(path: Path, high: NDArray[np.uint64], low: NDArray[np.uint64], documents: Documents) -> Path:
    """Write entries, sorted by their keys."""
    entries = np.empty(len(documents), _ENTRY)
    entries["high"], entries["low"], entries["document"] = high, low, documents
    path.write_bytes(entries[np.lexsort((low, high))].tobytes())  # `tofile` ignores a full disk
    return path


def _bounds(path: Path, limits: NDArray[np.uint64]) -> list[int]:
    """Where the ranges between some limits begin in a sorted file, and where the last one ends."""
    if not path.stat().st_size:
        return [0] * (len(limits) + 2)
    table = np.memmap(path, _ENTRY, "r")  # of which the search reads little
    return [0, *np.searchsorted(table["high"], limits).tolist(), len(table)]


def _read(path: Path, first: int, end: int) -> NDArray[np.void]:
    """Some entries of a sorted file."""
    # Not mapped: what was read of a mapped file stays in memory. Not by numpy.fromfile, which takes an error of the
    # disk for the end of the file.
    with path.open("rb") as file:
        file.seek(first * _ENTRY.itemsize)
        return np.frombuffer(file.read((end - first) * _ENTRY.itemsize), _ENTRY)
