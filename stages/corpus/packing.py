"""From strings to rows of tokens."""

import functools
import itertools
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tokenizers import Tokenizer

from stages.artifacts.command import StageError
from stages.corpus import arrow

BATCH = 4 << 20  # tokens of a record batch, at most

Tokens = NDArray[np.int32]


class Coding(NamedTuple):
    """How strings become tokens."""

    tokenizer: Path
    """A `tokenizer.json`."""
    eos_token_id: int
    """Ends each document, and stands nowhere else."""
    unk_token_id: int | None
    """Stands for what the vocabulary cannot express."""
    vocab_size: int
    """Rows of the model's embedding."""


class Task(NamedTuple):
    """One record batch of a corpus."""

    shard: Path
    offset: int
    """In bytes, as `arrow.batch_offsets` gives it."""
    coding: Coding


class Encoded(NamedTuple):
    """The documents of one record batch, one after the other, each with EOS at its end."""

    tokens: Tokens
    documents: int
    characters: int
    unknown: int
    """How many of the tokens stand for what the vocabulary cannot express."""


def encode(task: Task) -> Encoded:
    """Encode all documents of a record batch.

    Raises:
        StageError: the tokenizer gives ids that the model does not know, or the EOS token inside a document.
    """
    coding = task.coding
    texts = arrow.read_batch(task.shard, task.offset)["text"]
    tokenizer = _tokenizer(coding.tokenizer)
    documents = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts.to_pylist(), add_special_tokens=False)]
    for index, document in enumerate(documents):
        if coding.eos_token_id in document:
            document = documents[index] = _encode_spelling(tokenizer, texts[index].as_py(), coding)
        document.append(coding.eos_token_id)
    tokens = np.fromiter(itertools.chain.from_iterable(documents), np.int32)
    if tokens.max() >= coding.vocab_size:
        raise StageError(
            f"{coding.tokenizer} gives token {tokens.max()}, but the model's vocab_size is {coding.vocab_size}: "
            "the tokenizer belongs to another model"
        )
    unknown = 0 if coding.unk_token_id is None else int(np.count_nonzero(tokens == coding.unk_token_id))
    return Encoded(tokens, len(documents), pc.sum(pc.utf8_length(texts)).as_py(), unknown)


def _encode_spelling(tokenizer: Tokenizer, text: str, coding: Coding) -> list[int]:
    """Encode a text that spells the EOS token out, such as the tag `</s>`, without giving that token.

    Only models that look whole words up (Unigram, WordLevel) take the spelling for the token: they get it in halves.
    """
    spelling = tokenizer.id_to_token(coding.eos_token_id)
    assert spelling
    first, *others = text.split(spelling)
    pieces = [first, *(half for other in others for half in (spelling[:1], spelling[1:] + other))]
    encodings = tokenizer.encode_batch_fast([piece for piece in pieces if piece], add_special_tokens=False)
    ids: list[int] = list(itertools.chain.from_iterable(encoding.ids for encoding in encodings))
    if coding.eos_token_id in ids:
        raise StageError(f"{coding.tokenizer} gives the EOS token {spelling!r} for a text: it cannot mark documents")
    return ids


@functools.cache
def _tokenizer(path: Path) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core is enough
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True  # `<|endoftext|>` in a text is text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class RowWriter:
    """Cuts a stream of tokens into rows; where the stream comes in pieces makes no difference."""

    def __init__(self, stream: arrow.StreamWriter, seq_length: int) -> None:
        self.num_tokens = 0
        self._seq_length = seq_length
        self._stream = stream
        self._batch = np.empty(max(1, BATCH // seq_length) * seq_length, np.int32)
        self._filled = 0

    def add(self, tokens: Tokens) -> None:
        """Append (n,) int32 to the stream."""
        self.num_tokens += len(tokens)
        while len(tokens):
            count = min(len(tokens), len(self._batch) - self._filled)
            self._batch[self._filled : self._filled + count] = tokens[:count]
            self._filled += count
            tokens = tokens[count:]
            if self._filled == len(self._batch):
                self._write()

    def close(self) -> arrow.Shard:
        """Write the last rows; a partial one is dropped."""
        self._filled -= self._filled % self._seq_length
        if self._filled:
            self._write()
        return self._stream.close()

    def _write(self) -> None:
        values = pa.array(self._batch[: self._filled])
        self._stream.write(pa.FixedSizeListArray.from_arrays(values, self._seq_length))
        self._filled = 0
