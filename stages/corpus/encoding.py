"""From strings to tokens."""

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

from stages.artifacts.command import StageError
from stages.corpus import windows

BATCH = 1 << 20  # bytes of UTF-8 that are encoded at once: the tokenizer needs some hundred times as much memory
WINDOW = 1 << 18  # bytes of a window of a longer string; of larger ones, malloc would not give the memory back
OVERLAPS = (1 << 15, 1 << 20)  # bytes that its windows share: more if they cannot be joined

Tokens = NDArray[np.integer[Any]]


class Coding(NamedTuple):
    """How strings become tokens."""

    tokenizer: Path
    """A `tokenizer.json`."""
    sha256: str
    """Of that file."""
    eos_token_id: int
    """Ends each document, and stands nowhere else."""
    unk_token_id: int | None
    """Stands for what the vocabulary cannot express."""
    vocab_size: int
    """Rows of the model's embedding."""

    @property
    def dtype(self) -> np.dtype[np.integer[Any]]:
        """The smallest that holds the vocabulary."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)


def encode(texts: pa.StringArray, coding: Coding) -> Iterator[Tokens]:
    """Yield the documents' tokens, (n,) `coding.dtype`, each document with EOS at its end, in pieces of any length.

    Raises:
        StageError: the tokenizer gives ids that the model does not know, or the EOS token inside a document.
    """
    tokenizer = _tokenizer(coding.tokenizer)
    for group in _groups(texts):
        text = group[0].as_buffer()
        if text.size > BATCH:
            yield from _encode_document(tokenizer, memoryview(text), coding)
            yield np.array([coding.eos_token_id], coding.dtype)
            continue
        different = group.dictionary_encode()  # records repeat their strings: encode each once
        strings = different.dictionary.to_pylist()
        documents = [encoding.ids for encoding in tokenizer.encode_batch_fast(strings, add_special_tokens=False)]
        for index, document in enumerate(documents):
            if coding.eos_token_id in document:
                pieces = _encode_document(tokenizer, strings[index].encode(), coding)
                document = documents[index] = np.concatenate(pieces).tolist()
            document.append(coding.eos_token_id)
        ids = itertools.chain.from_iterable(map(documents.__getitem__, different.indices.to_pylist()))
        yield _narrow(np.fromiter(ids, np.int32), coding)


def _groups(texts: pa.StringArray) -> Iterator[pa.StringArray]:
    """Consecutive strings with no more than `BATCH` bytes together, or a longer one alone."""
    lengths = np.from_dlpack(pc.binary_length(texts))  # `to_numpy` would import pandas
    ends = np.cumsum(lengths, dtype=np.int64)
    first = 0
    while first < len(texts):
        limit = BATCH + (ends[first - 1] if first else 0)
        last = max(int(np.searchsorted(ends, limit, "right")), first + 1)
        yield texts.slice(first, last - first)
        first = last


def _narrow(ids: NDArray[Any], coding: Coding) -> Tokens:
    if ids.max(initial=0) >= coding.vocab_size:
        raise StageError(
            f"{coding.tokenizer} gives token {ids.max()}, but the model's vocab_size is {coding.vocab_size}: "
            "the tokenizer belongs to another model"
        )
    return ids.astype(coding.dtype)


def _encode_document(tokenizer: Tokenizer, text: bytes | memoryview, coding: Coding) -> list[Tokens]:
    """Encode a document in UTF-8, even if it spells the EOS token out, such as the tag `</s>`, without giving that.

    Only models that look whole words up (Unigram, WordLevel) take the spelling for the token: they get it in halves.
    """
    pieces = _encode_string(tokenizer, text, coding)
    if not _has_eos(pieces, coding):
        return pieces
    spelling = tokenizer.id_to_token(coding.eos_token_id)
    assert spelling
    first, *others = bytes(text).split(spelling.encode())
    halves = [first, *(half for other in others for half in (spelling[:1].encode(), spelling[1:].encode() + other))]
    pieces = [piece for half in halves if half for piece in _encode_string(tokenizer, half, coding)]
    if _has_eos(pieces, coding):
        raise StageError(f"{coding.tokenizer} gives the EOS token {spelling!r} for a text: it cannot mark documents")
    return pieces


def _has_eos(pieces: list[Tokens], coding: Coding) -> bool:
    return any((piece == coding.eos_token_id).any() for piece in pieces)


def _encode_string(tokenizer: Tokenizer, text: bytes | memoryview, coding: Coding) -> list[Tokens]:
    """Encode a string of any length: a long one in windows, and as a whole only if they cannot be joined."""
    if len(text) > BATCH:
        for overlap in OVERLAPS:
            try:
                ids = windows.encode(tokenizer, text, max(WINDOW, 4 * overlap), overlap)
                return [_narrow(piece, coding) for piece in ids]
            except windows.NotJoined:
                continue
    [encoding] = tokenizer.encode_batch_fast([str(text, "utf-8")], add_special_tokens=False)
    return [_narrow(np.array(encoding.ids, np.int32), coding)]


@functools.cache
def _tokenizer(path: Path) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core is enough
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True  # `<|endoftext|>` in a text is text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
