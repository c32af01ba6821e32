"""Encoding one very long string with the memory of a window instead of a hundred times its length.

With `encode` the string is encoded in overlapping windows. Near the ends of a window the tokens may differ from those
of the entire string: a word is cut, or a normalizer inserts something before the first one.

                    <------- overlap -------->
    left   ---------|-------|---- X ----|-------|
    right           |-------|---- X ----|-------|---------
                     quarter middle half quarter

So two neighbours are joined (at X) only where both, one with all that precedes and one with all that follows, have the
same tokens at the same characters in the middle half of their overlap.

They are joined between two words, as words are encoded independently. Byte-pair encoding may be joined within a word
too: it merges from the left, and what follows a token changes it only from near by. The best path of a Unigram model
may depend on the number of characters in a long run of the same one.

`cuts` is for a tokenizer that does not give the characters of its tokens, if it has no need of what precedes a word:
the string is cut between two words, where the tokens on both sides are seen not to depend on the other side.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

_END_OF_WORD = re.compile(rb"[^\s](?=\s)")
_CANDIDATES = 4
"""Ends of words at which a string may be cut, for each window."""


class NotJoined(Exception):
    """Two windows have different tokens where they overlap: the overlap must be larger."""


def encode(tokenizer: Tokenizer, text: bytes | memoryview, size: int, overlap: int) -> Iterator[NDArray[np.int64]]:
    """Yield the ids of a string's tokens, (n,), window by window.

    Args:
        tokenizer: Its special tokens are not added.
        text: UTF-8.
        size: Bytes of a window, at least four overlaps.
        overlap: Bytes that neighbours share.

    Raises:
        NotJoined: possibly after some ids, which are then of no use.
    """
    windows = _windows(tokenizer, text, size, overlap)
    left, _, end = next(windows)  # (tokens, 4)
    for right, begin, next_end in windows:
        quarter = (end - begin) // 4  # of the overlap, in characters
        first, second = (_inside(tokens, begin + quarter, end - quarter) for tokens in (left, right))
        places = np.flatnonzero(left[first, 3])  # where a word begins
        if not len(places) and isinstance(tokenizer.model, models.BPE):
            places = np.arange(first.stop - first.start)  # between any two tokens (see above)
        # Ids, characters and beginnings of words must all be equal: equal ids alone may be shifted by a repetition.
        if not len(places) or not np.array_equal(left[first], right[second]):
            raise NotJoined
        place = places[len(places) // 2]  # as far from both ends as possible
        yield left[: first.start + place, 0]
        left, end = right[second.start + place :], next_end
    yield left[:, 0]


def cuts(
    encode: Callable[[Sequence[str]], Sequence[NDArray[Any]]], text: bytes | memoryview, size: int, context: int
) -> Iterator[tuple[int, int]]:
    """Yield where the parts of a string begin and end, in bytes, that have the tokens of the string, one after another.

    Args:
        encode: Gives the ids of each string's tokens, (n,).
        text: UTF-8.
        size: Bytes of a part, at most.
        context: Bytes on each side of a cut from which the tokens beside it are computed.

    Raises:
        NotJoined: possibly after some parts, which are then of no use.
    """
    start = 0
    while start + size < len(text):
        stop = _cut(encode, text, start, start + size, context)
        yield start, stop
        start = stop
    yield start, len(text)


def _cut(
    encode: Callable[[Sequence[str]], Sequence[NDArray[Any]]],
    text: bytes | memoryview,
    start: int,
    end: int,
    context: int,
) -> int:
    """A place between two words, at most `context` bytes before `end`; another one is at `start`."""
    ends = [end - context + match.end() for match in _END_OF_WORD.finditer(text[end - context : end])]
    for place in ends[: -_CANDIDATES - 1 : -1]:
        stop = border(text, place + context)
        # From the start: how a repetition is divided depends on where it begins. The right side also with less of what
        # is far away from the cut.
        spans = [(start, stop), (start, place), (place, stop), (place, border(text, place + context // 2))]
        both, left, right, near_right = encode([str(text[slice(*span)], "utf-8") for span in spans])
        num_right = len(near_right) // 2
        if np.array_equal(both, np.concatenate([left, right])) and np.array_equal(
            right[:num_right], near_right[:num_right]
        ):
            return place
    raise NotJoined


def _windows(
    tokenizer: Tokenizer, text: bytes | memoryview, size: int, overlap: int
) -> Iterator[tuple[NDArray[np.int64], int, int]]:
    """Yield each window's tokens, (n, 4) int64, and where the window begins and ends, in characters.

    The columns are a token's id, the characters where it begins and ends, and whether a word begins with it.
    """
    start = begin = 0
    while True:
        stop = border(text, start + size)
        string = str(text[start:stop], "utf-8")  # a copy of the window only: `text` is a view of Arrow's buffer
        encoding = tokenizer.encode(string, add_special_tokens=False)
        # Offsets refer to the string itself, not to what a normalizer made of it.
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) + begin
        begins_word = np.diff(np.array(encoding.word_ids, np.int64), prepend=-1) != 0
        yield np.column_stack([np.array(encoding.ids, np.int64), offsets, begins_word]), begin, begin + len(string)
        if stop == len(text):
            return
        next_start = border(text, stop - overlap)
        begin += len(str(text[start:next_start], "utf-8"))
        start = next_start


def border(text: bytes | memoryview, index: int) -> int:
    """The last byte up to `index` that begins a character, or the end."""
    if index >= len(text):
        return len(text)
    while text[index] & 0xC0 == 0x80:  # UTF-8: 10xxxxxx continues a character
        index -= 1
    return index


def _inside(tokens: NDArray[np.int64], low: int, high: int) -> slice:
    """Which tokens are between two characters."""
    [indices] = np.nonzero((tokens[:, 1] >= low) & (tokens[:, 2] <= high))
    return slice(int(indices[0]), int(indices[-1]) + 1) if len(indices) else slice(0, 0)
