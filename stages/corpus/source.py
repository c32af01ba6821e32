"""The content of a raw file or a part of one, decompressed and as UTF-8, after its digest and encoding were checked.

A parser never starts on a file that turns out to be truncated, changed or undecodable at its end, so such a file leaves
no row. The price is a second pass over a large file; one of up to 64 MiB is kept in memory after the first.
"""

import codecs
import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from stages.corpus.limits import LIMITS, Limits
from stages.corpus.splits import Part

# UTF-32 first: its little-endian mark begins with that of UTF-16. Decoders of these names drop the mark.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


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


class Source:
    """One raw file, or a part of it. No parser reads any of it before all of it was found complete and decodable."""

    def __init__(
        self,
        path: Path,
        compression: str,
        digest: str,
        fallback_encoding: str | None,
        limits: Limits = LIMITS,
        part: Part | None = None,
    ) -> None:
        """Read the file once, and a large one a second time.

        Args:
            path: The raw file.
            compression: `.gz`, `.zst` or nothing.
            digest: SHA-256 of the bytes as they are stored, of the part if there is one.
            fallback_encoding: For content that is neither UTF-8 nor begins with a byte order mark.
            limits: Also those of the reader of this source.
            part: What to read of a file that is not compressed; None: all of it.

        Raises:
            Changed: the digest differs, or the file is gone.
            Rejected: the compressed data is damaged, or the content is in none of these encodings.
        """
        self.limits = limits
        self.first_line = part.line if part else 1
        """The number in the file of the first line that is read."""
        self.on_read: Callable[[int], None] = lambda position: None
        """Called with the number of stored bytes that readers of a large file have been given."""
        self._path, self._compression, self._part = path, compression, part
        self.size = 0
        """Bytes after decompression, in the file's own encoding."""
        content = self._check(digest)
        self._encoding = self._find_encoding(content, fallback_encoding)
        self.used_fallback = self._encoding == fallback_encoding != "utf-8"  # counted: it may decode wrongly
        # UTF-8, the usual case, is neither decoded nor copied: its bytes are already what readers get.
        if content is not None and self._encoding != "utf-8":
            content = content.decode(self._encoding).encode()
        self.data = content
        """The content as UTF-8, without byte order mark; None: it is large, use `stream`."""

    def stream(self) -> BinaryIO:
        """The content as UTF-8, without byte order mark, to be read in pieces."""
        return io.BytesIO(self.data) if self.data is not None else self._stream_large()

    def text(self) -> str:
        """The entire content.

        Raises:
            Rejected: it is too long for one string.
        """
        if self.data is not None:
            return self.data.decode()
        longest = self.limits.longest_string
        if self.size > longest:
            raise Rejected("string too long", f"{self.size} bytes; a string holds at most {longest}: split it")
        return self.stream().read().decode()

    def _stream_large(self) -> BinaryIO:
        return io.BufferedReader(_Pieces(self._utf8()), self.limits.chunk)

    def _check(self, digest: str) -> bytes | None:
        kept: list[bytes] | None = []
        damage = None
        with self._open() as file:
            if not self._compression and self._stored_size() <= self.limits.largest_held:
                content = file.readall()
                if hashlib.sha256(content).hexdigest() != digest:
                    raise Changed
                self.size = len(content)
                return content
            hashed = _Hashed(file)
            try:
                for chunk in _decompressed(hashed, self._compression, self.limits.chunk):
                    self.size += len(chunk)
                    if self.size > self.limits.largest_held:
                        kept = None  # too large: from here on only the digest and the damage matter
                    if kept is not None:
                        kept.append(chunk)
            except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
                damage = Rejected("damaged compression", str(error))  # raised below: first of all, did the file change?
            while hashed.read(self.limits.chunk):  # what follows damaged data belongs to the digest, too
                pass
        if hashed.digest.hexdigest() != digest:
            raise Changed
        if damage:
            raise damage
        return None if kept is None else b"".join(kept)

    def _find_encoding(self, content: bytes | None, fallback: str | None) -> str:
        head = content[:4] if content is not None else next(self._raw())[:4]
        # A mark inside a file is a character like others. Parts, which are UTF-8, begin with no other mark.
        marks = _BYTE_ORDER_MARKS if self._part is None or self._part.start == 0 else ()
        marked = next((name for mark, name in marks if head.startswith(mark)), None)
        if content is not None and not marked and content.isascii():  # most files: no decoder needed
            return "utf-8"
        # A file with a mark is never tried in the fallback: cp1252 and latin-1 accept nearly any bytes.
        candidates = [marked] if marked else ["utf-8", *([fallback] if fallback else [])]
        objections = []
        for encoding in candidates:
            decoder, seen = codecs.getincrementaldecoder(encoding)(), 0
            try:
                for chunk in [content] if content is not None else self._raw():
                    seen += len(chunk)
                    decoder.decode(chunk)
                decoder.decode(b"", final=True)  # a character cut off at the end of the file is an error only here
                return encoding
            except UnicodeDecodeError as error:
                # The error counts from the first byte that the decoder had: those left of the chunk before come first.
                place = max(0, seen - len(error.object)) + error.start
                objections.append(f"{encoding}: {error.reason} at byte {place}")
        raise Rejected("unknown encoding", "; ".join(objections))

    def _raw(self, on_read: Callable[[int], None] = lambda position: None) -> Iterator[bytes]:
        num_bytes = 0
        with self._open() as file:
            for chunk in _decompressed(file, self._compression, self.limits.chunk):
                num_bytes += len(chunk)
                on_read(file.tell() if self._compression else num_bytes)
                yield chunk

    def _open(self) -> io.RawIOBase:
        file = io.FileIO(self._path)  # pieces are large, so a buffer would only copy them
        if self._part is None:
            return file
        start, end, _ = self._part
        file.seek(start)
        return file if end is None else _Bounded(file, end - start)

    def _stored_size(self) -> int:
        start, end, _ = self._part or (0, None, 1)
        return (os.path.getsize(self._path) if end is None else end) - start

    def _utf8(self) -> Iterator[bytes]:
        decoder = codecs.getincrementaldecoder(self._encoding)()
        for chunk in self._raw(self.on_read):
            yield chunk if self._encoding == "utf-8" else decoder.decode(chunk).encode()


