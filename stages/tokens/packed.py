"""The packed tokens, data/tokens/: where they are, how many rows there are, how long each is, and what encoded them."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from stages.artifacts.dataset import STATE, Dataset
from stages.artifacts.errors import StageError
from stages.artifacts.origin import Origin
from stages.artifacts.publish import sha256_file, sha256_json
from stages.artifacts.record import Record

TOKENS = Path("data/tokens")
TRAIN = TOKENS / "train"
VALIDATION = TOKENS / "validation"
METRICS = Path("data/pack.json")


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
    def read(cls, directory: Path) -> "PackedTokens":
        """Read the metadata of `TRAIN` or `VALIDATION`.

        Raises:
            StageError: it is missing or has been changed, or a file that it lists is missing.
        """
        dataset = Dataset.read(directory, "pack")
        try:
            seq_length = dataset.features["input_ids"]["length"]
        except (KeyError, TypeError):
            raise StageError(f"{directory} has no rows of input_ids: run `dvc repro -f -s pack`") from None
        digests = {directory / shard.filename: shard.sha256 for shard in dataset.shards}
        for path in digests:
            if not path.is_file():
                raise StageError(f"{path} is missing: run `dvc repro -f -s pack`")
        return cls(digests, dataset.fingerprint, dataset.num_rows, seq_length)

    def verify(self) -> None:
        """Read every file and compare it with its digest.

        Raises:
            StageError: naming the file that is damaged.
        """
        for path, digest in self.digests.items():
            if sha256_file(path) != digest:
                raise damaged_tokens(path)


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


def damaged_tokens(path: Path) -> StageError:
    """The error for a file of tokens whose content is not that of `state.json`."""
    # -f: DVC compares sizes and times first, and after a fault of the disk both may be the same. -s: this stage alone.
    return StageError(f"{path} is damaged: its SHA-256 is not the one in {STATE}: run `dvc repro -f -s pack`")
