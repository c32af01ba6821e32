"""Rows of tokens, memory-mapped."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stages.artifacts.command import StageError
from stages.artifacts.publish import read_json


class TokenRows:
    """The `input_ids` of a packed dataset directory, read where they lie: no row is copied before it is asked for."""

    def __init__(self, directory: Path) -> None:
        try:
            state = read_json(directory / "state.json")
            tables = [_open(directory / entry["filename"]) for entry in state["_data_files"]]
        except FileNotFoundError as error:
            raise StageError(f"{error.filename} is missing: run `dvc repro pack`") from None
        self.digest: str = state["_fingerprint"]
        """Identity of the content."""
        chunks = [chunk for table in tables for chunk in table.column("input_ids").chunks if len(chunk)]
        self._chunks = [_values(chunk.flatten()).reshape(len(chunk), -1) for chunk in chunks]
        self._ends = np.cumsum([len(chunk) for chunk in self._chunks], dtype=np.int64)
        self.seq_length: int = self._chunks[0].shape[1] if self._chunks else 0
        """Tokens a row."""

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._chunks else 0

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int32]:
        """The rows at `indices`, in that order: (len(indices), seq_length) int32."""
        result = np.empty((len(indices), self.seq_length), dtype=np.int32)
        which = np.searchsorted(self._ends, indices, side="right")
        for position, (chunk, index) in enumerate(zip(which, indices, strict=True)):
            start = self._ends[chunk - 1] if chunk else 0
            result[position] = self._chunks[chunk][index - start]
        return result


def _values(array: pa.Int32Array) -> NDArray[np.int32]:
    """The values of an array, where they lie. `to_numpy` would import pandas."""
    return np.frombuffer(array.buffers()[1], np.int32, len(array), offset=4 * array.offset)


def _open(path: Path) -> pa.Table:
    try:
        return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid as error:
        raise StageError(f"{path} is no whole Arrow file ({error}): run `dvc repro -f pack`") from None
