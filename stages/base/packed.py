"""The packed tokens, data/tokens/: where they are, how many rows there are, how long each is, and what encoded them."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from stages.base.dataset import Dataset
from stages.base.errors import StageError
from stages.base.origin import Origin
from stages.base.publish import sha256_json
from stages.base.record import Record

TOKENS = Path("data/tokens")
TRAIN = TOKENS / "train"
VALIDATION = TOKENS / "validation"
METRICS = Path("data/pack.json")
# -f: DVC compares sizes and times first, and after a fault of the disk both may be the same. -s: this stage alone.
REMEDY = "run `dvc repro -f -s pack`"
"""About tokens that are damaged."""


@dataclass(frozen=True)
class PackedTokens:
    """One of the two datasets of rows, as its metadata describes it; no token is read."""

    digests: dict[Path, str]
    """The Arrow files, each with its SHA-256."""
    fingerprint: str
    """Digest of the content."""
    num_rows: int
    seq_length: int
    """Tokens per row."""

    @classmethod
    def read(cls, directory: Path, contents: bool = False) -> "PackedTokens":
        """Read the metadata of `TRAIN` or `VALIDATION`; with `contents`, compare the files with it, too.

        Raises:
            StageError: it is missing or has been changed, or a file that it lists is.
        """
        dataset = Dataset.read(directory, "pack", contents)
        try:
            seq_length = dataset.features["input_ids"]["length"]
        except (KeyError, TypeError):
            raise StageError(f"{directory} has no rows of input_ids: {REMEDY}") from None
        return cls(dataset.files(directory), dataset.fingerprint, dataset.num_rows, seq_length)


@dataclass(frozen=True)
class PartMetrics:
    """Of the documents for training, or of those for validation."""

    documents: int
    characters: int
    bytes: int
    """Of the text in UTF-8."""
    tokens: int
    """Including an EOS token for each document, and those of the partial row that is dropped."""
    characters_per_token: float | None
    """EOS tokens not counted; null: there is no text."""
    unknown_share: float | None
    """Of the tokens, EOS not counted, those that replace what the vocabulary cannot express; null: there is no text."""
    dropped_characters: int
    """That leave no token, not even the unknown one, or lose a part of their bytes."""
    rows: int


@dataclass(frozen=True)
class EncoderMetrics:
    """What encoded."""

    name: str
    """The library and its version: the fast one, or the one that transformers requires, the model's own."""
    slow_characters: int
    """Encoded by the model's own, because the document has a character whose tokens differ."""
    reason: str | None
    """Why the fast one is not used; null: it is used, or `fast_encoder` is false."""


@dataclass(frozen=True)
class PackMetrics(Record):
    """The content of `data/pack.json`."""

    STAGE: ClassVar[str] = "pack"

    train: PartMetrics
    validation: PartMetrics
    encoder: EncoderMetrics
    source: str
    """Fingerprint of the corpus."""
    fingerprint: str
    """Of the tokens, as `fingerprint` gives it."""
    origin: Origin


def fingerprint(train: str, validation: str) -> str:
    """Digest of the fingerprints of both datasets."""
    return sha256_json([train, validation])


def find_encoder() -> str | None:
    """What encoded the tokens of this project; None: there are none, or an older version of `pack` wrote them."""
    try:
        return PackMetrics.read(METRICS).encoder.name
    except StageError:
        return None
