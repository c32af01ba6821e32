"""data/duplicates: the rows of the corpus that `deduplicate` found, and that `pack` skips. A shard for each split."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stages.base import publish
from stages.base.dataset import Dataset, Shard
from stages.base.errors import StageError
from stages.base.origin import DATA_METRICS, DataMetrics
from stages.work import arrow

DUPLICATES = Path("data/duplicates")
FEATURES: arrow.Features = {
    name: {"dtype": kind, "_type": "Value"}
    for name, kind in {
        "row": "int64",  # of the split, from 0
        "reason": "string",  # equal | similar
        "kept_split": "int64",
        "kept_row": "int64",  # that stays in its place
        "similarity": "float64",
    }.items()
}

Rows = NDArray[np.int64]


def write(
    path: Path, rows: Rows, is_equal: NDArray[np.bool_], kept_splits: Rows, kept_rows: Rows,
    similarity: NDArray[np.float64],
) -> Shard:  # fmt: skip
    """Write the rows of a split that are skipped, in order; (n,) each."""
    with arrow.StreamWriter(path, FEATURES) as stream:
        if len(rows):
            reasons = pa.array(["equal" if equal else "similar" for equal in is_equal.tolist()])
            kept = map(arrow.from_numpy, (kept_splits, kept_rows, similarity))
            stream.write(arrow.from_numpy(rows), reasons, *kept)
        return stream.close()


class _DuplicateMetrics(DataMetrics):
    STAGE = "deduplicate"


class Skipped(NamedTuple):
    """The rows of each split that are skipped."""

    rows: list[bytes]
    """Of each split, in order, as int64."""
    fingerprint: str
    """Of the corpus, and of what is skipped of it."""


def fingerprint(corpus: Dataset, duplicates: Dataset) -> str:
    """Of a corpus, and of what is skipped of it."""
    return publish.sha256_json([corpus.fingerprint, duplicates.fingerprint])


def read(corpus: Dataset) -> Skipped:
    """What `deduplicate` has found in a corpus.

    Raises:
        StageError: it is missing, was changed, or is of another corpus.
    """
    duplicates = Dataset.read(DUPLICATES, "deduplicate", contents=True)
    record = _DuplicateMetrics.read(DATA_METRICS["deduplicate"])
    found = fingerprint(corpus, duplicates)
    if (record.source, record.fingerprint) != (corpus.fingerprint, found):
        raise StageError(f"{DUPLICATES} is of another corpus: run `dvc repro -f -s deduplicate`")
    return Skipped([*map(_rows, duplicates.files(DUPLICATES))], found)


def _rows(path: Path) -> bytes:
    batches = (arrow.read_batch(path, offset) for offset in arrow.batch_offsets(path))
    return b"".join(np.from_dlpack(batch["row"]).tobytes() for batch in batches)
