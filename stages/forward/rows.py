"""Rows of tokens, memory-mapped.

The Arrow files are read in place: a dataset may be larger than memory, and the ranks of a machine share its pages.
`datasets` would serve too; 20 000 rows of 256 tokens take it 0.44 s as NumPy arrays and 0.66 s row by row, where this
takes 0.08 s, and its import adds 0.6 s to each start of a rank.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stages.base.dataset import STATE
from stages.base.errors import StageError, explained
from stages.base.packed import REMEDY, PackedTokens


class TokenRows:
    """The rows of a dataset of packed tokens. A row is copied only when it is asked for."""

    def __init__(self, directory: Path) -> None:
        """Open `data/tokens/train` or `data/tokens/validation`.

        Raises:
            StageError: a file is missing or truncated, or there are more or fewer rows than the metadata lists.
        """
        tokens = PackedTokens.read(directory)
        self.seq_length = tokens.seq_length
        """Tokens per row."""
        self.sources = tokens.sources
        """The rows of each source, in the order of the rows; none: they are of all files."""
        tables = [_open(path) for path in tokens.digests]
        # Empty chunks are left out: NumPy cannot infer the -1 of reshape(0, -1).
        columns = {
            name: [chunk.flatten() for table in tables for chunk in table.column(name).chunks if len(chunk)]
            for name in (tables[0].column_names if tables else [])
        }
        # Each (rows of the chunk, seq_length) int32, on the pages of the file.
        self._chunks = [_values(chunk).reshape(-1, self.seq_length) for chunk in columns.get("input_ids", [])]
        self._bits = [columns[name] for name in ("is_trained", "is_start") if name in columns]
        self._ends = np.cumsum([len(chunk) for chunk in self._chunks], dtype=np.int64)
        # The fingerprint does not cover the number of rows, and the length of a training follows from it.
        if len(self) != tokens.num_rows:
            raise StageError(f"{directory / STATE} lists {tokens.num_rows} rows, and there are {len(self)}: {REMEDY}")

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._chunks else 0

    def spread(self, limit: int | None) -> dict[str, NDArray[np.int64]]:
        """The indices of at most `limit` rows of each source (None: of all), spread evenly over all of its rows.

        Without sources, those of all files, as the source "".
        """
        found, start = {}, 0
        for source, size in (self.sources or {"": len(self)}).items():
            num_rows = min(size, limit or size)
            found[source] = start + np.arange(num_rows, dtype=np.int64) * size // max(1, num_rows)
            start += size
        return found

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int32]:
        """The rows at `indices`, in that order: (len(indices), seq_length) int32."""
        # A copy: torch.from_numpy warns of arrays that are not writable, as those of a mapped file are.
        result = np.empty((len(indices), self.seq_length), dtype=np.int32)
        for position, (chunk, index) in enumerate(self._places(indices)):
            result[position] = self._chunks[chunk][index]
        return result

    def marks(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]] | None:
        """Which tokens of these rows are trained, and which begin a document: (len(indices), seq_length) each.

        None: the rows do not say it, so all are trained, and documents end with EOS.
        """
        if not self._bits:
            return None
        places = self._places(indices)
        trained, starts = (
            np.stack([_bits(chunks[chunk], index * self.seq_length, self.seq_length) for chunk, index in places])
            for chunks in self._bits
        )
        return trained, starts

    def _places(self, indices: NDArray[np.int64]) -> list[tuple[int, int]]:
        """The chunk of each row, and its index there."""
        chunks = np.searchsorted(self._ends, indices, side="right")
        starts = np.concatenate([[0], self._ends])[chunks]
        return [*zip(chunks.tolist(), (indices - starts).tolist(), strict=True)]


def _values(array: pa.Int32Array) -> NDArray[np.int32]:
    """The values of an array without copying them. `to_numpy` would import pandas."""
    # Buffer 0 has the validity bits; a sliced array shares the buffer of the one it was cut from, hence the offset.
    return np.frombuffer(array.buffers()[1], np.int32, len(array), offset=4 * array.offset)


def _bits(array: pa.BooleanArray, first: int, count: int) -> NDArray[np.bool_]:
    """So many values of an array of bits."""
    first += array.offset
    packed = np.frombuffer(array.buffers()[1], np.uint8)[first // 8 : -(-(first + count) // 8)]
    return np.unpackbits(packed, bitorder="little")[first % 8 :][:count].view(np.bool_)


def _open(path: Path) -> pa.Table:
    with explained(lambda problem: StageError(f"{path} is not a complete Arrow file ({problem}): {REMEDY}")):
        return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
