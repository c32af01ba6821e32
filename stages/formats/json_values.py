"""All string values of valid JSON as an Arrow array: cut out of the bytes, without a Python object for any of them.

In valid JSON a quote that is not escaped begins or ends a string, and a string is a key exactly where a colon follows.
So the places of quotes and backslashes, and what follows each string, suffice, and NumPy finds these.
`extract` reads 150 MB/s in a process this way, a standard parser and a recursive generator 35 (docs/benchmarks.md).
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from stages.formats.limits import LIMITS

_QUOTE, _BACKSLASH, _COLON = b'"\\:'
_WHITE = np.isin(np.arange(256), list(b" \t\n\r"))
_SPACE = re.compile(rb"[ \t\n\r]*")
_ROUNDS = 32  # characters of white space that are skipped for all strings at once, the rest for each string

_strings = msgspec.json.Decoder(list[str])


@cache
def fill_array_cache() -> None:
    """Fill NumPy's cache of small arrays, once in a process, before its large arrays are allocated.

    NumPy keeps some freed arrays of each size below 1024 bytes. If they were allocated between large arrays, the memory
    that is freed around them could not be joined again, and memory would grow with the corpus: ten times the corpus
    needed 1.34 times the memory, and needs 1.06 times with this (`benchmarks.data --only memory`).
    """
    for size in range(1024):
        _ = [np.empty(size, np.uint8) for _ in range(8)]


def strings(documents: Sequence[bytes], window: int = LIMITS.chunk) -> Iterator[pa.StringArray]:
    """The string values of some JSON documents, in order, without empty ones and without keys, in pieces.

    Memory, beside the documents, is that of a window and of the longest string.

    Args:
        documents: Valid JSON in UTF-8, without halves of surrogate pairs; less than 2 GiB together.
        window: Bytes that are cut at once; of two windows, NumPy's arrays no longer fit into the processor's cache.
    """
    # Joined, because each call of NumPy costs microseconds: many small documents are cut at the price of one. The zero
    # is there so that something follows the last string.
    data = b"\n".join([*documents, b"0"])
    characters = np.frombuffer(data, np.uint8)
    for quotes, backslashes in _windows(characters, window):
        begin, end = _values(data, characters, quotes)
        values = _take(data, begin, end)
        if len(backslashes):
            values = _unescape(values, data, begin, end, backslashes)
        if len(values):
            yield values


def has_string(document: bytes) -> bool:
    """Whether valid JSON has a string that is no key; of an empty one it may say so, too."""
    # Keys have a colon each: with more strings than colons, as nearly always, nothing has to be cut.
    return document.count(b'"') - document.count(b'\\"') > 2 * document.count(b":") or any(strings([document]))


def has_longer(document: bytes, size: int, window: int = LIMITS.chunk) -> bool:
    """Whether valid JSON has a string, perhaps a key, of more than `size` bytes before its escapes are replaced."""
    windows = _windows(np.frombuffer(document, np.uint8), window)
    return any(np.any(quotes[1::2] - quotes[0::2] > size + 1) for quotes, _ in windows)


def _windows(characters: NDArray[np.uint8], size: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For each window of `size` bytes, the places of the quotes around the strings that end in it, and of backslashes.

    The int64 arrays of places need eight times the memory of what they are found in, or more, hence the windows.
    Of the backslashes, those are missing that are neither in this window nor the first one of their string.
    """
    no_place = np.empty(0, np.int64)
    open_quote = first_backslash = no_place  # of a string that does not end in its window: at most one place each
    is_escaped = False  # the first byte of a window, by the last one of the window before
    for start in range(0, len(characters), size):
        piece = characters[start : start + size]
        quotes = np.flatnonzero(piece == _QUOTE) + start
        backslashes = np.flatnonzero(piece == _BACKSLASH) + start
        if is_escaped:
            quotes, backslashes = quotes[quotes > start], backslashes[backslashes > start]
            is_escaped = False
        if len(backslashes):  # in most documents there is none: every quote begins or ends a string
            followers = _followers(backslashes)
            is_escaped = len(followers) > 0 and followers[-1] == start + size
            followers = followers[followers < start + len(piece)]
            quotes = np.delete(quotes, np.searchsorted(quotes, followers[characters[followers] == _QUOTE]))
        quotes = np.concatenate((open_quote, quotes))
        backslashes = np.concatenate((first_backslash, backslashes))
        num_complete = len(quotes) // 2 * 2
        open_quote = quotes[num_complete:]
        first_backslash = (
            backslashes[np.searchsorted(backslashes, open_quote[0]) :][:1] if len(open_quote) else no_place
        )
        yield quotes[:num_complete], backslashes


def _followers(backslashes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places that are escaped: an odd number of backslashes in a row escapes what follows them."""
    is_last = np.append(np.diff(backslashes) != 1, True)
    last = np.flatnonzero(is_last)
    is_odd = np.diff(last, prepend=-1) % 2 == 1  # the length of each run of backslashes
    followers: NDArray[np.int64] = backslashes[last[is_odd]] + 1
    return followers


def _unescape(
    values: pa.StringArray,
    data: bytes,
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    backslashes: NDArray[np.int64],
) -> pa.StringArray:
    """The values without escapes."""
    # Backslashes occur only in strings. Which of these are values?
    index = np.searchsorted(end, backslashes)  # of the string that contains it, or else of the next one
    index, backslashes = index[index < len(end)], backslashes[: np.count_nonzero(index < len(end))]
    escaped = np.unique(index[begin[index] <= backslashes])
    # Only strings with escapes become Python objects, with their quotes, in one call of the parser.
    view = memoryview(data)
    raw = [
        piece
        for first, last in zip(begin[escaped], end[escaped], strict=True)
        for piece in (b",", view[first - 1 : last + 1])
    ]
    decoded = _strings.decode(b"".join([b"[", *raw[1:], b"]"]))
    mask = np.zeros(len(values), np.bool_)
    mask[escaped] = True
    return pc.replace_with_mask(values, mask, pa.array(decoded, pa.string()))


def _values(
    data: bytes, characters: NDArray[np.uint8], quotes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the strings that are neither keys nor empty begin and end, without their quotes."""
    begin, end = quotes[0::2] + 1, quotes[1::2]  # (strings,), in bytes
    place = end + 1
    follower = characters[place]
    waiting = np.flatnonzero(_WHITE[follower])
    for _ in range(_ROUNDS):
        if not len(waiting):
            break
        place[waiting] += 1
        follower[waiting] = characters[place[waiting]]
        waiting = waiting[_WHITE[follower[waiting]]]
    for index in waiting:  # rare: a regular expression skips any number of spaces at once
        space = _SPACE.match(data, place[index])
        assert space
        follower[index] = data[space.end()]
    is_value = np.flatnonzero((follower != _COLON) & (end > begin))
    return begin[is_value], end[is_value]


def _take(data: bytes, begin: NDArray[np.int64], end: NDArray[np.int64]) -> pa.StringArray:
    """The slices of `data` as an array: every other one of the slices that begin where the one before ends."""
    # An Arrow array has no gaps: each string begins where the one before ends. So what is between two strings is an
    # element, too, at an odd place, and `take` copies those at even places. int32: the offsets of Arrow's `string`.
    offsets = np.empty(2 * len(begin), np.int32)
    offsets[0::2], offsets[1::2] = begin, end
    slices = pa.StringArray.from_buffers(max(0, len(offsets) - 1), pa.py_buffer(offsets), pa.py_buffer(data))
    return slices.take(pa.array(np.arange(0, len(slices), 2)))
