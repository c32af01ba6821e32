"""From a corpus to rows of tokens, in two steps: workers encode, then one process cuts rows.

Between the two are files of bare tokens, which the store keeps. They need disk space, but a change of `seq_length` or
`validation_splits` encodes nothing again, and encoding is nearly all of the time. (A conversation that is longer than a
row is refused, so `seq_length` matters there.)

In a corpus with conversations, all tokens have bits beside their ids (stages/tokenizing/conversations.py).
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from stages.base.dataset import Shard
from stages.base.files import WRITTEN, compare
from stages.base.packed import RefusedConversation
from stages.tokenizing.chat_template import Refused
from stages.tokenizing.conversations import ID_MASK, START, TRAINED, WHOLE, ConversationEncoder
from stages.tokenizing.encoding import Encoder, TokenizerSpec, Tokens, check_ids
from stages.work import arrow

MAX_BATCH_TOKENS = 4 << 20
"""Tokens of a record batch of rows, at most, and of what is in memory: 16 MiB."""


NUM_OPEN = 64
"""Rows of conversations that wait for another one that fits: about 1 % of their tokens then stay free."""
NUM_REFUSED = 20
"""Refused conversations that are listed, of each split."""

# A worker encodes many record batches, and a large tokenizer takes a second to load. Not all are kept: a worker of Dask
# lives for any number of runs, some at the same time, each with a tokenizer or a template of its own.
make_encoder = lru_cache(maxsize=4)(Encoder)
_make_conversation_encoder = lru_cache(maxsize=4)(ConversationEncoder)


class Side(NamedTuple):
    """The documents that are held out by their content, or the others."""

    fraction: float
    """Of the documents that is held out, on average."""
    is_held_out: bool

    def chosen(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, bytes]:
        """The rows of a record batch on this side, and their digests of 8 bytes.

        A digest alone decides: so whatever else there is, equal documents are on one side, and a document stays there.
        """
        digests = _digests(batch)
        is_held_out = np.frombuffer(b"".join(digests), ">u8") < np.uint64(self.fraction * 2**64)
        chosen = np.flatnonzero(is_held_out == self.is_held_out)
        return batch.take(pa.array(chosen)), b"".join(digests[index] for index in chosen)


def _digests(batch: pa.RecordBatch) -> list[bytes]:
    """Of the documents in a record batch."""
    strings, _ = arrow.strings_of(batch)
    return [blake2b(string.as_buffer(), digest_size=8).digest() for string in strings]  # without a copy


def without(batch: pa.RecordBatch, skipped: bytes) -> pa.RecordBatch:
    """A record batch without some of its rows, int64."""
    if not skipped:
        return batch
    stays = np.ones(len(batch), np.bool_)
    stays[np.frombuffer(skipped, np.int64)] = False
    return batch.filter(arrow.from_bits(stays))


def batches_of(shard: Path, skipped: bytes) -> Iterator[tuple[int, bytes]]:
    """Where each record batch of a shard is in its file, and which of its rows are skipped.

    Args:
        shard: Of the corpus.
        skipped: The rows of the shard that are skipped, in order, as int64.
    """
    rows, first = np.frombuffer(skipped, np.int64), 0
    for offset in arrow.batch_offsets(shard):
        end = first + len(arrow.read_batch(shard, offset))
        begin, stop = np.searchsorted(rows, [first, end])
        yield offset, (rows[begin:stop] - first).tobytes()
        first = end


def dividing_fraction(shards: Iterable[tuple[Path, bytes]], fraction: float) -> float | None:
    """A fraction for `Side` with which both sides have documents: the given one, unless there are too few for it.

    Args:
        shards: Of the corpus, each with the rows that are skipped, as int64.
        fraction: That is held out.

    Returns:
        None: all documents are equal.
    """
    batches = (
        without(arrow.read_batch(shard, offset), of_batch)
        for shard, skipped in shards
        for offset, of_batch in batches_of(shard, skipped)
    )
    digests = np.unique(np.frombuffer(b"".join(map(b"".join, map(_digests, batches))), ">u8"))
    if len(digests) < 2:
        return None
    num_held_out = int(np.searchsorted(digests, np.uint64(fraction * 2**64)))
    first = min(max(num_held_out, 1), len(digests) - 1)
    if first == num_held_out:
        return fraction
    return (int(digests[first - 1]) + int(digests[first])) / 2**65


class BatchTask(NamedTuple):
    """One record batch of a corpus."""

    shard: Path
    offset: int
    """In bytes, as `arrow.batch_offsets` gives it."""
    spec: TokenizerSpec
    target: Path
    """The file to write: the documents' tokens, each document with EOS at its end, as an array of `spec.dtype`."""
    side: Side | None = None
    """None: all documents."""
    skipped: bytes = b""
    """The rows of the record batch that are left out, as int64."""


