"""Encoding one very long string with the memory of a window.

The string is encoded in overlapping windows. Near the ends of a window tokens may be others than in the whole string:
a word is cut, or a normalizer puts something before the first one. What decides a token lies near it, though. So two
neighbours are joined where both, one with all that comes before and one with all that comes after, give the same tokens
at the same characters in the whole middle half of what they share; a token must depend on nothing farther away than a
quarter of that.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer


class NotJoined(Exception):
    """Two windows have other tokens where they overlap: they must share more."""


def encode(tokenizer: Tokenizer, text: bytes | memoryview, size: int, overlap: int) -> Iterator[NDArray[np.int64]]:
    """Yield the ids of a string's tokens, (n,), window by window.

    Args:
        tokenizer: Its special tokens are not added.
        text: UTF-8.
        size: Bytes of a window, at least four overlaps.
        overlap: Bytes that neighbours share.

    Raises:
        NotJoined: perhaps after some ids.
    """
    windows = _windows(tokenizer, text, size, overlap)
    left, _, end = next(windows)
    for right, begin, next_end in windows:
        quarter = (end - begin) // 4
        first, second = (_inside(tokens, begin + quarter, end - quarter) for tokens in (left, right))
        if not np.array_equal(left[first], right[second]) or first.stop == 0:
            raise NotJoined
        middle = (first.stop - first.start) // 2
        yield left[: first.start + middle, 0]
        left, end = right[second.start + middle :], next_end
    yield left[:, 0]


def _windows(
    tokenizer: Tokenizer, text: bytes | memoryview, size: int, overlap: int
) -> Iterator[tuple[NDArray[np.int64], int, int]]:
    """Yield each window's tokens, (n, 3): id, first and last character; and where it begins and ends, in characters."""
    start = begin = 0
    while True:
        stop = _border(text, start + size)
        string = str(text[start:stop], "utf-8")
        encoding = tokenizer.encode(string, add_special_tokens=False)
        # Offsets are those in the string itself, whatever a normalizer made of it.
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) + begin
        yield np.column_stack([np.array(encoding.ids, np.int64), offsets]), begin, begin + len(string)
        if stop == len(text):
            return
        next_start = _border(text, stop - overlap)
        begin += len(str(text[start:next_start], "utf-8"))
        start = next_start


def _border(text: bytes | memoryview, index: int) -> int:
    """The last place up to `index` where a character begins, or the end."""
    if index >= len(text):
        return len(text)
    while text[index] & 0xC0 == 0x80:
        index -= 1
    return index


def _inside(tokens: NDArray[np.int64], low: int, high: int) -> slice:
    """Which tokens lie between two characters."""
    [indices] = np.nonzero((tokens[:, 1] >= low) & (tokens[:, 2] <= high))
    return slice(int(indices[0]), int(indices[-1]) + 1) if len(indices) else slice(0, 0)
