"""Which items of a task are in the documents to train on: by 13 consecutive words, as in appendix C of the GPT-3 paper.

An item is a question and its right answer. One gram that a document has too is enough. Case and punctuation make no
difference. Left out are documents that are held out, and those that `deduplicate` found.

The grams of all items are in memory. Workers read the documents, a split of the corpus each, and what a split has of
these grams is kept, so that the next run does not read it again.
"""

import hashlib
import tempfile
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stages.base import code, publish
from stages.base.dataset import CORPUS, Dataset
from stages.base.errors import StageError
from stages.base.files import check_files
from stages.base.packed import METRICS, PackMetrics
from stages.duplicates.shingles import Hashes, of_texts, shingles_of
from stages.duplicates.signatures import document
from stages.tokenizing.packing import Side, batches_of, without
from stages.work import arrow, reuse, skipped, workers

NUM_WORDS = 13
_FILTER_BITS = 24
"""The upper bits of a hash, by which nearly all grams of a document are found to be of no item."""


class SearchTask(NamedTuple):
    """A split of the corpus whose documents are searched."""

    shard: Path
    sha256: str
    """Of the shard."""
    skipped: bytes
    """Rows that are left out, as int64."""
    held_out: float
    """The share of the documents that their content holds out."""
    grams: Path
    """The file of what is looked for."""
    target: Path
    """The file to write: a byte for each of these grams, 1 where a document has it."""
    store: "reuse.Store[int]"
    key: str
    """In the store."""


def find(items: dict[str, list[str]], tokens: str, runtime: workers.Runtime) -> dict[str, list[bool | None]]:
    """Whether each item is in the training documents; None: it is too short to tell.

    Args:
        items: The texts of those of each task.
        tokens: Fingerprint of the tokens that were trained on, and of those that were held out.
        runtime: Where documents are searched.

    Raises:
        StageError: the corpus is missing, was changed, or is not what was trained on.
    """
    grams = {task: grams_of(texts) for task, texts in items.items()}
    wanted = np.unique(np.concatenate([np.empty(0, np.uint64), *chain.from_iterable(grams.values())]))
    is_found = search_corpus(wanted, tokens, runtime) if len(wanted) else np.empty(0, np.bool_)
    return {
        task: [bool(is_found[np.searchsorted(wanted, own)].any()) if len(own) else None for own in of_task]
        for task, of_task in grams.items()
    }


def grams_of(texts: list[str]) -> list[Hashes]:
    """The grams of each item of a task, without those of its template: of more than a tenth of all items.

    In a small task, of more than ten items; in a very small one, of more than half of them, and of two.
    """
    grams = [shingles_of(text, NUM_WORDS) for text in texts]
    every, counts = np.unique(np.concatenate([np.empty(0, np.uint64), *grams]), return_counts=True)
    number = len(texts)
    of_template = every[counts > max(2, min(number // 2, max(10, number // 10)))]
    return [np.setdiff1d(own, of_template, assume_unique=True) for own in grams]


def search_corpus(wanted: Hashes, tokens: str, runtime: workers.Runtime) -> NDArray[np.bool_]:
    """Which of these grams, (n,) in order, the documents to train on have: (n,)."""
    corpus, packed = Dataset.read(CORPUS, "extract"), PackMetrics.read(METRICS)
    skips, store = skipped.read(corpus), reuse.Store(reuse.root(), int)
    if (packed.source, packed.fingerprint) != (skips.fingerprint, tokens):
        raise StageError(f"{CORPUS} is not what the model was trained on: run `dvc repro score`")
    store.path.mkdir(parents=True, exist_ok=True)
    # In the store, which workers on other machines see, and which removes what a killed run leaves there.
    with tempfile.TemporaryDirectory(dir=store.path, suffix=".tmp") as directory:
        grams = Path(directory, "grams.npy")
        np.save(grams, wanted)
        decides = ["contamination", publish.sha256_file(grams), code.digest_with_packages(__name__)]
        tasks = [
            SearchTask(
                CORPUS / shard.filename, shard.sha256, rows, held_out, grams, Path(directory, shard.filename), store,
                publish.sha256_json([*decides, shard.sha256, hashlib.sha256(rows).hexdigest(), held_out]),
            )
            for shard, rows in zip(corpus.shards, skips.rows, strict=True)
            if (held_out := packed.train_shards.get(shard.filename)) is not None
        ]  # fmt: skip
        is_found, sizes = np.zeros(len(wanted), np.bool_), [task.shard.stat().st_size for task in tasks]
        workers.tracked_map(search, tasks, sizes, runtime, "contamination")
        for task in tasks:
            is_found |= np.fromfile(task.target, np.bool_)
    return is_found


def search(task: SearchTask) -> None:
    """Write which grams a split has, or fetch that from the store."""
    if task.store.fetch(task.key, task.target) is not None:
        return
    wanted, may_be = _load(task.grams)
    is_found = np.zeros(len(wanted), np.bool_)
    for offset, rows in batches_of(task.shard, task.skipped):
        batch = without(arrow.read_batch(task.shard, offset), rows)
        if task.held_out:
            batch, _ = Side(task.held_out, is_held_out=False).chosen(batch)
        strings, column = arrow.strings_of(batch)
        documents = [document(row, column, left_out="") for row in strings.to_pylist()]
        for _, grams, _, _ in of_texts(documents, NUM_WORDS):
            found = grams[may_be[grams >> np.uint64(64 - _FILTER_BITS)]]
            places = np.searchsorted(wanted, found) % len(wanted)
            is_found[places[wanted[places] == found]] = True
    check_files({task.shard: task.sha256}, arrow.CHANGED)
    task.target.write_bytes(is_found.tobytes())
    task.store.put(task.key, task.target, publish.sha256_file(task.target), int(is_found.sum()))


@lru_cache(maxsize=1)  # for all splits
def _load(path: Path) -> tuple[Hashes, NDArray[np.bool_]]:
    """What is looked for, and for each value of the upper bits whether one of these has it."""
    wanted: Hashes = np.load(path)
    may_be = np.zeros(1 << _FILTER_BITS, np.bool_)
    may_be[wanted >> np.uint64(64 - _FILTER_BITS)] = True
    return wanted, may_be