@dataclass(frozen=True)
class Counts:
    """Of some documents of a corpus."""

    num_read: int = 0
    """Rows."""
    num_documents: int = 0
    num_characters: int = 0
    num_bytes: int = 0
    """Of the text in UTF-8."""
    num_start: int = 0
    """Tokens that begin documents that are text, such as BOS."""
    num_unknown: int = 0
    """Tokens that replace what the vocabulary cannot express."""
    num_dropped: int = 0
    """Characters that leave no token."""
    num_slow: int = 0
    """Characters that the model's own tokenizer has encoded, although the fast one may encode."""
    num_conversations: int = 0
    """Of the documents."""
    num_chat_tokens: int = 0
    """Of the conversations."""
    num_trained: int = 0
    """Of these tokens."""
    refused: dict[str, int] = field(default_factory=dict)
    """Conversations that give no tokens, by reason."""
    first_refused: list[RefusedConversation] = field(default_factory=list)
    strings: dict[str, int] = field(default_factory=dict)
    """Of the conversations, by where they are: `system`, `assistant reasoning`, `tools`, ..."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Those of them that the chat template does not write."""
    terminators: dict[int, int] = field(default_factory=dict)
    """The tokens that end trained turns, and how many conversations have each."""
    inner: dict[int, int] = field(default_factory=dict)
    """Special tokens within such turns, and how many conversations have each."""
    held_out: str = ""
    """Digests of documents that are held out by their content, in hexadecimal."""

    @property
    def num_duplicates(self) -> int:
        """Documents that are held out, and equal to an earlier one."""
        digests = np.frombuffer(bytes.fromhex(self.held_out), np.uint64)
        return len(digests) - len(np.unique(digests))

    def __add__(self, other: "Counts") -> "Counts":
        return Counts.total((self, other))

    @classmethod
    def total(cls, counts: Iterable["Counts"]) -> "Counts":
        """The sum of all at once: one after the other would copy the digests of all earlier ones each time."""

        def add(values: list[Any]) -> Any:
            if isinstance(values[0], dict):
                return dict(sum(map(Counter, values), Counter()))
            if isinstance(values[0], list):
                return [*islice(chain.from_iterable(values), NUM_REFUSED)]
            return "".join(values) if isinstance(values[0], str) else sum(values)

        every = [cls(), *counts]
        return cls(*(add([getattr(one, each.name) for one in every]) for each in fields(cls)))


class BatchResult(NamedTuple):
    """What `encode` wrote, or meant to: `join` compares it with what it reads."""

    counts: Counts
    sha256: str
    """Of the tokens."""


def encode(task: BatchTask) -> BatchResult:
    """Encode all documents of a record batch.

    Raises:
        StageError: the tokenizer does not fit the model, or cannot encode a document.
    """
    batch = arrow.read_batch(task.shard, task.offset)  # memory-mapped: a task is pickled without its text
    counts, digest = Counts(num_read=len(batch)), hashlib.sha256()
    batch = without(batch, task.skipped)
    if task.side:
        batch, digests = task.side.chosen(batch)
        if task.side.is_held_out:
            counts += Counts(held_out=digests.hex())
    # A new file, not the old one emptied: a Dask worker that was considered lost may still write to its own.
    task.target.unlink(missing_ok=True)
    with task.target.open("wb") as file:
        for tokens, found in _encoded(batch, task.spec) if len(batch) else ():
            # (n,) of 2 or 4 bytes each; without a header, so that files can be joined. Not by ndarray.tofile, which
            # succeeds on a full disk.
            file.write(tokens.data)
            digest.update(tokens.data)
            counts += found
    return BatchResult(counts, digest.hexdigest())


