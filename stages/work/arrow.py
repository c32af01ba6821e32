"""Directories that `datasets.load_from_disk` reads, written without `datasets`: Arrow streams and two JSON files.

Record batches are written one by one, in the encapsulated format of Arrow's IPC streams, so that memory holds one of
them, and a record that turns out to be unreadable can be cut off again.
"""

import hashlib
import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stages.base.dataset import Shard
from stages.base.errors import explained
from stages.base.files import damaged

Features = dict[str, Any]
"""The type of each column, by its name, as `datasets` writes them."""

FILE_MARK = b"ARROW1\0\0"
"""What the file format of Arrow begins with, before the stream."""
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""A message of length 0, which pyarrow writes on close, too."""

CHANGED = "it was changed while it was read, so run `dvc repro` again"
"""What to do about a shard that is no longer the one that was verified."""

TEXT: Features = {"text": {"dtype": "string", "_type": "Value"}}
"""The features of a corpus."""
WITH_CONVERSATIONS: Features = {**TEXT, "messages": TEXT["text"]}
"""The same where rules make conversations: of each row one is null. `messages` is JSON (stages/formats/records.py)."""


def token_features(seq_length: int, is_marked: bool = False) -> Features:
    """The features of rows of `seq_length` tokens.

    Args:
        seq_length: Tokens of a row.
        is_marked: Whether rows also say which of their tokens are trained, and which begin a document: a bit each.
    """
    kinds = {"input_ids": "int32"} | (dict.fromkeys(("is_trained", "is_start"), "bool") if is_marked else {})
    return {
        name: {"feature": {"dtype": kind, "_type": "Value"}, "length": seq_length, "_type": "List"}
        for name, kind in kinds.items()
    }


def schema(features: Features) -> pa.Schema:
    """The Arrow schema that `datasets` expects for one of the features above."""
    kinds = {
        name: pa.type_for_alias(feature["dtype"])
        if feature["_type"] == "Value"
        else pa.list_(pa.type_for_alias(feature["feature"]["dtype"]), feature["length"])
        for name, feature in features.items()
    }
    # `datasets` reads the features from this key; without it, it would derive them from the types.
    return pa.schema(kinds, metadata={"huggingface": json.dumps({"info": {"features": features}})})


def shard_name(index: int, num_shards: int) -> str:
    """The file name that `datasets` gives to a shard."""
    return f"data-{index:05d}-of-{num_shards:05d}.arrow"


def from_numpy(array: NDArray[Any]) -> pa.Array:
    """The same one-dimensional array for Arrow; no copy. `pa.array` would import pandas."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(array.dtype), len(array), [None, pa.py_buffer(array)])


def from_bits(array: NDArray[np.bool_]) -> pa.BooleanArray:
    """A one-dimensional array for Arrow, a bit for each value."""
    return pa.Array.from_buffers(pa.bool_(), len(array), [None, pa.py_buffer(np.packbits(array, bitorder="little"))])


def slices(rows: pa.Array, lengths: pa.Array, size: int) -> Iterator[pa.Array]:
    """Consecutive rows whose lengths are at most `size` together, or a single longer one."""
    ends = np.cumsum(np.from_dlpack(lengths), dtype=np.int64)  # `to_numpy` would import pandas
    first = 0
    while first < len(ends):
        limit = size + (ends[first - 1] if first else 0)
        last = max(int(np.searchsorted(ends, limit, "right")), first + 1)
        yield rows[first:last]
        first = last


class Mark(NamedTuple):
    """A place in a stream, to which it can be cut back."""

    position: int
    rows: int
    digest: "hashlib._Hash"
    """Of what precedes it."""


class StreamWriter:
    """An Arrow IPC stream that can be cut back to an earlier length.

    A `with` block closes the file on any error; only `close` makes it a complete stream. Its digest is that of what was
    to be written, not of what the file contains, so that whoever verifies the file finds any difference.
    """

    def __init__(self, path: Path, features: Features) -> None:
        self.path = path
        self.rows = 0
        self.schema = schema(features)
        # A worker that was lost may still write to its file, or may have put it into the store: start a new file.
        path.unlink(missing_ok=True)
        self._digest = hashlib.sha256()
        self._file = path.open("wb")
        self._append(self.schema.serialize())

    def __enter__(self) -> "StreamWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, *columns: pa.Array) -> None:
        """Append a record batch."""
        self.rows += len(columns[0])
        # `serialize` copies, so the caller may fill its buffer again.
        self._append(pa.record_batch([*columns], schema=self.schema).serialize())

    def write_column(self, rows: pa.Array, column: int) -> None:
        """Append a record batch of rows that have a value in one column."""
        kinds = enumerate(self.schema.types)
        self.write(*(rows if index == column else pa.nulls(len(rows), kind) for index, kind in kinds))

    def mark(self) -> Mark:
        """The current end of the stream, for `cut`."""
        return Mark(self._file.tell(), self.rows, self._digest.copy())

    def cut(self, mark: Mark) -> None:
        """Drop what was written after `mark`, which is used up."""
        position, self.rows, self._digest = mark
        self._file.seek(position)
        self._file.truncate()  # a shorter record may follow, or none

    def close(self) -> Shard:
        """End the stream."""
        # No fsync: `publish.directory` flushes the shards before it renames their directory.
        self._append(END_OF_STREAM)
        self._file.close()
        return Shard(self.path.name, self.rows, self._digest.hexdigest())

    def _append(self, data: Any) -> None:
        self._file.write(data)
        self._digest.update(data)


def find_batches(path: Path) -> Iterator[int]:
    """Where the record batches of an Arrow file or stream begin, in bytes; pyarrow raises what is wrong with it.

    Raises:
        ValueError: it has dictionaries.
    """
    with path.open("rb") as opened:
        pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    file = pa.BufferReader(pages)  # a body is skipped, not read
    if file.read(len(FILE_MARK)) != FILE_MARK:
        file.seek(0)
    pa.ipc.read_message(file)  # the schema
    while True:
        offset = file.tell()
        try:
            message = pa.ipc.read_message(file)
        except EOFError:  # the end of the stream: pyarrow has no list of batches in this format
            return
        if message.type != "record batch":
            raise ValueError(f"it has a {message.type}")
        pages.madvise(mmap.MADV_DONTNEED)  # or small batches would leave the entire file in the memory of the process
        yield offset


def batch_offsets(path: Path) -> list[int]:
    """The offset in bytes of each record batch of a shard, for `read_batch`.

    Raises:
        StageError: it has other content.
    """
    with explained(lambda problem: damaged(path, f"it is no stream of Arrow ({problem})", CHANGED)):
        return [*find_batches(path)]


def read_batch(path: Path, offset: int) -> pa.RecordBatch:
    """Read one record batch of a shard without copying it.

    Raises:
        StageError: there is none at the offset.
    """
    file = pa.memory_map(str(path))  # not closed: the batch refers to it, and both end together
    with explained(lambda problem: damaged(path, f"it has no record batch where it had one ({problem})", CHANGED)):
        schema = pa.ipc.read_schema(file)
        file.seek(offset)
        return pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)


def read_rows(path: Path) -> Iterator[tuple[pa.Array, int]]:
    """The strings of each record batch of a corpus, which are in one column; and which one."""
    for offset in batch_offsets(path):
        yield strings_of(read_batch(path, offset))


def strings_of(batch: pa.RecordBatch) -> tuple[pa.Array, int]:
    """The strings of a record batch of a corpus, and the column that has them."""
    column = next((index for index, values in enumerate(batch.columns) if not values.null_count), 0)
    return batch.column(column), column
