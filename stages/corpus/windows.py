"""Encoding one very long string with the memory of a window.

The string is encoded in overlapping windows. Near the ends of a window tokens may be others than in the whole string:
a word is cut, or a normalizer puts something before the first one. So two neighbours are joined only where both, one
with all that comes before and one with all that comes after, give the same tokens at the same characters in the whole
middle half of what they share.

They are joined between two words, as words are encoded one by one. Byte-pair encoding may be joined within a word too:
it merges from the left, and what follows a token changes it only from near by. The best path of a Unigram model may
turn on how many characters a long run of the same one has.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models


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
        places = np.flatnonzero(left[first, 3])
        if not len(places) and isinstance(tokenizer.model, models.BPE):
            places = np.arange(first.stop - first.start)
        if not len(places) or not np.array_equal(left[first], right[second]):
            raise NotJoined
        place = places[len(places) // 2]
        yield left[: first.start + place, 0]
        left, end = right[second.start + place :], next_end
    yield left[:, 0]


def _windows(
    tokenizer: Tokenizer, text: bytes | memoryview, size: int, overlap: int
) -> Iterator[tuple[NDArray[np.int64], int, int]]:
    """Yield each window's tokens and where it begins and ends, in characters.

    A token is a row of four: its id, where it begins and ends, and whether a word begins with it.
    """
    start = begin = 0
    while True:
        stop = _border(text, start + size)
        string = str(text[start:stop], "utf-8")
        encoding = tokenizer.encode(string, add_special_tokens=False)
        # Offsets are those in the string itself, whatever a normalizer made of it.
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) + begin
        begins_word = np.diff(np.array(encoding.word_ids, np.int64), prepend=-1) != 0
        yield np.column_stack([np.array(encoding.ids, np.int64), offsets, begins_word]), begin, begin + len(string)
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
