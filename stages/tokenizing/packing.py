"""From a corpus to rows of tokens, in two steps: workers encode, then one process cuts rows.

Between the two are files of bare tokens, which the store keeps. They need disk space, but a change of `seq_length` or
`validation_splits` encodes nothing again, and encoding is nearly all of the time.
"""

import hashlib
import operator
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.base.dataset import Shard
from stages.base.errors import StageError
from stages.base.record import WRITTEN, compare
from stages.tokenizing.encoding import Encoder, TokenizerSpec, Tokens
from stages.work import arrow

MAX_BATCH_TOKENS = 4 << 20
"""Tokens of a record batch of rows, at most, and of what is in memory: 16 MiB."""


make_encoder = cache(Encoder)  # a worker encodes many record batches, and a large tokenizer takes a second to load


class BatchTask(NamedTuple):
    """One record batch of a corpus."""

    shard: Path
    offset: int
    """In bytes, as `arrow.batch_offsets` gives it."""
    spec: TokenizerSpec
    target: Path
    """The file to write: the documents' tokens, each document with EOS at its end, as an array of `spec.dtype`."""


@dataclass(frozen=True)
class Counts:
    """Of a part of a corpus."""

    num_documents: int = 0
    num_characters: int = 0
    num_bytes: int = 0
    """Of the text in UTF-8."""
    num_unknown: int = 0
    """Tokens that replace what the vocabulary cannot express."""
    num_dropped: int = 0
    """Characters that leave no token."""
    num_slow: int = 0
    """Characters that the model's own tokenizer has encoded, although the fast one may encode."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*map(operator.add, astuple(self), astuple(other)))


class Encoded(NamedTuple):
    """What `encode` wrote, or meant to: `join` compares it with what it reads."""

    counts: Counts
    sha256: str
    """Of the tokens."""


def encode(task: BatchTask) -> Encoded:
    """Encode all documents of a record batch.

    Raises:
        StageError: the tokenizer does not fit the model, or cannot encode a document.
    """
    documents = arrow.read_batch(task.shard, task.offset)["text"]  # memory-mapped: a task is pickled without its text
    encoder, unknown = make_encoder(task.spec), task.spec.unk_token_id
    counts = Counts(
        num_characters=pc.sum(pc.utf8_length(documents)).as_py(), num_bytes=pc.sum(pc.binary_length(documents)).as_py()
    )
    digest = hashlib.sha256()
    # A new file, not the old one emptied: a Dask worker that was considered lost may still write to its own.
    task.target.unlink(missing_ok=True)
    with task.target.open("wb") as file:
        for tokens, num_dropped, num_slow in encoder.encode(documents):
            # (n,) of 2 or 4 bytes each; without a header, so that parts can be joined. Not by ndarray.tofile, which
            # succeeds on a full disk.
            file.write(tokens.data)
            digest.update(tokens.data)
            counts += Counts(
                num_documents=int(np.count_nonzero(tokens == task.spec.eos_token_id)),  # it ends each, nowhere else
                num_unknown=0 if unknown is None else int(np.count_nonzero(tokens == unknown)),
                num_dropped=num_dropped,
                num_slow=num_slow,
            )
    if counts.num_documents != len(documents):
        raise StageError(f"{task.spec.path} gave {counts.num_documents} EOS tokens for {len(documents)} documents")
    return Encoded(counts, digest.hexdigest())


def join(parts: Iterable[tuple[Path, str]], target: Path) -> str:
    """Move the contents of files, in order, to a new file and return its SHA-256.

    Args:
        parts: Each file, with the SHA-256 that it must have.
        target: The new file.

    Raises:
        StageError: a file has another content.
    """
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for part, sha256 in parts:
            of_part = hashlib.sha256()
            with part.open("rb") as source:
                while chunk := source.read(1 << 20):
                    file.write(chunk)
                    digest.update(chunk)
                    of_part.update(chunk)
            compare(part, sha256, of_part.hexdigest(), WRITTEN)
            part.unlink()  # at once, so that the disk has the tokens once
    return digest.hexdigest()


class RowWriter:
    """Cuts a stream of tokens into rows; how the stream is divided into pieces makes no difference.

    Args:
        stream: Where to write the rows.
        seq_length: Tokens of a row.
        max_batch_tokens: Of a record batch, which has at least one row.
    """

    def __init__(self, stream: arrow.StreamWriter, seq_length: int, max_batch_tokens: int = MAX_BATCH_TOKENS) -> None:
        self.num_tokens = 0
        self._seq_length = seq_length
        self._stream = stream
        # (rows * seq_length,) int32: the tokens of a record batch, filled again after each one.
        self._batch = np.empty(max(1, max_batch_tokens // seq_length) * seq_length, np.int32)
        self._filled = 0

    def add_file(self, path: Path, spec: TokenizerSpec) -> None:
        """Append all tokens of a file that `encode` wrote to the stream."""
        with path.open("rb") as file:
            # In pieces of a batch: the tokens of a split may be more than fits into memory. Not by numpy.fromfile,
            # which takes an error of the disk for the end of the file.
            while piece := file.read(len(self._batch) * spec.dtype.itemsize):
                self.add(np.frombuffer(piece, spec.dtype))

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

    def close(self) -> Shard:
        """Write the last rows; a partial one is dropped."""
        self._filled -= self._filled % self._seq_length
        if self._filled:
            self._write()
        return self._stream.close()

    def _write(self) -> None:
        values = arrow.from_numpy(self._batch[: self._filled])
        self._stream.write(pa.FixedSizeListArray.from_arrays(values, self._seq_length))
        self._filled = 0
