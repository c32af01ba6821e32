"""Directories that `datasets.load_from_disk` reads, written without `datasets`: Arrow streams and two JSON files.

Record batches are written one by one, in the encapsulated format of Arrow's IPC streams, so that memory holds one of
them and a document that turns out to be unreadable can be cut off again.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from stages.artifacts import publish
from stages.artifacts.command import StageError

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
STATE = "state.json"

TEXT = {"text": {"dtype": "string", "_type": "Value"}}
"""The features of a corpus, as `datasets` writes them down."""
TEXT_AND_SOURCE = {**TEXT, "source": TEXT["text"]}
"""The same with `keep_source`."""


def token_features(seq_length: int) -> dict[str, Any]:
    """The features of rows of `seq_length` tokens, int32."""
    return {"input_ids": {"feature": {"dtype": "int32", "_type": "Value"}, "length": seq_length, "_type": "List"}}


def schema(features: dict[str, Any]) -> pa.Schema:
    """The Arrow schema that `datasets` expects for one of the features above."""
    kinds = {
        name: pa.string() if feature["_type"] == "Value" else pa.list_(pa.int32(), feature["length"])
        for name, feature in features.items()
    }
    return pa.schema(kinds, metadata={"huggingface": json.dumps({"info": {"features": features}})})


class Shard(NamedTuple):
    """A finished Arrow file, as `state.json` lists it."""

    filename: str
    rows: int
    sha256: str


def shard_name(index: int, num_shards: int) -> str:
    """The file name that `datasets` gives to a shard."""
    return f"data-{index:05d}-of-{num_shards:05d}.arrow"


class StreamWriter:
    """An Arrow IPC stream that can be cut back to an earlier length.

    Used as a context, it is closed at the end of it, whatever happens; only `close` makes it a whole stream.
    """

    def __init__(self, path: Path, features: dict[str, Any]) -> None:
        self.path = path
        self.rows = 0
        self.schema = schema(features)
        path.unlink(missing_ok=True)  # of a worker that is lost: it may still write, or have stored the file
        self._file = path.open("wb")
        self._file.write(self.schema.serialize())

    def __enter__(self) -> "StreamWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, *columns: pa.Array) -> None:
        """Append a record batch."""
        self.rows += len(columns[0])
        self._file.write(pa.record_batch(list(columns), schema=self.schema).serialize())

    def mark(self) -> tuple[int, int]:
        """Where the stream ends now, for `cut`."""
        return self._file.tell(), self.rows

    def cut(self, mark: tuple[int, int]) -> None:
        """Drop what was written after `mark`."""
        position, self.rows = mark
        self._file.seek(position)
        self._file.truncate()

    def close(self) -> Shard:
        """End the stream."""
        self._file.write(_END_OF_STREAM)
        self._file.close()
        return Shard(self.path.name, self.rows, publish.sha256_file(self.path))


def write_metadata(directory: Path, features: dict[str, Any], shards: Sequence[Shard]) -> None:
    """Write what makes a directory of shards a dataset: `dataset_info.json` and, last, `state.json`.

    `_fingerprint` is the SHA-256 of the features and of the shards' own SHA-256: equal content, equal fingerprint.
    """
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    publish.write_json(directory / "dataset_info.json", info)
    state: dict[str, Any] = {
        "_data_files": [shard._asdict() for shard in shards],
        "_fingerprint": publish.sha256_json([features, [shard.sha256 for shard in shards]]),
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    publish.write_json(directory / STATE, state)


def read_shards(directory: Path) -> list[Shard]:
    """Hold all shards of a dataset against `state.json` and return them.

    Raises:
        StageError: naming the shard that is missing or was changed.
    """
    shards = [Shard(**entry) for entry in publish.read_json(directory / STATE)["_data_files"]]
    paths = [directory / shard.filename for shard in shards]
    if missing := [path for path in paths if not path.is_file()]:
        raise StageError(f"{missing[0]} is missing: run `dvc repro -f extract`")
    with ThreadPoolExecutor() as threads:  # hashing releases the interpreter's lock
        for path, shard, sha256 in zip(paths, shards, threads.map(publish.sha256_file, paths), strict=True):
            if sha256 != shard.sha256:
                raise StageError(f"{path} is damaged: its SHA-256 is not that in {STATE}; run `dvc repro -f extract`")
    return shards


def batch_offsets(path: Path) -> list[int]:
    """Where each record batch of a shard begins, in bytes, for `read_batch`."""
    offsets: list[int] = []
    with pa.memory_map(str(path)) as file:
        pa.ipc.read_message(file)  # the schema
        while True:
            offset = file.tell()
            try:
                pa.ipc.read_message(file)
            except EOFError:
                return offsets
            offsets.append(offset)


def read_batch(path: Path, offset: int) -> pa.RecordBatch:
    """Read one record batch of a shard without copying it."""
    file = pa.memory_map(str(path))
    schema = pa.ipc.read_schema(file)
    file.seek(offset)
    return pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