def _documents(documents: pa.StringArray, spec: TokenizerSpec) -> Iterator[tuple[Tokens, Counts]]:
    for tokens, num_dropped, num_slow in make_encoder(spec).encode(documents):
        num_unknown = 0 if spec.unk_token_id is None else int(np.count_nonzero(tokens == spec.unk_token_id))
        yield tokens, Counts(num_unknown=num_unknown, num_dropped=num_dropped, num_slow=num_slow)
    num_characters, num_bytes = (pc.sum(count(documents)).as_py() for count in (pc.utf8_length, pc.binary_length))
    # The encoder begins each with these tokens, ends it with EOS, and gives no other EOS.
    num_start = len(documents) * len(spec.start_token_ids)
    # Either may be the unknown token, too.
    num_added = len(documents) * (*spec.start_token_ids, spec.eos_token_id).count(spec.unk_token_id)
    of_text = Counts(
        num_documents=len(documents), num_start=num_start, num_unknown=-num_added, num_characters=num_characters,
        num_bytes=num_bytes,
    )  # fmt: skip
    yield np.empty(0, spec.dtype), of_text


def _encoded(batch: pa.RecordBatch, spec: TokenizerSpec) -> Iterator[tuple[Tokens, Counts]]:
    """The tokens of documents or conversations, in their order; in a corpus with these, with bits beside them."""
    strings, column = arrow.strings_of(batch)
    if batch.schema.names[column] == "messages":
        yield from _conversations(strings.to_pylist(), spec)
        return
    is_start = np.ones(1, np.bool_)  # of the next token
    for tokens, counts in _documents(strings, spec):
        if spec.chat:
            is_start = np.append(is_start[-1:], tokens == spec.eos_token_id)
            tokens = tokens | np.where(is_start[:-1], TRAINED | START, TRAINED).astype(spec.dtype)
        yield tokens, counts


def _conversations(conversations: Iterable[str], spec: TokenizerSpec) -> Iterator[tuple[Tokens, Counts]]:
    encoder = _make_conversation_encoder(spec)
    for conversation in conversations:
        encoded = encoder.encode(conversation)
        if isinstance(encoded, Refused):
            reason = str(encoded)
            refused = [RefusedConversation(reason, conversation[:100])]
            yield np.empty(0, spec.dtype), Counts(refused={reason.partition(":")[0]: 1}, first_refused=refused)
            continue
        check_ids(encoded.tokens & ID_MASK, spec)
        counts = Counts(
            num_documents=1,
            num_conversations=1,
            num_chat_tokens=len(encoded.tokens),
            num_trained=int(np.count_nonzero(encoded.tokens & TRAINED)),
            strings=encoded.strings,
            left_out=encoded.left_out,
            terminators=dict.fromkeys(sorted(encoded.terminators), 1),
            inner=dict.fromkeys(sorted(encoded.inner), 1),
        )
        yield encoded.tokens, counts


def join(files: Iterable[tuple[Path, str]], target: Path) -> str:
    """Move the contents of files, in order, to a new file and return its SHA-256.

    Args:
        files: Each with the SHA-256 that it must have.
        target: The new file.

    Raises:
        StageError: a file has another content.
    """
    digest = hashlib.sha256()
    with target.open("wb") as joined:
        for path, sha256 in files:
            of_file = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    joined.write(chunk)
                    digest.update(chunk)
                    of_file.update(chunk)
            compare(path, sha256, of_file.hexdigest(), WRITTEN)
            path.unlink()  # at once, so that the disk has the tokens once
    return digest.hexdigest()


