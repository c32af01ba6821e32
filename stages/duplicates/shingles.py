"""The shingles of a document: hashes of consecutive words, in lower case, five if nothing else is asked for.

A word is a run of letters, digits and marks. Each character of a script without spaces between words is a word. All of
a text is computed at once, in NumPy: the hash of a word is the difference of two prefix sums of a polynomial.
"""

import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stages.base.splitmix64 import finalize

NUM_WORDS = 5
"""Of a shingle, where documents are compared."""
PIECE = 1 << 17
"""Characters at once: what is computed of them stays in the processor's cache."""

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_OWN = np.uint32(1 << 31)  # a character that is a word by itself
_WITHOUT_SPACES = (
    (0x0E00, 0x0F00), (0x1000, 0x10A0), (0x1780, 0x1800),  # Thai and Lao, Burmese, Khmer
    (0x3040, 0x3100), (0x31F0, 0x3200),  # kana
    (0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, 0x40000),  # Han
)  # fmt: skip

Hashes = NDArray[np.uint64]


class Shingles(NamedTuple):
    """Those of some texts, or of a piece of one."""

    texts: slice
    hashes: Hashes
    """(n,), in order and not unique."""
    bounds: NDArray[np.int64]
    """Where those of each text begin, and the end, (texts + 1,)."""
    num_words: NDArray[np.int64]
    """Of each text, (texts,)."""


def of_texts(texts: list[str], num_words: int = NUM_WORDS) -> Iterator[Shingles]:
    """The shingles of texts of any length, many at once."""
    for group in _groups(texts):
        if sum(map(len, texts[group])) < PIECE:
            starts = np.cumsum([0, *(len(text) + 1 for text in texts[group])])
            words, bounds = _words("\n".join(texts[group]) + "\n", starts)
            yield Shingles(group, *_shingles(words, bounds, num_words), np.diff(bounds))
        else:
            yield from (Shingles(group, *found) for found in _of_pieces(texts[group.start], num_words))


def _groups(texts: list[str]) -> Iterator[slice]:
    """Consecutive texts of PIECE characters together, or a single longer one."""
    first = 0
    while first < len(texts):
        size, end = len(texts[first]) + 1, first + 1
        while end < len(texts) and size + len(texts[end]) < PIECE:
            size += len(texts[end]) + 1
            end += 1
        yield slice(first, end)
        first = end


def _of_pieces(text: str, num_words: int) -> Iterator[tuple[Hashes, NDArray[np.int64], NDArray[np.int64]]]:
    """The same of one text of any length, piece by piece; the words are those that a piece adds."""
    carried, begin = np.empty(0, np.uint64), 0
    while begin < len(text):
        end = begin + PIECE
        if end < len(text):  # between two words, if there is such a place
            end = max(text.rfind(" ", begin, end), text.rfind("\n", begin, end)) + 1 or end
        piece = text[begin:end]
        own, _ = _words(piece, np.zeros(1, np.int64))
        words = np.concatenate([carried, own])
        yield *_shingles(words, np.array([0, len(words)]), num_words), np.array([len(own)])
        carried, begin = words[-(num_words - 1) :], begin + len(piece)


def shingles_of(text: str, num_words: int = NUM_WORDS) -> Hashes:
    """The different shingles of a text, sorted: (n,)."""
    return np.unique(np.concatenate([found.hashes for found in of_texts([text], num_words)]))


def _words(text: str, starts: NDArray[np.int64]) -> tuple[Hashes, NDArray[np.int64]]:
    """The hashes of all words, and how many of them precede each place in `starts`."""
    kinds = _table()[np.frombuffer(text.encode("utf-32-le"), np.uint32)]
    is_word, is_own = kinds > 0, kinds >= _OWN
    begins = is_word.copy()
    begins[1:] &= ~is_word[:-1] | is_own[1:] | is_own[:-1]
    ends = is_word.copy()
    ends[:-1] &= ~is_word[1:] | begins[1:]
    first, last = np.flatnonzero(begins), np.flatnonzero(ends) + 1
    power, inverse = _powers()
    sums = np.zeros(len(kinds) + 1, np.uint64)
    np.cumsum((kinds + np.uint32(0x9E37)) * power[: len(kinds)], out=sums[1:])
    return finalize((sums[last] - sums[first]) * inverse[first]), np.searchsorted(first, starts)


def _shingles(words: Hashes, bounds: NDArray[np.int64], num_words: int) -> tuple[Hashes, NDArray[np.int64]]:
    """The shingles of each document, none of which reaches into the next, and where those of each begin."""
    ends = np.concatenate([[0], np.cumsum(np.maximum(np.diff(bounds) - num_words + 1, 0))])
    number = len(words) - num_words + 1
    if number <= 0:
        return np.empty(0, np.uint64), ends
    hashes = np.zeros(number, np.uint64)
    for index in range(num_words):
        hashes = hashes * np.uint64(_BASE) + words[index : index + number]
    inside = np.ones(number, np.bool_)
    for bound in bounds[1:-1]:
        inside[max(0, bound - num_words + 1) : bound] = False
    return finalize(hashes)[inside], ends


@cache
def _table() -> NDArray[np.uint32]:
    """For each code point its lower case, or 0 where it separates words."""
    table = np.zeros(0x110000, np.uint32)
    for code in range(0x20000):
        character = chr(code)
        if character.isalnum() or unicodedata.category(character)[0] == "M":
            lower = character.lower()
            table[code] = ord(lower) if len(lower) == 1 else code
    table[0x20000:0x40000] = np.arange(0x20000, 0x40000)  # planes of Han characters
    for first, end in _WITHOUT_SPACES:
        part = table[first:end]
        part[part > 0] |= _OWN
    return table


@cache
def _powers() -> tuple[Hashes, Hashes]:
    """The powers of the base and of its inverse, for as many characters as there are at once."""
    size = PIECE + 2

    def powers(base: int) -> Hashes:
        found = np.ones(size, np.uint64)
        found[1:] = base % 2**64
        return np.cumprod(found, dtype=np.uint64)

    return powers(_BASE), powers(pow(_BASE, -1, 2**64))
