"""All string values of valid JSON as an Arrow array: cut out of the bytes, without a Python object for any of them.

In valid JSON a quote that is not escaped begins or ends a string, and a string is a key exactly where a colon follows.
So the places of quotes, backslashes and what comes after a string tell everything, and NumPy finds these.
"""

import re
from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_QUOTE, _BACKSLASH, _COLON = b'"\\:'
_WHITE = np.isin(np.arange(256), list(b" \t\n\r"))
_SPACE = re.compile(rb"[ \t\n\r]*")
_ROUNDS = 32  # characters of white space that are passed in step, for all strings together

_strings = msgspec.json.Decoder(list[str])

# NumPy keeps some freed arrays of each size below 1024 bytes. Kept one by one, they would come to lie between large
# arrays, where what is freed around them cannot be joined: memory would grow with the corpus. So they come first.
for _size in range(1024):
    _ = [np.empty(_size, np.uint8) for _ in range(8)]


def strings(documents: Sequence[bytes]) -> pa.StringArray:
    """The string values of some JSON documents, in order, without empty ones and without keys.

    Args:
        documents: Valid JSON in UTF-8, without halves of surrogate pairs; less than 2 GiB together.
    """
    data = b"\n".join([*documents, b"0"])  # so that something follows the last string
    characters = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(characters == _QUOTE)
    if b"\\" not in data:
        begin, end = _values(data, characters, quotes)
        return _take(data, begin, end)
    backslashes = np.flatnonzero(characters == _BACKSLASH)
    begin, end = _values(data, characters, _without_escaped(characters, quotes, backslashes))
    values = _take(data, begin, end)
    # Backslashes stand in strings alone: which are values with an escape?
    index = np.searchsorted(end, backslashes)  # of the string that it stands in, or that comes next
    index, backslashes = index[index < len(end)], backslashes[: np.count_nonzero(index < len(end))]
    escaped = np.unique(index[begin[index] <= backslashes])
    raw = b",".join([data[first - 1 : last + 1] for first, last in zip(begin[escaped], end[escaped], strict=True)])
    mask = np.zeros(len(values), np.bool_)
    mask[escaped] = True
    return pc.replace_with_mask(values, mask, pa.array(_strings.decode(b"[" + raw + b"]"), pa.string()))


def _without_escaped(
    characters: NDArray[np.uint8], quotes: NDArray[np.int64], backslashes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The quotes that begin or end a string: an odd number of backslashes in a row escapes what follows them."""
    is_last = np.append(np.diff(backslashes) != 1, True)
    last = np.flatnonzero(is_last)
    is_odd = np.diff(last, prepend=-1) % 2 == 1
    followers = backslashes[last[is_odd]] + 1
    return np.delete(quotes, np.searchsorted(quotes, followers[characters[followers] == _QUOTE]))


def _values(
    data: bytes, characters: NDArray[np.uint8], quotes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the strings that are neither keys nor empty begin and end, without their quotes."""
    begin, end = quotes[0::2] + 1, quotes[1::2]
    place = end + 1
    follower = characters[place]
    waiting = np.flatnonzero(_WHITE[follower])
    for _ in range(_ROUNDS):
        if not len(waiting):
            break
        place[waiting] += 1
        follower[waiting] = characters[place[waiting]]
        waiting = waiting[_WHITE[follower[waiting]]]
    for index in waiting:
        space = _SPACE.match(data, place[index])
        assert space
        follower[index] = data[space.end()]
    is_value = np.flatnonzero((follower != _COLON) & (end > begin))
    return begin[is_value], end[is_value]


def _take(data: bytes, begin: NDArray[np.int64], end: NDArray[np.int64]) -> pa.StringArray:
    """The slices of `data` as an array: every other one of the slices that begin where the one before ends."""
    offsets = np.empty(2 * len(begin), np.int32)
    offsets[0::2], offsets[1::2] = begin, end
    slices = pa.StringArray.from_buffers(max(0, len(offsets) - 1), pa.py_buffer(offsets), pa.py_buffer(data))
    return slices.take(pa.array(np.arange(0, len(slices), 2)))
