"""The content of a raw file or a part of one, decompressed and as UTF-8, read once.

Whether it is unchanged, complete and decodable is known at its end only, after rows were made of it: whoever makes them
drops them again after `Unreadable`, and everything after `Changed`.
"""

import codecs
import gzip
import hashlib
import io
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from stages.formats.limits import LIMITS, Limits
from stages.splits import tables, tree
from stages.splits.manifests import Part

# UTF-32 first: its little-endian mark begins with that of UTF-16. Decoders of these names drop the mark.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Encodings in which, of four bytes in a row, most are below 9 at some places, and hardly any are at others.
_LAYOUTS = (
    ("UTF-16LE", (1, 3), (0, 2)),
    ("UTF-16BE", (0, 2), (1, 3)),
    ("UTF-32LE", (2, 3), (0,)),
    ("UTF-32BE", (0, 1), (3,)),
)
UTF_8 = "utf-8"
"""The usual encoding, whose bytes are already what readers get."""
_CHUNK = 1 << 20  # bytes that are read at once to verify the rest of a file
_BEGIN = 1 << 16  # bytes, at least, of `begin`
_MORE = 1 << 12  # bytes by which a file may have grown while it is read


class Rejected(Exception):
    """Something that cannot be read: a file, or one record in it."""

    def __init__(self, reason: str, detail: str, position: str | None = None) -> None:
        super().__init__(reason, detail, position)
        self.reason = reason
        """One of a few, by which rejections are counted."""
        self.detail = detail
        self.position = position
        """Where in the file, such as `line 3`; None: the entire file."""


class Changed(Exception):
    """The file is not the one that was organized."""


class Unreadable(Exception):
    """The file cannot be decompressed or decoded up to its end, whatever of it was read."""

    def __init__(self, reason: str, detail: str, is_encoding: bool = False) -> None:
        super().__init__(reason, detail, is_encoding)
        self.reason, self.detail = reason, detail
        """As of `Rejected`."""
        self.is_encoding = is_encoding
        """Whether another encoding may fit."""


class RawContent:
    """One raw file, or a part of it. Used with `with`, at the end of which all of it was read.

    There it raises, in place of any other error, `Changed` if these are not the bytes that were organized, or else
    `Unreadable` if they cannot all be decompressed and decoded.
    """

    def __init__(
        self,
        path: str | Path,
        compression: str,
        digest: str,
        encoding: str = UTF_8,
        limits: Limits = LIMITS,
        part: Part | None = None,
    ) -> None:
        """Read the beginning.

        Args:
            path: The raw file.
            compression: `.gz`, `.zst` or nothing.
            digest: SHA-256 of the bytes as they are stored, of the part if there is one.
            encoding: Of content that does not begin with a byte order mark.
            limits: Also those of its reader.
            part: What to read of a file that is not compressed; None: all of it.

        Raises:
            Changed: the digest differs, or the file is gone.
            Unreadable: the compressed data is damaged, or the content looks like another encoding.
        """
        self.limits = limits
        self.first_line = part.line if part else 1
        """The number in the file of the first line that is read."""
        self._path, self._compression, self._digest, self._part = path, compression, digest, part
        self._stored: list[_Stored] = []  # more than one if a reader starts again
        self._readers: list[Iterator[bytes]] = []
        self._chunks: Iterator[bytes] | None = self._open()
        try:
            head = [next(self._chunks, b"")]
            while sum(map(len, head)) < _BEGIN and (chunk := next(self._chunks, b"")):
                head.append(chunk)
            self.begin = b"".join(head)
            """Some bytes that the file, or the part, begins with, in its own encoding."""
            start = part.start if part else 0  # perhaps inside of a character
            # A mark inside a file is a character like others. Parts, which are UTF-8, begin with no other mark.
            marks = () if start else _BYTE_ORDER_MARKS
            marked = next((name for mark, name in marks if self.begin.startswith(mark)), None)
            self._encoding = marked or encoding
            # Single-byte encodings accept NULs, too.
            if not marked and (guess := _unmarked(self.begin[:_BEGIN], start)):
                remedy = f"convert it with `iconv -f {guess} -t UTF-8`"
                raise Unreadable("unknown encoding", f"looks like {guess} without a byte order mark: {remedy}")
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        self._chunks = chain(head, self._chunks)

    def __enter__(self) -> "RawContent":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with ExitStack() as opened:
            for stored in self._stored:
                opened.enter_context(stored)
            if may_be_changed(error):
                try:
                    for _ in chain(*self._readers):
                        pass
                finally:  # first of all, did the file change?
                    for stored in self._stored:
                        stored.verify(self._digest)

    def stream(self) -> BinaryIO:
        """The content as UTF-8, without byte order mark, to be read in chunks; each call begins at its beginning."""
        chunks, self._chunks = self._chunks or self._open(), None
        reader = _decoded(chunks, self._encoding)
        self._readers.append(reader)
        return io.BufferedReader(Chunks(reader), self.limits.chunk)

    def _open(self) -> Iterator[bytes]:
        stored = _Stored(open_raw(self._path), self._part)
        self._stored.append(stored)
        return _decompressed(stored, self._compression, self.limits.chunk)


