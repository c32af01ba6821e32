"""Which documents are trained on, and which are held out: splits of the corpus, or documents by their content."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from stages.base.dataset import CORPUS, Dataset, Shard
from stages.base.errors import StageError
from stages.base.origin import DATA_METRICS
from stages.base.packed import TRAIN, VALIDATION
from stages.tokenizing import packing
from stages.work import skipped

_MAX_TIMES = 2
"""More than so many times their share of the documents is not held out as the last splits."""


class Split(NamedTuple):
    """A split of the corpus, and what is skipped of it."""

    shard: Shard
    skipped: bytes
    """Rows, in order, as int64."""

    @property
    def path(self) -> Path:
        return CORPUS / self.shard.filename

    @property
    def num_skipped(self) -> int:
        return len(self.skipped) // 8

    @property
    def rows(self) -> int:
        """Those that are not skipped."""
        return self.shard.rows - self.num_skipped


class TokenShard(NamedTuple):
    """What becomes a shard of data/tokens: some splits of the corpus, or some of their documents."""

    directory: str
    """`train` or `validation`."""
    source: str | None
    splits: list[Split]
    """Of the corpus."""
    side: packing.Side | None
    """The documents in them; None: all."""


def find_token_shards(
    dataset: Dataset, skips: skipped.Skipped, validation_fraction: float | None, validation_splits: int
) -> list[TokenShard]:
    """The splits of the corpus by what becomes of them: those to train on first.

    Args:
        dataset: The corpus.
        skips: What `deduplicate` skips of it.
        validation_fraction: As in params.yaml.
        validation_splits: As in params.yaml.

    Raises:
        StageError: there is no text, none to train on, or none to validate on.
    """
    if not dataset.num_rows:
        raise StageError(f"{CORPUS} contains no text: put files with text into raw_dir, or lower min_chars")
    sources: dict[str | None, list[Split]] = {}
    for shard, rows in zip(dataset.shards, skips.rows, strict=True):
        sources.setdefault(shard.source, []).append(Split(shard, rows))
    if validation_fraction is not None:
        divided = [_divide_documents(*item, validation_fraction) for item in sources.items()]
    else:
        num_splits = len(dataset.shards) // len(sources)
        if validation_splits >= num_splits:
            raise StageError(
                f"validation_splits is {validation_splits} of num_splits = {num_splits} splits, which leaves "
                "none to train on: lower it"
            )
        _check_documents(sources)
        # Entire splits, so no line of a file gives rows to both sides.
        divided = [_divide(*item, num_splits - validation_splits) for item in sources.items()]
    return [*(train for train, _ in divided), *(held_out for _, held_out in divided)]


def _check_documents(sources: Mapping[str | None, list[Split]]) -> None:
    """Raise a StageError for a source without documents."""
    for source, splits in sources.items():
        if any(split.rows for split in splits):
            continue
        of_source = f" of source {source}" if source else ""
        if any(split.shard.rows for split in splits):
            raise StageError(
                f"deduplicate skips all documents{of_source}, as others are equal or similar: leave it out of sources, "
                "name it first there, or set deduplicate to null"
            )
        raise StageError(
            f"there is no text{of_source}: extract made no row of its files, and {DATA_METRICS['extract']} says why"
        )


def _divide(source: str | None, splits: list[Split], num_train: int) -> tuple[TokenShard, TokenShard]:
    """What of a source is trained on, and what is held out: its splits after the first `num_train` ones.

    Documents instead, by their content, where these splits have none, all, or far more than their share. A file that
    is not cut is in one split, and a small one has fewer parts than there are splits.
    """
    train, held_out = splits[:num_train], splits[num_train:]
    fraction = len(held_out) / len(splits)
    found, total = (sum(split.rows for split in some) for some in (held_out, splits))
    # A document is the least that can be held out.
    if not held_out or (0 < found < total and found <= _MAX_TIMES * max(1, fraction * total)):
        return TokenShard(TRAIN.name, source, train, None), TokenShard(VALIDATION.name, source, held_out, None)
    of_source = f" of source {source}" if source else ""
    chosen = packing.dividing_fraction([(split.path, split.skipped) for split in splits], fraction)
    if chosen is None:
        print(f"warning: nothing{of_source} is held out: there is only one document")
        return TokenShard(TRAIN.name, source, splits, None), TokenShard(VALIDATION.name, source, [], None)
    print(
        f"note: {chosen:.0%} of the documents{of_source} are held out by their content: the last validation_splits = "
        f"{len(held_out)} of num_splits = {len(splits)} splits have {found} of {total}; validation_fraction changes it"
    )
    return _divide_documents(source, splits, chosen)


def _divide_documents(source: str | None, splits: list[Split], fraction: float) -> tuple[TokenShard, TokenShard]:
    """What of a source is trained on, and the share of its documents that is held out, by their content."""
    return (
        TokenShard(TRAIN.name, source, splits, packing.Side(fraction, False)),
        TokenShard(VALIDATION.name, source, splits, packing.Side(fraction, True)),
    )
