"""Find the documents that are equal or similar to another one, which stays. `pack` skips them.

Reads    data/corpus/
Writes   data/duplicates/: rows of the corpus that are skipped, each with the row that stays, and their similarity
         data/deduplicate.json: counts by source, the largest groups, examples
Example  dvc exp run -S deduplicate=near deduplicate
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from stages.base import code, command, publish
from stages.base.dataset import CORPUS, Dataset
from stages.base.files import JsonFile
from stages.base.origin import DATA_METRICS, Origin
from stages.base.params_file import load_params
from stages.base.summary import table
from stages.duplicates import finding, signatures
from stages.duplicates.finding import Dropped, SignedCorpus
from stages.duplicates.shingles import shingles_of
from stages.duplicates.signatures import SignTask
from stages.work import arrow, reuse, skipped, workers
from stages.work.skipped import DUPLICATES

METRICS = DATA_METRICS["deduplicate"]
NUM_EXAMPLES, NUM_GROUPS = 20, 10
LONGEST_SHOWN = 300
"""Characters of an example."""


@dataclass(frozen=True)
class DeduplicateParams:
    """What decides which documents are skipped."""

    deduplicate: Literal["exact", "near"] | None
    """Which documents are skipped. exact: those that are equal to another one. near: also similar ones. null: none."""
    dedup_threshold: Annotated[float, Field(ge=0.5, lt=1)]
    """Jaccard similarity from which on two documents are similar, of the sets of five consecutive words."""


@dataclass(frozen=True)
class DeduplicateRuntime(reuse.Runtime):
    """What changes no result."""


@dataclass(frozen=True)
class Found:
    """Of some documents."""

    documents: int
    equal: int
    """That are skipped, as another one has the same bytes."""
    similar: int
    """That are skipped, as they are similar to another one."""


@dataclass(frozen=True)
class Example:
    """A document that is skipped, and the one that stays in its place."""

    similarity: float
    skipped: str
    """Its beginning; of a conversation that of its JSON."""
    split: int
    row: int
    kept: str
    kept_split: int
    kept_row: int


@dataclass(frozen=True)
class Group:
    """A document that stays, and those that are skipped for it."""

    skipped: int
    kept: str
    """Its beginning."""
    split: int
    row: int


@dataclass(frozen=True)
class DuplicateMetrics(JsonFile):
    """`data/deduplicate.json`."""

    STAGE: ClassVar[str] = "deduplicate"

    all: Found
    sources: dict[str, Found]
    """By source; none: the corpus is of all files."""
    largest: list[Group]
    examples: list[Example]
    source: str
    """Fingerprint of the corpus."""
    fingerprint: str
    """Of the corpus and of what is skipped of it."""
    origin: Origin


def main() -> None:
    """Run the stage."""
    command.parser(__doc__).parse_args()
    with publish.lock(DUPLICATES):
        print(deduplicate(load_params(DeduplicateParams), load_params(DeduplicateRuntime, "runtime")))


def deduplicate(params: DeduplicateParams, runtime: DeduplicateRuntime) -> str:
    """Write the rows to skip and the metrics; return a table that describes them.

    Raises:
        StageError: the corpus is missing, or was changed.
    """
    corpus = Dataset.read(CORPUS, "extract")
    with publish.directory(DUPLICATES) as directory:
        dropped, num_reused = find(params, runtime, corpus, directory) if params.deduplicate else (finding.NOTHING, 0)
        rows = RowReader(corpus)
        splits, kept_splits = map(rows.split_of, (dropped.documents, dropped.kept))
        shards = []
        for index, shard in enumerate(corpus.shards):
            own = splits == index
            written = skipped.write(
                directory / arrow.shard_name(index, len(corpus.shards)),
                dropped.documents[own] - rows.offsets[index],
                dropped.is_equal[own],
                kept_splits[own],
                dropped.kept[own] - rows.offsets[kept_splits[own]],
                dropped.similarity[own],
            )
            shards.append(written._replace(source=shard.source))
        duplicates = Dataset(skipped.FEATURES, shards)
        duplicates.write(directory)
        metrics = describe(params, corpus, dropped, rows, skipped.fingerprint(corpus, duplicates))
        metrics.write(METRICS)
    found = metrics.all
    num_dropped = found.equal + found.similar
    if params.deduplicate is None:
        return table((found.documents, "documents", "all are kept, as deduplicate is null"))
    return table(
        (found.documents - num_dropped, "documents", f"kept of {found.documents:,}"),
        (num_dropped, "dropped", f"{found.equal:,} equal, {found.similar:,} similar"),
        (f"{num_reused} of {sum(shard.rows > 0 for shard in corpus.shards)}", "splits reused", ""),
    )


def describe(
    params: DeduplicateParams, corpus: Dataset, dropped: Dropped, rows: "RowReader", fingerprint: str
) -> DuplicateMetrics:
    """The content of `data/deduplicate.json`."""
    splits = rows.split_of(dropped.documents)

    def count(indices: Sequence[int]) -> Found:
        own = np.isin(splits, indices)
        equal = int(np.count_nonzero(dropped.is_equal[own]))
        total = sum(corpus.shards[index].rows for index in indices)
        return Found(total, equal, int(np.count_nonzero(own)) - equal)

    of_source: dict[str | None, list[int]] = {}
    for index, shard in enumerate(corpus.shards):
        of_source.setdefault(shard.source, []).append(index)
    kept, sizes = np.unique(dropped.kept, return_counts=True)
    largest = np.argsort(-sizes, kind="stable")[:NUM_GROUPS]
    return DuplicateMetrics(
        all=count(range(len(corpus.shards))),
        sources={source: count(indices) for source, indices in of_source.items() if source},
        largest=[Group(int(sizes[index]), *rows.show(int(kept[index]))) for index in largest.tolist()],
        examples=[
            Example(
                round(float(dropped.similarity[index]), 4),
                *rows.show(int(dropped.documents[index])),
                *rows.show(int(dropped.kept[index])),
            )
            for index in choose_examples(dropped)
        ],
        source=corpus.fingerprint,
        fingerprint=fingerprint,
        origin=Origin.of("stages.deduplicate", params),
    )


def choose_examples(dropped: Dropped) -> list[int]:
    """The indices of some documents that leave: evenly over all similarities below 1, then the others in this order.

    Many pairs share all shingles, or are equal, and show nothing about the threshold.
    """
    order = np.lexsort((dropped.documents, dropped.similarity, dropped.is_equal))
    values = dropped.similarity[order[: np.count_nonzero(~dropped.is_equal & (dropped.similarity < 1))]]
    targets = np.linspace(values[0], values[-1], NUM_EXAMPLES) if len(values) else values
    positions = [*dict.fromkeys([*np.searchsorted(values, targets).tolist(), *range(len(order))])][:NUM_EXAMPLES]
    return [int(order[position]) for position in sorted(positions)]


class RowReader:
    """Reads rows of the corpus by their numbers, over all splits."""

    def __init__(self, corpus: Dataset) -> None:
        self.offsets = np.cumsum([0, *(shard.rows for shard in corpus.shards)])
        self._paths = [CORPUS / shard.filename for shard in corpus.shards]
        self._batches = cache(self._find_batches)

    def split_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index of the split of each document: (n,)."""
        return np.searchsorted(self.offsets, documents, "right") - 1

    def read(self, document: int) -> tuple[str, int]:
        """The string of a document, and in which column of the corpus it is."""
        split = int(self.split_of(np.array([document]))[0])
        row = document - int(self.offsets[split])
        begins, batches = self._batches(split)
        batch = int(np.searchsorted(begins, row, "right")) - 1
        strings, column = arrow.strings_of(arrow.read_batch(self._paths[split], batches[batch]))
        return strings[row - int(begins[batch])].as_py(), column

    def show(self, document: int) -> tuple[str, int, int]:
        """The beginning of a document, its split, and its row there."""
        split = int(self.split_of(np.array([document]))[0])
        return self.read(document)[0][:LONGEST_SHOWN], split, document - int(self.offsets[split])

    def _find_batches(self, split: int) -> tuple[NDArray[np.int64], list[int]]:
        """The first row of each record batch of a split, and where the batch is in the file."""
        offsets = arrow.batch_offsets(self._paths[split])
        sizes = [len(arrow.read_batch(self._paths[split], offset)) for offset in offsets]
        return np.cumsum([0, *sizes])[:-1], offsets


