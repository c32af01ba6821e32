"""The packed tokens, data/tokens/: where they are, how many rows there are, and how long each is."""

from dataclasses import dataclass
from pathlib import Path

from stages.artifacts.dataset import Dataset, Shard
from stages.artifacts.errors import StageError

TOKENS = Path("data/tokens")
TRAIN = TOKENS / "train"
VALIDATION = TOKENS / "validation"


@dataclass(frozen=True)
class PackedTokens:
    """One of the two datasets of rows, as its metadata describes it; no token is read."""

    shards: list[Shard]
    fingerprint: str
    """Digest of the content."""
    num_rows: int
    seq_length: int
    """Tokens per row."""

    @classmethod
    def read(cls, directory: Path) -> "PackedTokens":
        """Read the metadata of `TRAIN` or `VALIDATION`.

        Raises:
            StageError: it is missing or has been changed.
        """
        dataset = Dataset.read(directory, "pack")
        try:
            seq_length = dataset.features["input_ids"]["length"]
        except (KeyError, TypeError):
            raise StageError(f"{directory} has no rows of input_ids: run `dvc repro -f pack`") from None
        return cls(dataset.shards, dataset.fingerprint, dataset.num_rows, seq_length)