class _Bounded(io.RawIOBase):
    """The next `size` bytes of a file."""

    def __init__(self, file: io.FileIO, size: int) -> None:
        self._file, self._left = file, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(memoryview(buffer)[: self._left])
        self._left -= count
        return count

    def readall(self) -> bytes:
        return b"".join(iter(partial(self.read, 1 << 20), b""))  # the inherited one reads 8 KiB at a time

    def close(self) -> None:
        self._file.close()
        super().close()


class _Hashed(io.RawIOBase):
    """A file that is hashed while it is read."""

    def __init__(self, file: io.RawIOBase) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self.digest.update(memoryview(buffer)[:count])
        return count


class _Pieces(io.RawIOBase):
    """The concatenation of byte strings, as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)  # sliced below without copying
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _decompressed(file: io.RawIOBase, compression: str, size: int) -> Iterator[bytes]:
    """The content in pieces, of `size` bytes unless it is Zstandard.

    Raises EOFError, gzip.BadGzipFile, zlib.error or zstandard.ZstdError on damage.
    """
    if compression == ".zst":
        yield from _zstandard(file)
        return
    content = gzip.GzipFile(fileobj=file, mode="rb") if compression == ".gz" else file
    while chunk := content.read(size):  # GzipFile continues with the next member, and raises EOFError if one is cut
        yield chunk


def _zstandard(file: io.RawIOBase) -> Iterator[bytes]:
    # python-zstandard's own reader is not used: it takes the end of a truncated file for the end of the content.
    frame = None
    while piece := file.read(4096):  # small: one call decompresses all of it, and 4 KiB can hold 128 MiB
        while piece:
            # libzstd's default limit of 128 MiB rejects what `zstd --long=31` wrote. Each frame needs a new object.
            frame = frame or zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
            if content := frame.decompress(piece):
                yield content
            piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame:
        raise EOFError("the file ends before its last frame does")
