"""Signatures of documents: which are equal, and how similar two others are, without their text.

Equal ones have the same 128 bits of BLAKE2b. That two of a trillion different documents share them has a chance below
one in 10^14. The similarity is that of Jaccard, of the sets of shingles: the share of 128 hash functions that have
their minimum at the same shingle estimates it (Broder, 1997), and 16 bits of each minimum are enough (Li and König,
2010). Documents of few words have no such signature: of them, equal ones alone are found.
"""

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stages.base.files import check_files
from stages.base.splitmix64 import next_value
from stages.duplicates import shingles
from stages.work import arrow, reuse

NUM_HASHES = 128
FEWEST_WORDS = 20
"""Of a document that has a signature: a few words of difference would be most of it."""
HEAD = np.dtype([("high", "<u8"), ("low", "<u8"), ("words", "<u4"), ("signature", "<i4"), ("column", "<u2")])
"""Of a document: the digest, the index of its signature, -1 where it has none, and whether it is a conversation.
Little-endian: on a cluster one machine may read what another one wrote. Its size is even,
which aligns the signatures."""
SIGNATURE = np.dtype("<u2")
_HASHED = 1 << 14  # shingles at once, which stay in the processor's cache


class SignTask(NamedTuple):
    """A shard of the corpus whose documents are signed."""

    shard: Path
    sha256: str
    """Of the shard."""
    has_signatures: bool
    """Whether similar documents are wanted, and not equal ones alone."""
    target: Path
    """The file to write."""
    store: "reuse.Store[int]"
    key: str
    """In the store."""


class Signed(NamedTuple):
    """What `sign` wrote, mapped."""

    heads: NDArray[np.void]
    """(documents,) of HEAD."""
    signatures: NDArray[np.uint16]
    """(those that have one, NUM_HASHES)."""


def sign(task: SignTask) -> bool:
    """Write the signatures of a shard, or fetch them from the store; whether it had them."""
    if task.store.fetch(task.key, task.target) is not None:
        return True
    heads, signatures, number = [], [], 0
    for texts, column in arrow.read_rows(task.shard):
        rows: list[str] = texts.to_pylist()
        head = np.zeros(len(rows), HEAD)
        digests = b"".join(blake2b(row.encode(), digest_size=16, key=bytes([column])).digest() for row in rows)
        head["high"], head["low"] = np.frombuffer(digests, "<u8").reshape(-1, 2).T
        head["signature"], head["column"] = -1, column
        if task.has_signatures:
            found, head["words"] = minima([document(row, column) for row in rows])
            is_long = head["words"] >= FEWEST_WORDS
            head["signature"][is_long] = number + np.arange(is_long.sum())
            number += int(is_long.sum())
            signatures.append(found[is_long])
        heads.append(head)
    check_files({task.shard: task.sha256}, arrow.CHANGED)
    content = [np.array([sum(map(len, heads)), number], "<u8"), *heads, *signatures]
    digest = hashlib.sha256()
    with task.target.open("wb") as file:
        for array in content:
            data = np.ascontiguousarray(array).tobytes()  # `tofile` ignores a full disk
            file.write(data)
            digest.update(data)
    task.store.put(task.key, task.target, digest.hexdigest(), number)
    return False


def read(path: Path) -> Signed:
    """What `sign` wrote."""
    with path.open("rb") as file:
        documents, signed = (int(number) for number in np.frombuffer(file.read(16), "<u8"))

    def mapped(dtype: np.dtype[Any], begin: int, *shape: int) -> NDArray[Any]:
        if not shape[0]:
            return np.empty(shape, dtype)  # nothing cannot be mapped
        return np.memmap(path, dtype, "r", begin, shape).view(np.ndarray)  # whose elements are found faster

    return Signed(mapped(HEAD, 16, documents), mapped(SIGNATURE, 16 + documents * HEAD.itemsize, signed, NUM_HASHES))


def document(row: str, column: int, left_out: str = "system") -> str:
    """The text by which a row of the corpus is compared: of a conversation all but what its system messages say.

    Many conversations have one long system message, which would make all of them similar.

    Args:
        row: Of the corpus.
        column: In which it is: 1 for a conversation.
        left_out: The role whose messages are not compared; "": none.
    """
    if column == 0:
        return row
    turns = json.loads(row)
    return "\n".join(_strings([turns.get(name) for name in ("messages", "prompt", "completion")], left_out))


def _strings(value: Any, left_out: str) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, left_out)
    elif isinstance(value, dict) and value.get("role") != left_out:
        for name, item in value.items():
            if name != "role":
                yield from _strings(item, left_out)


def minima(texts: list[str]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """The signature of each text, (n, NUM_HASHES), and its number of words, (n,)."""
    smallest, words = np.full((NUM_HASHES, len(texts)), 0xFFFFFFFF, np.uint32), np.zeros(len(texts), np.int64)
    for found in shingles.of_texts(texts):
        _lower(smallest[:, found.texts], found.hashes, found.bounds)
        words[found.texts] += found.num_words
    # The upper bits of a product: those of a small number are 0.
    return ((smallest * np.uint32(0x9E3779B1)) >> np.uint32(16)).astype(SIGNATURE).T, words


def _lower(smallest: NDArray[np.uint32], hashes: NDArray[np.uint64], bounds: NDArray[np.int64]) -> None:
    """Lower the minima of each hash function, (NUM_HASHES, documents), by the shingles of these documents."""
    has_some = np.flatnonzero(np.diff(bounds))
    starts, upper = bounds[has_some], (hashes >> np.uint64(32)).astype(np.uint32)
    buffer = np.empty(_HASHED, np.uint32)
    for begin in range(0, len(upper), _HASHED):
        part = upper[begin : begin + _HASHED]
        values = buffer[: len(part)]
        first = int(np.searchsorted(starts, begin, "right")) - 1
        end = int(np.searchsorted(starts, begin + len(part)))
        within = np.maximum(starts[first:end] - begin, 0)
        columns = has_some[first:end]
        for index, (factor, mask) in enumerate(zip(*_functions(), strict=True)):
            np.multiply(part, factor, out=values)
            np.bitwise_xor(values, mask, out=values)
            found = np.minimum.reduceat(values, within)
            smallest[index, columns] = np.minimum(smallest[index, columns], found)


@cache
def _functions() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """An odd factor and a mask for each hash function."""
    numbers = (next_value(np.arange(2 * NUM_HASHES, dtype=np.uint64)) >> np.uint64(32)).astype(np.uint32)
    return numbers[:NUM_HASHES] | np.uint32(1), numbers[NUM_HASHES:]
