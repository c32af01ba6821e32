"""The packed tokens, data/tokens/: where they are, how many rows there are, and how long each is."""

from dataclasses import dataclass
from pathlib import Path

from stages.artifacts.dataset import STATE, Dataset
from stages.artifacts.errors import StageError
from stages.artifacts.publish import sha256_file

TOKENS = Path("data/tokens")
TRAIN = TOKENS / "train"
VALIDATION = TOKENS / "validation"


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


def damaged_tokens(path: Path) -> StageError:
    """The error for a file of tokens whose content is not that of `state.json`."""
    # -f: DVC compares sizes and times first, and after a fault of the disk both may be the same. -s: this stage alone.
    return StageError(f"{path} is damaged: its SHA-256 is not the one in {STATE}: run `dvc repro -f -s pack`")