class RowWriter:
    """Cuts a stream of tokens into rows; how the stream is divided into chunks makes no difference.

    Args:
        stream: Where to write the rows.
        seq_length: Tokens of a row.
        max_batch_tokens: Of a record batch, which has at least one row.
    """

    def __init__(self, stream: arrow.StreamWriter, seq_length: int, max_batch_tokens: int = MAX_BATCH_TOKENS) -> None:
        self.num_tokens, self.num_padding = 0, 0
        self._seq_length = seq_length
        self._stream = stream
        # (rows * seq_length,) int32: the tokens of a record batch, filled again after each one.
        self._batch = np.empty(max(1, max_batch_tokens // seq_length) * seq_length, np.int32)
        self._filled = 0

    def add_file(self, path: Path, spec: TokenizerSpec) -> None:
        """Append all tokens of a file that `encode` wrote to the stream."""
        for tokens in _read(path, spec.dtype, len(self._batch)):
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


class MarkedRowWriter:
    """Cuts documents into rows, and keeps each conversation in one row; rows also say what is trained.

    A conversation goes to the fullest of some open rows that has room for it (best fit). What stays free in a row is
    filled with EOS: a document of its own, which is not trained. Documents fill rows of their own, as in `RowWriter`.

    Args:
        stream: Where to write the rows.
        seq_length: Tokens of a row.
        eos_token_id: For what stays free.
        max_batch_tokens: Of the open rows, and of a record batch; at least one row.
    """

    def __init__(
        self, stream: arrow.StreamWriter, seq_length: int, eos_token_id: int, max_batch_tokens: int = MAX_BATCH_TOKENS
    ) -> None:
        self.num_tokens, self.num_padding = 0, 0
        self._stream, self._seq_length, self._eos = stream, seq_length, eos_token_id
        self._num_rows = max(1, min(NUM_OPEN, max_batch_tokens // seq_length))
        self._open: list[list[NDArray[np.uint32]]] = []
        """Rows of conversations, in the order in which they were begun."""
        self._room: list[int] = []
        """Tokens that are free in each of them."""
        self._documents: list[NDArray[np.uint32]] = []
        """Of the row of documents that is not full yet."""
        self._done: list[NDArray[np.uint32]] = []

    def add_file(self, path: Path, spec: TokenizerSpec) -> None:
        """Append all documents and conversations of a file that `encode` wrote."""
        rest = np.empty(0, np.uint32)  # of a conversation whose end is in the next chunk
        for chunk in _read(path, spec.dtype, self._num_rows * self._seq_length):
            tokens = np.concatenate([rest, chunk])
            starts = np.flatnonzero(tokens & START)
            bounds = [*dict.fromkeys([0, *starts.tolist()]), len(tokens)]
            if rest_begins := len(starts) and tokens[starts[-1]] & WHOLE:
                bounds.pop()
            self._add([tokens[begin:end] for begin, end in pairwise(bounds)])
            rest = tokens[bounds[-1] :] if rest_begins else tokens[:0]
        self._add([rest] if len(rest) else [])

    def close(self) -> Shard:
        """Write the last rows. None is dropped."""
        for row in [*self._open, *([self._documents] if self._documents else [])]:
            self._finish(row)
        self._write()
        return self._stream.close()

    def _add(self, documents: Iterable[NDArray[np.uint32]]) -> None:
        """Append documents, the first of which may be the rest of one."""
        for document in documents:
            self.num_tokens += len(document)
            if document[0] & WHOLE and document[0] & START:
                self._place(document)
            else:
                self._fill(document)

    def _place(self, conversation: NDArray[np.uint32]) -> None:
        fits = [index for index, room in enumerate(self._room) if room >= len(conversation)]
        if fits:
            chosen = min(fits, key=lambda index: self._room[index])
        else:
            if len(self._open) == self._num_rows:
                self._close_row(min(range(len(self._room)), key=lambda index: self._room[index]))
            chosen = len(self._open)
            self._open.append([])
            self._room.append(self._seq_length)
        self._open[chosen].append(conversation)
        self._room[chosen] -= len(conversation)
        if not self._room[chosen]:
            self._close_row(chosen)

    def _close_row(self, index: int) -> None:
        del self._room[index]
        self._finish(self._open.pop(index))

    def _fill(self, document: NDArray[np.uint32]) -> None:
        while len(document):
            room = self._seq_length - sum(map(len, self._documents))
            self._documents.append(document[:room])
            document = document[room:]
            if len(self._documents[-1]) == room:
                self._finish(self._documents)
                self._documents = []

    def _finish(self, documents: list[NDArray[np.uint32]]) -> None:
        padding = np.full(self._seq_length - sum(map(len, documents)), self._eos, np.uint32)
        padding[:1] |= START
        self.num_padding += len(padding)
        self._done.append(np.concatenate([*documents, padding]))
        if len(self._done) == self._num_rows:
            self._write()

    def _write(self) -> None:
        if not self._done:
            return
        tokens = np.concatenate(self._done)
        columns = [
            arrow.from_numpy((tokens & ID_MASK).astype(np.int32)),
            arrow.from_bits(tokens & TRAINED > 0),
            arrow.from_bits(tokens & START > 0),
        ]
        self._stream.write(*(pa.FixedSizeListArray.from_arrays(column, self._seq_length) for column in columns))
        self._done = []


def _read(path: Path, dtype: np.dtype[Any], size: int) -> Iterator[NDArray[Any]]:
    """The tokens of a file that `encode` wrote, in chunks of `size`: those of a split may not fit into memory."""
    with path.open("rb") as file:
        # Not by numpy.fromfile, which takes an error of the disk for the end of the file.
        while chunk := file.read(size * dtype.itemsize):
            yield np.frombuffer(chunk, dtype)
