"""Seconds that work takes one process, estimated from sizes: whether it is worth starting processes for.

An error of the estimate costs time and changes no result: JSON with NaN, which the fast parser refuses, takes about 25
times as long, and so does what is compressed very well. Measuring, reading without `keep_source` and encoding were
measured on one core of a Xeon, with corpora of 3 to 97 MB, and rounded to 1, 2 or 5: of 10 000 text files each took 42
microseconds to measure and 58 to read; a byte of JSON Lines took 19 ns, of YAML 130 ns, of text to be encoded 500 ns,
with the fast tokenizer 20 ns. The others are derived from these or assumed.
"""

from collections.abc import Iterable

from stages.corpus.formats import suffixes
from stages.corpus.splits import RawFile

_PER_BYTE = {"text": 5e-9, "json": 2e-8, "jsonl": 2e-8, "yaml": 1e-7}
"""To read a raw file."""
_PER_BYTE_WITH_SOURCE = {"json": 1e-6, "jsonl": 1e-6}
_COMPRESSION = 5
"""Bytes of text in a byte of .gz or .zst."""


def of_measuring(num_files: int, num_bytes: int) -> float:
    """To compute the SHA-256 of raw files."""
    return num_files * 5e-5 + num_bytes * 5e-9


def of_reading(files: Iterable[RawFile], keep_source: bool) -> float:
    """To extract the text of raw files, or of parts of them."""
    per_byte = _PER_BYTE | _PER_BYTE_WITH_SOURCE if keep_source else _PER_BYTE
    seconds = 0.0
    for file in files:
        found = suffixes.find(file.path)
        assert found, "organize lists no other files"
        format, compression = found
        seconds += 5e-5 + file.size * per_byte.get(format, 1e-7) * (_COMPRESSION if compression else 1)
    return seconds


def of_fetching(num_bytes: int) -> float:
    """To verify results of an earlier run."""
    return num_bytes * 2e-9


def of_comparing(num_strings: int, num_bytes: int) -> float:
    """To compute the digests of strings, or to drop some of them."""
    return num_strings * 2e-6 + num_bytes * 2e-9


def of_encoding(num_bytes: int, is_fast: bool) -> float:
    """To encode text as tokens, with the fast tokenizer or with the model's own."""
    return num_bytes * (2e-8 if is_fast else 5e-7)