def _decoded(chunks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """The content as UTF-8, without byte order mark."""
    decoder = codecs.getincrementaldecoder(encoding)()
    size = 0
    try:
        for chunk in chunks:
            size += len(chunk)
            text = decoder.decode(chunk)
            yield chunk if encoding == UTF_8 else text.encode()
        yield decoder.decode(b"", final=True).encode()
    except UnicodeDecodeError as error:
        # The error counts from the first byte that the decoder had: those left of the chunk before come first.
        place = max(0, size - len(error.object)) + error.start
        detail = f"{encoding}: {error.reason} at byte {place}"
        # With a mark there is no other: cp1252 and latin-1 accept nearly any bytes.
        raise Unreadable("unknown encoding", detail, is_encoding=encoding == UTF_8) from None


def _unmarked(head: bytes, start: int) -> str | None:
    """The encoding that is not UTF-8, although the content may be valid as such, by its control characters.

    In UTF-16, the first or second byte of every letter of the Latin, Greek, Cyrillic, Hebrew and Arabic scripts is
    below 9, as are NUL and seven control characters that occur in hardly any text.

    Args:
        head: What the content begins with.
        start: Its place in the file.
    """
    places = start + np.flatnonzero(np.frombuffer(head, np.uint8) < 9)  # without tabs and line ends
    num_controls = np.bincount(places % 4, minlength=4).tolist()
    for name, most, hardly_any in _LAYOUTS:
        # Half of the bytes are at the places `most`. More than half of them, and few others.
        inside, outside = (sum(num_controls[place] for place in each) for each in (most, hardly_any))
        if inside > max(1, len(head) / 4) and outside < len(head) / 8:
            return name
    return None


class _Stored:
    """The stored bytes of a file, or of a part of one, which are hashed while they are read, and closed by `with`."""

    closed = False

    def __init__(self, descriptor: int, part: Part | None) -> None:
        self.position = 0
        """Bytes that were read."""
        self._file, self._hash = descriptor, hashlib.sha256()
        start, end, _ = part or Part(0, None, 1)
        self._left = sys.maxsize if end is None else end - start
        self._expected = os.fstat(descriptor).st_size - start
        os.lseek(descriptor, start, os.SEEK_SET)

    def __enter__(self) -> "_Stored":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def close(self) -> None:
        """Called when pyarrow has decompressed all that it was asked for: perhaps not all is verified yet."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end.

        Raises:
            Changed: the file has grown. One to which another process appends would have no end.
        """
        # Not a mebibyte for a small file: all that is asked for is allocated, which takes longer than reading.
        size = min(size, self._left, max(self._expected - self.position, 1) + _MORE)
        chunk = os.read(self._file, size)
        self._hash.update(chunk)
        self._left -= len(chunk)
        self.position += len(chunk)
        if 0 < self._expected < self.position:  # some file systems give 0 for the size of any file
            raise Changed
        return chunk

    def verify(self, digest: str) -> None:
        """Read what is left, and raise Changed if all bytes together have another digest."""
        while self.read(_CHUNK):
            pass
        if self._hash.hexdigest() != digest:
            raise Changed


def may_be_changed(error: BaseException | None) -> bool:
    """Whether a change of the file may be the reason for what a reader raised, so that the rest must be hashed."""
    # After Ctrl-C or on a full disk that might take minutes.
    return error is None or (isinstance(error, Exception) and not isinstance(error, (OSError, MemoryError)))


def is_unchanged(path: Path, digest: str, part: Part | None) -> bool:
    """Whether a raw file, or a part of one, can be read and has the SHA-256 that it was organized with."""
    try:
        descriptor = open_raw(path)
        is_table = tables.is_table(path.name)
        with _Stored(descriptor, None if is_table else part) as stored:
            if is_table:
                verify_table(os.fspath(path), digest, state(descriptor))
            else:
                stored.verify(digest)
    except (Changed, OSError):
        return False
    return True


def state(descriptor: int) -> tuple[int, ...]:
    """What becomes another one with the content of a file."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=1 << 12)  # a process reads many parts of a table, and hashes it once
def verify_table(path: str, digest: str, expected: tuple[int, ...]) -> None:
    """Raise Changed if a file is not in a state, or has another SHA-256 than it was organized with."""
    descriptor = open_raw(path)
    with _Stored(descriptor, None) as stored:
        if state(descriptor) != expected:
            raise Changed
        stored.verify(digest)


def open_raw(path: str | Path) -> int:
    """Raises Changed if there is no regular file, as there was when it was organized."""
    try:
        return tree.open_regular(path)
    except OSError:
        if os.path.isfile(path):
            raise  # a missing permission, too many open files
        raise Changed from None


class Chunks(io.RawIOBase):
    """The concatenation of byte strings, as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)  # sliced below without copying
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _decompressed(stored: _Stored, compression: str, size: int) -> Iterator[bytes]:
    """The content in chunks of at least `size` bytes, or less at its end.

    Raises:
        Unreadable: it is damaged.
    """
    content: Any = stored
    if compression == ".gz":  # continues with the next member, and passes over zeros at the end, which pyarrow refuses
        content = gzip.GzipFile(fileobj=stored, mode="rb")  # type: ignore[call-overload]
    elif compression == ".zst":
        content = pa.CompressedInputStream(pa.PythonFile(stored, "r"), "zstd")
    try:
        while chunk := content.read(size):
            yield chunk
        if compression and not stored.position:  # without even a header, which compressed emptiness has
            raise EOFError("the file is empty")
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk: damage has no number
            raise
        if "requires too much memory" in str(error):
            remedy = "recompress it: `zstd -dc --long=31 FILE | zstd -o NEW`"
            detail = f"it was written by `zstd --long`, with more than 128 MiB: {remedy}"
            raise Unreadable("window too large", detail) from None
        raise Unreadable("damaged compression", str(error)) from None
