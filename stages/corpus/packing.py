"""From a corpus to rows of tokens."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.corpus import arrow, encoding
from stages.corpus.encoding import Coding, Tokens

BATCH = 4 << 20  # tokens of a record batch, at most


class Task(NamedTuple):
    """One record batch of a corpus."""

    shard: Path
    offset: int
    """In bytes, as `arrow.batch_offsets` gives it."""
    coding: Coding
    target: Path
    """The file to write: the documents' tokens, each document with EOS at its end, as an array of `coding.dtype`."""


class Encoded(NamedTuple):
    """What became of a record batch."""

    documents: int
    characters: int
    unknown: int
    """How many of the tokens stand for what the vocabulary cannot express."""


def encode(task: Task) -> Encoded:
    """Encode all documents of a record batch.

    Raises:
        StageError: the tokenizer does not fit the model, or gives the EOS token inside a document.
    """
    texts = arrow.read_batch(task.shard, task.offset)["text"]
    unknown = 0
    task.target.unlink(missing_ok=True)  # of a worker that is lost and may still write
    with task.target.open("wb") as file:
        for tokens in encoding.encode(texts, task.coding):
            tokens.tofile(file)
            if task.coding.unk_token_id is not None:
                unknown += int(np.count_nonzero(tokens == task.coding.unk_token_id))
    return Encoded(len(texts), pc.sum(pc.utf8_length(texts)).as_py(), unknown)


def join(parts: Iterable[Path], target: Path) -> str:
    """Move the contents of files, one after the other, to a new file and return its SHA-256."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for part in parts:
            with part.open("rb") as source:
                while chunk := source.read(1 << 20):
                    file.write(chunk)
                    digest.update(chunk)
            part.unlink()
    return digest.hexdigest()


class RowWriter:
    """Cuts a stream of tokens into rows; where the stream comes in pieces makes no difference."""

    def __init__(self, stream: arrow.StreamWriter, seq_length: int) -> None:
        self.num_tokens = 0
        self._seq_length = seq_length
        self._stream = stream
        self._batch = np.empty(max(1, BATCH // seq_length) * seq_length, np.int32)
        self._filled = 0

    def add_file(self, path: Path, coding: Coding) -> None:
        """Append all tokens of a file, as `encode` writes it, to the stream."""
        with path.open("rb") as file:
            while len(tokens := np.fromfile(file, coding.dtype, BATCH)):
                self.add(tokens)

    def add(self, tokens: Tokens) -> None:
        """Append (n,) tokens to the stream."""
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
        buffers = [None, pa.py_buffer(self._batch)]
        values = pa.Array.from_buffers(pa.int32(), self._filled, buffers)  # `pa.array` would import pandas
        self._stream.write(pa.FixedSizeListArray.from_arrays(values, self._seq_length))
        self._filled = 0
