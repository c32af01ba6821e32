"""Directories that `datasets.load_from_disk` reads, written without `datasets`: Arrow streams and two JSON files.

Record batches are written one by one, in the encapsulated format of Arrow's IPC streams, so that memory holds one of
them, and a record that turns out to be unreadable can be cut off again.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from stages.artifacts import publish
from stages.artifacts.dataset import STATE, Dataset, Shard
from stages.artifacts.errors import StageError

Features = dict[str, Any]
"""The type of each column, by its name, as `datasets` writes them."""

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # a message of length 0, which pyarrow writes on close, too

TEXT: Features = {"text": {"dtype": "string", "_type": "Value"}}
"""The features of a corpus."""
TEXT_AND_SOURCE: Features = {**TEXT, "source": TEXT["text"]}
"""The same with `keep_source`."""


def token_features(seq_length: int) -> Features:
    """The features of rows of `seq_length` tokens, int32."""
    return {"input_ids": {"feature": {"dtype": "int32", "_type": "Value"}, "length": seq_length, "_type": "List"}}


def schema(features: Features) -> pa.Schema:
    """The Arrow schema that `datasets` expects for one of the features above."""
    kinds = {
        name: pa.string() if feature["_type"] == "Value" else pa.list_(pa.int32(), feature["length"])
        for name, feature in features.items()
    }
    # `datasets` reads the features from this key; without it, it would derive them from the types.
    return pa.schema(kinds, metadata={"huggingface": json.dumps({"info": {"features": features}})})


def shard_name(index: int, num_shards: int) -> str:
    """The file name that `datasets` gives to a shard."""
    return f"data-{index:05d}-of-{num_shards:05d}.arrow"


class StreamWriter:
    """An Arrow IPC stream that can be cut back to an earlier length.

    A `with` block closes the file on any error; only `close` makes it a complete stream.
    """

    def __init__(self, path: Path, features: Features) -> None:
        self.path = path
        self.rows = 0
        self.schema = schema(features)
        # A worker that was lost may still write to its file, or may have put it into the store: start a new file.
        path.unlink(missing_ok=True)
        self._file = path.open("wb")
        self._file.write(self.schema.serialize())

    def __enter__(self) -> "StreamWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, *columns: pa.Array) -> None:
        """Append a record batch."""
        self.rows += len(columns[0])
        # `serialize` copies, so the caller may fill its buffer again.
        self._file.write(pa.record_batch(list(columns), schema=self.schema).serialize())

    def mark(self) -> tuple[int, int]:
        """The current end of the stream, for `cut`."""
        return self._file.tell(), self.rows

    def cut(self, mark: tuple[int, int]) -> None:
        """Drop what was written after `mark`."""
        position, self.rows = mark
        self._file.seek(position)
        self._file.truncate()  # a shorter record may follow, or none

    def close(self) -> Shard:
        """End the stream."""
        # No fsync: `publish.directory` flushes the shards before it renames their directory.
        self._file.write(_END_OF_STREAM)
        self._file.close()
        return Shard(self.path.name, self.rows, publish.sha256_file(self.path))


def read_shards(directory: Path) -> list[Shard]:
    """Return the shards of a corpus, after their SHA-256 was compared with `state.json`.

    Raises:
        StageError: naming the shard that is missing or was changed.
    """
    shards = Dataset.read(directory, "extract").shards
    paths = [directory / shard.filename for shard in shards]
    if missing := [path for path in paths if not path.is_file()]:
        raise StageError(f"{missing[0]} is missing: run `dvc repro -f -s extract`")
    with ThreadPoolExecutor() as threads:  # hashing releases the interpreter's lock
        for path, shard, sha256 in zip(paths, shards, threads.map(publish.sha256_file, paths), strict=True):
            if sha256 != shard.sha256:
                raise StageError(
                    f"{path} is damaged: its SHA-256 is not that in {STATE}; run `dvc repro -f -s extract`"
                )
    return shards


def batch_offsets(path: Path) -> list[int]:
    """The offset in bytes of each record batch of a shard, for `read_batch`."""
    offsets: list[int] = []
    with pa.memory_map(str(path)) as file:
        pa.ipc.read_message(file)  # the schema
        while True:
            offset = file.tell()
            try:
                pa.ipc.read_message(file)
            except EOFError:  # the end of the stream: pyarrow has no list of batches in this format
                return offsets
            offsets.append(offset)


def read_batch(path: Path, offset: int) -> pa.RecordBatch:
    """Read one record batch of a shard without copying it."""
    file = pa.memory_map(str(path))  # not closed: the batch refers to it, and both end together
    schema = pa.ipc.read_schema(file)
    file.seek(offset)
    return pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
