"""Encoding one very long string with the memory of a window instead of a hundred times its length.

The string is encoded in overlapping windows. Near the ends of a window the tokens may differ from those of the entire
string: a word is cut, or a normalizer inserts something before the first one. So what two neighbours share is encoded
alone, too:

    left   ---------------------------|
    shared             |------- X ----|
    right              |------- X --------------------|

It ends where the left one ends, so tokens that are equal from there backwards are at the same characters, and it begins
where the right one begins. Where both agree with it (at X) they are joined: the left one has seen all that precedes,
the right one what follows.

They are joined between words, as words are encoded independently: what they share begins at a space. Byte-pair encoding
may be joined within a word too: it merges from the left, and what follows a token changes it only from near by. The
best path of a Unigram model may depend on the number of characters in a long run of the same one.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SPACE = re.compile(rb"(?<=\S) ")


class NotJoined(Exception):
    """Two windows have different tokens where they overlap: they must be larger."""


def encode(
    encode: Callable[[Sequence[str]], Sequence[NDArray[Any]]],
    text: memoryview,
    size: int,
    may_divide_words: bool,
) -> Iterator[NDArray[Any]]:
    """Yield the ids of a string's tokens, (n,), window by window.

    Args:
        encode: Gives the ids of each string's tokens, (n,).
        text: UTF-8.
        size: Bytes of a window, of which neighbours share an eighth, or a little less.
        may_divide_words: Whether windows may be joined within a word.

    Raises:
        NotJoined: possibly after some ids, which are then of no use.
    """
    stop = border(text, size)
    [left] = encode([str(text[:stop], "utf-8")])
    while stop < len(text):
        start = border(text, stop - size // 8)
        if space := _SPACE.search(text[start : stop - size // 16]):
            start += space.start()
        elif not may_divide_words:
            raise NotJoined
        end = border(text, start + size)
        shared, right = encode([str(text[start:stop], "utf-8"), str(text[start:end], "utf-8")])
        first, last = len(shared) - _num_equal(left[::-1], shared[::-1]), _num_equal(right, shared)
        if last - first < len(shared) / 2:
            raise NotJoined
        place = (first + last) // 2  # in what is shared, as far as possible from where one of them differs
        yield left[: len(left) - len(shared) + place]
        left, stop = right[place:], end
    yield left


def _num_equal(one: NDArray[Any], other: NDArray[Any]) -> int:
    """How many ids are equal from the beginning."""
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size


def border(text: bytes | memoryview, index: int) -> int:
    """The last byte up to `index` that begins a character, or the end."""
    if index >= len(text):
        return len(text)
    while text[index] & 0xC0 == 0x80:  # UTF-8: 10xxxxxx continues a character
        index -= 1
    return index
