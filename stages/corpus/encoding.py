"""From strings to tokens, with memory for a batch of text even where a document is long.

The tokenizer is nearly all of the work: for 40 MB of text a worker needed 1.03 times the CPU time of bare encoding. But
it needs about a hundred times the memory of its text, so text is encoded in batches, and a long document in windows:
one of 12 MB needs 327 MB.
"""

import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tokenizers import Tokenizer

from stages.artifacts.errors import StageError
from stages.corpus import windows

Tokens = NDArray[np.integer[Any]]


class TokenizerSpec(NamedTuple):
    """How strings become tokens."""

    path: Path
    """A `tokenizer.json`."""
    sha256: str
    """Of that file."""
    eos_token_id: int
    """Ends each document, and occurs nowhere else."""
    unk_token_id: int | None
    """Replaces what the vocabulary cannot express."""
    vocab_size: int
    """Rows of the model's embedding."""

    @property
    def dtype(self) -> np.dtype[np.integer[Any]]:
        """The smallest that can represent the vocabulary."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)


class EncoderLimits(NamedTuple):
    """What bounds the memory, in bytes of UTF-8. It changes no token."""

    batch: int = 1 << 20
    """Encoded at once: the tokenizer needs about a hundred times as much memory."""
    window: int = 1 << 18
    """Of a string longer than a batch. After larger windows, malloc would not return the memory to the system."""
    overlaps: tuple[int, ...] = (1 << 15, 1 << 20)
    """What neighbouring windows share; the next one is tried where they cannot be joined."""


DEFAULT_LIMITS = EncoderLimits()


def use_one_thread() -> None:
    """Keep the tokenizers of this process from starting a thread per core.

    The stage has a process per core already, and `num_workers: 1` means one core. `tokenizers` has no argument for it
    and reads this variable at each batch.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class Encoder:
    """Encodes documents."""

    def __init__(self, spec: TokenizerSpec, limits: EncoderLimits = DEFAULT_LIMITS) -> None:
        self._spec = spec
        self._limits = limits
        self._tokenizer = _load_tokenizer(spec.path, spec.sha256)

    def encode(self, documents: pa.StringArray) -> Iterator[Tokens]:
        """Yield the documents' tokens, each document with EOS at its end, in pieces of any length: (n,) `spec.dtype`.

        Raises:
            StageError: the tokenizer gives ids that the model does not know, or the EOS token inside a document.
        """
        for batch in self._batches(documents):
            text = batch[0].as_buffer()  # no copy
            if text.size > self._limits.batch:  # it is alone
                yield from self._encode_document(memoryview(text))
                yield np.array([self._spec.eos_token_id], self._spec.dtype)  # (1,)
            else:
                yield self._encode_batch(batch)

    def _batches(self, documents: pa.StringArray) -> Iterator[pa.StringArray]:
        """Consecutive documents of at most `limits.batch` bytes together, or a longer one alone."""
        lengths = np.from_dlpack(pc.binary_length(documents))  # `to_numpy` would import pandas
        ends = np.cumsum(lengths, dtype=np.int64)
        first = 0
        while first < len(documents):
            limit = self._limits.batch + (ends[first - 1] if first else 0)
            last = max(int(np.searchsorted(ends, limit, "right")), first + 1)
            yield documents.slice(first, last - first)
            first = last

    def _encode_batch(self, batch: pa.StringArray) -> Tokens:
        different = batch.dictionary_encode()  # records repeat their strings: encode each once
        strings = different.dictionary.to_pylist()
        # `fast` leaves out the offsets, and special tokens would be put into the middle of the stream.
        documents = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)]
        for index, document in enumerate(documents):
            if self._spec.eos_token_id in document:
                pieces = self._encode_document(strings[index].encode())
                document = documents[index] = np.concatenate(pieces).tolist()
            document.append(self._spec.eos_token_id)
        ids = itertools.chain.from_iterable(map(documents.__getitem__, different.indices.to_pylist()))
        return self._narrow(np.fromiter(ids, np.int32))  # (n,), all documents in a row

    def _encode_document(self, text: bytes | memoryview) -> list[Tokens]:
        """Encode a document in UTF-8 without EOS, even where it contains the spelling of EOS, such as the tag `</s>`.

        Only models that look up entire words (Unigram, WordLevel) confuse the two. They are given the spelling in two
        parts, its first character and the others, which are ordinary text.
        """
        pieces = self._encode_string(text)
        if not self._has_eos(pieces):
            return pieces
        spelling = self._tokenizer.id_to_token(self._spec.eos_token_id)
        assert spelling
        first, *others = bytes(text).split(spelling.encode())
        parts = [first, *(part for other in others for part in (spelling[:1].encode(), spelling[1:].encode() + other))]
        pieces = [piece for part in parts if part for piece in self._encode_string(part)]
        if self._has_eos(pieces):
            raise StageError(
                f"{self._spec.path} encodes a text to the EOS token {spelling!r}, which therefore cannot separate "
                "documents: give the model another eos_token_id"
            )
        return pieces

    def _has_eos(self, pieces: list[Tokens]) -> bool:
        return any((piece == self._spec.eos_token_id).any() for piece in pieces)

    def _encode_string(self, text: bytes | memoryview) -> list[Tokens]:
        """Encode a string of any length: a long one in windows, and at once only where these cannot be joined."""
        if len(text) > self._limits.batch:
            for overlap in self._limits.overlaps:
                try:
                    ids = windows.encode(self._tokenizer, text, max(self._limits.window, 4 * overlap), overlap)
                    return [self._narrow(piece) for piece in ids]
                except windows.NotJoined:  # what was encoded so far is dropped
                    continue
        [encoding] = self._tokenizer.encode_batch_fast([str(text, "utf-8")], add_special_tokens=False)
        return [self._narrow(np.array(encoding.ids, np.int32))]

    def _narrow(self, ids: NDArray[Any]) -> Tokens:
        # Before the cast, which would wrap 70 000 to 4 464 in uint16 without an error.
        if ids.max(initial=0) >= self._spec.vocab_size:
            raise StageError(
                f"{self._spec.path} gives token {ids.max()}, but the model's vocab_size is {self._spec.vocab_size}: "
                "the tokenizer belongs to another model"
            )
        return ids.astype(self._spec.dtype)


@functools.cache  # a worker process encodes many record batches, each with an encoder of its own
def _load_tokenizer(path: Path, sha256: str) -> Tokenizer:
    """Read a tokenizer and turn off what would make its tokens depend on more than the text.

    Args:
        path: A `tokenizer.json`.
        sha256: Of that file, so that a file that was changed is read again.
    """
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True  # `<|endoftext|>` in a text is text
    tokenizer.no_truncation()  # or documents would lose all after the limit in the file, without an error
    tokenizer.no_padding()  # or documents of a batch would get the length of the longest
    return tokenizer