def find(
    params: DeduplicateParams, runtime: DeduplicateRuntime, corpus: Dataset, directory: Path
) -> tuple[Dropped, int]:
    """What is dropped, and of how many splits with documents the store had signatures."""
    store = reuse.Store(reuse.root(), int)
    is_near = params.deduplicate == "near"
    code_digest = code.digest_with_packages("stages.duplicates.signatures")
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        tasks = [
            SignTask(
                shard=CORPUS / shard.filename,
                sha256=shard.sha256,
                has_signatures=is_near,
                target=Path(temporary, f"signed-{index}"),
                store=store,
                key=publish.sha256_json(["deduplicate", shard.sha256, is_near, code_digest]),
            )
            for index, shard in enumerate(corpus.shards)
        ]
        sizes = [task.shard.stat().st_size for task in tasks]
        reused = workers.tracked_map(signatures.sign, tasks, sizes, runtime, "deduplicate")
        # Those without rows are all equal.
        num_reused = sum(each and shard.rows > 0 for shard, each in zip(corpus.shards, reused, strict=True))
        splits = [signatures.read(task.target) for task in tasks]
        for shard, split in zip(corpus.shards, splits, strict=True):
            shard.check_rows(len(split.heads))
        sources = [*dict.fromkeys(shard.source for shard in corpus.shards)]
        of_corpus = SignedCorpus(splits, [sources.index(shard.source) for shard in corpus.shards])
        rows = RowReader(corpus)
        threshold = params.dedup_threshold if is_near else None
        dropped = finding.find(of_corpus, threshold, similarity_of(rows), Path(temporary))
    store.trim(int(runtime.reuse_gib * 2**30))
    return dropped, num_reused


def similarity_of(rows: RowReader) -> Callable[[int, int], float]:
    """The true similarity of two documents."""

    @lru_cache(maxsize=512)  # a document that stays is compared with several
    def shingles(document: int) -> NDArray[np.uint64]:
        return shingles_of(signatures.document(*rows.read(document)))

    def similarity(one: int, other: int) -> float:
        first, second = shingles(one), shingles(other)
        shared = len(np.intersect1d(first, second, assume_unique=True))
        return shared / max(1, len(first) + len(second) - shared)

    return similarity


if __name__ == "__main__":
    command.run(main, "signatures that are finished are in data/.reuse, and the next run continues with them")
