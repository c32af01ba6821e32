"""How long strings are: counts by length, of bounded size however many strings there are, which splits add up.

A length is a key such as `length 17`: exact below 64 characters, and rounded down by at most 3 % above.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from stages.work import arrow

SHORT = 20
"""Characters below which a string is a label, a name or a unit rather than text."""

_PREFIX = "length "
_BITS = 6
"""Leading bits of a length that are kept."""


def count(strings: pa.Array) -> Counter[str]:
    """The lengths of some strings, in characters."""
    return histogram(np.from_dlpack(pc.utf8_length(strings)))


def count_shard(path: Path) -> Counter[str]:
    """The lengths of all strings of a shard."""
    counts: Counter[str] = Counter()
    for texts, _, pieces in arrow.read_rows(path):
        counts += count(texts) if pieces is None else histogram([sum(map(arrow.count_characters, pieces))])
    return counts


def histogram(lengths: NDArray[Any] | list[int]) -> Counter[str]:
    """Counts by key, of lengths in characters."""
    values = np.asarray(lengths, np.int64)
    shift = np.maximum(np.frexp(values)[1] - _BITS, 0)  # the exponent is the number of bits
    found, number = np.unique(values >> shift << shift, return_counts=True)
    return Counter({f"{_PREFIX}{length}": int(times) for length, times in zip(found, number, strict=True)})


def median(counts: Counter[str]) -> int | None:
    """The length of the string in the middle, of two the shorter; None: there are no strings."""
    lengths = _lengths(counts)
    ends = np.cumsum([number for _, number in lengths])
    return lengths[int(np.searchsorted(ends, (ends[-1] + 1) // 2))][0] if lengths else None


def num_short(counts: Counter[str]) -> int:
    """How many strings have fewer than `SHORT` characters."""
    return sum(number for length, number in _lengths(counts) if length < SHORT)


def describe(counts: Counter[str]) -> str:
    """What is behind a number of strings, for people; "": there are none."""
    total = sum(number for _, number in _lengths(counts))
    return f" (median {median(counts)} characters, {num_short(counts) / total:.0%} below {SHORT})" if total else ""


def _lengths(counts: Counter[str]) -> list[tuple[int, int]]:
    """Pairs of a length and its number, by length, of counts that may be of other things too."""
    found = {key.removeprefix(_PREFIX): number for key, number in counts.items() if key.startswith(_PREFIX)}
    return sorted((int(length), number) for length, number in found.items() if number)
