"""From strings to tokens, with memory for a batch of text even where a document is long.

The tokenizer is nearly all of the work: for 40 MB of text a worker needed 1.03 times the CPU time of bare encoding. But
it needs about a hundred times the memory of its text, so text is encoded in batches, and a long document in windows:
one of 12 MB needs 327 MB.
"""

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from stages.artifacts.errors import StageError
from stages.corpus import vocabulary, windows

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
    special_tokens: tuple[str, ...]
    """No text gives them, except for the unknown token."""
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
    at_once: int = 1 << 22
    """Of a string whose windows cannot be joined at all: it needs up to 200 times as much memory."""


DEFAULT_LIMITS = EncoderLimits()


def use_one_thread() -> None:
    """Keep the tokenizers of this process from starting a thread per core.

    The stage has a process per core already, and `num_workers: 1` means one core. `tokenizers` has no argument for it
    and reads this variable at each batch.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


_NOT_SEEN, _KEPT, _DROPPED = range(3)


class _Refused(Exception):
    """A document cannot be encoded; the message is the reason."""


class Encoder:
    """Encodes documents."""

    def __init__(self, spec: TokenizerSpec, limits: EncoderLimits = DEFAULT_LIMITS) -> None:
        self._spec = spec
        self._limits = limits
        self._tokenizer, self._renamed = vocabulary.load(spec.path, spec.special_tokens)
        self._tokenizer.encode_special_tokens = True  # `<|endoftext|>` in a text is text
        self._tokenizer.no_truncation()  # or documents would lose all after the limit in the file, without an error
        self._tokenizer.no_padding()  # or documents of a batch would get the length of the longest
        # What may not be within a document: EOS may not even where it is the unknown token, too.
        special = self._renamed.keys() - {spec.unk_token_id} | {spec.eos_token_id}
        self._special = np.array([*special], np.int32)  # (n,) ids
        self._added = self._tokenizer.get_added_tokens_decoder().keys()
        self._fates = np.full(sys.maxunicode + 1, _NOT_SEEN, np.uint8)  # of each character

    def encode(self, documents: pa.StringArray) -> Iterator[Tokens]:
        """Yield the documents' tokens, each document with EOS at its end, in pieces of any length: (n,) `spec.dtype`.

        Raises:
            StageError: the tokenizer gives ids that the model does not know, or cannot encode a document.
        """
        for batch in self._batches(documents):
            try:
                yield from self._encode(batch)
            except Exception as error:
                if type(error) not in (_Refused, Exception):  # the latter is what `tokenizers` raises
                    raise
                if len(batch) > 1:  # which document is it about?
                    for index in range(len(batch)):
                        yield from self.encode(batch.slice(index, 1))
                    continue
                beginning = str(memoryview(batch[0].as_buffer())[:200], "utf-8", "ignore")[:50]
                raise StageError(
                    f"{self._spec.path} cannot encode the document that begins with {beginning!r}: {error}. "
                    "Remove or change it in raw_dir, or give the model another tokenizer or eos_token_id"
                ) from None

    def count_dropped(self, documents: pa.StringArray) -> int:
        """How many characters of documents leave no token, or lose a part of their bytes.

        Byte-level vocabularies without an unknown token drop the bytes that they lack; some normalizers drop control
        characters. White space is not counted where the tokenizer only uses it to find words. Each character is decided
        by encoding it alone.
        """
        num_dropped = 0
        for text in self._blocks(documents):
            codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)  # (characters,)
            codes = codes[self._fates[codes] != _KEPT]  # usually none
            for code in np.unique(codes[self._fates[codes] == _NOT_SEEN]):
                self._fates[code] = _DROPPED if self._drops(chr(code)) else _KEPT
            num_dropped += int(np.count_nonzero(self._fates[codes] == _DROPPED))
        return num_dropped

    def _drops(self, character: str) -> bool:
        tokenizer = self._tokenizer
        try:
            encoding = tokenizer.encode(character, add_special_tokens=False)
        except Exception:  # a model of words without an unknown token may know the character within words only
            return False
        if not self._added.isdisjoint(encoding.ids):
            return False
        word = tokenizer.normalizer.normalize_str(character) if tokenizer.normalizer else character
        if tokenizer.pre_tokenizer:
            word = "".join(part for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(word))
        # A token is at least as long as what it stands for; a byte-level word has a character for each byte.
        is_partly_lost = len("".join(encoding.tokens)) < len(word)
        return is_partly_lost or not (encoding.ids or character.isspace())

    def _blocks(self, documents: pa.StringArray) -> Iterator[str]:
        """The text of documents, one after the other, in blocks of at most `limits.batch` bytes of UTF-8."""
        _, offsets, data = documents.buffers()
        ends = np.frombuffer(offsets, np.int32)[documents.offset :][: len(documents) + 1]
        text = memoryview(data)[ends[0] : ends[-1]]
        start = 0
        while start < len(text):
            stop = windows.border(text, start + self._limits.batch)
            yield str(text[start:stop], "utf-8")
            start = stop

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

    def _encode(self, batch: pa.StringArray) -> Iterator[Tokens]:
        text = batch[0].as_buffer()  # no copy
        if text.size <= self._limits.batch:
            yield self._encode_batch(batch)
            return
        pieces = self._encode_long(memoryview(text))  # it is alone
        for piece in pieces:
            self._check(piece)
        yield from pieces
        yield np.array([self._spec.eos_token_id], self._spec.dtype)  # (1,)

    def _encode_batch(self, batch: pa.StringArray) -> Tokens:
        different = batch.dictionary_encode()  # records repeat their strings: encode each once
        strings = different.dictionary.to_pylist()
        # `fast` leaves out the offsets, and special tokens would be put into the middle of the stream.
        documents = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)]
        for document in documents:
            document.append(self._spec.eos_token_id)
        ids = itertools.chain.from_iterable(map(documents.__getitem__, different.indices.to_pylist()))
        tokens = self._narrow(np.fromiter(ids, np.int32))  # (n,), all documents in a row
        self._check(tokens, len(batch))
        return tokens

    def _encode_long(self, text: memoryview) -> list[Tokens]:
        """Encode a document in windows, or at once where these cannot be joined, unless it is too long for that."""
        for overlap in self._limits.overlaps:
            try:
                ids = windows.encode(self._tokenizer, text, max(self._limits.window, 4 * overlap), overlap)
                return [self._narrow(piece) for piece in ids]
            except windows.NotJoined:  # what was encoded so far is dropped
                continue
        if len(text) > self._limits.at_once:
            raise _Refused(
                f"a part of it cannot be divided into words, and at once only {self._limits.at_once} bytes can be "
                f"encoded, not {len(text)}"
            )
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

    def _check(self, tokens: Tokens, num_ends: int = 0) -> None:
        """Raise if there are more special tokens than the EOS that ends each document."""
        found = tokens[np.isin(tokens, self._special)]
        if len(found) > num_ends:  # the first of a single document is in its text
            token_id = int(found[0])
            token = self._renamed.get(token_id) or self._tokenizer.id_to_token(token_id)
            raise _Refused(f"its text gives the special token {token!r}")
