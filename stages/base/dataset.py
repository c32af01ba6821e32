"""Directories that `datasets.load_from_disk` reads: Arrow shards, `dataset_info.json` and `state.json`.

Their metadata is read and written here without `datasets`, whose import takes seconds; the shards are read and written
by those who know what is in them (stages/work/arrow.py, stages/forward/rows.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from stages.base import publish
from stages.base.errors import StageError
from stages.base.files import FileName, check_files, damaged

CORPUS = Path("data/corpus")
STATE = "state.json"
INFO = "dataset_info.json"


class Shard(NamedTuple):
    """A finished Arrow file, as `state.json` lists it."""

    filename: FileName
    rows: Annotated[int, Field(ge=0, strict=True)]
    sha256: str
    source: str | None = None
    """The directory of raw files that the rows are from; None: of all, or of several."""

    def check_rows(self, found: int) -> None:
        """Raise a StageError where a shard of the corpus has another number of rows than is listed."""
        if found != self.rows:
            raise StageError(
                f"{CORPUS / STATE} lists {self.rows} rows of {self.filename}, and there are {found}: "
                "run `dvc repro -f -s extract`"
            )


@dataclass(frozen=True)
class Dataset:
    """The content of the JSON files of a dataset directory."""

    features: dict[str, Any]
    """Types of the columns, in the form that `datasets` writes them."""
    shards: list[Shard]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the features, the shards' own SHA-256 and sources: equal content has an equal fingerprint."""
        sources = [shard.source for shard in self.shards]
        content = [self.features, [shard.sha256 for shard in self.shards]]
        return publish.sha256_json([*content, sources] if any(sources) else content)

    @property
    def num_rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def files(self, directory: Path) -> dict[Path, str]:
        """The shards, each with its SHA-256."""
        return {directory / shard.filename: shard.sha256 for shard in self.shards}

    def write(self, directory: Path) -> None:
        """Turn a directory of shards into a dataset. `state.json` is written last: without it there is no dataset."""
        # `load_from_disk` fails where one of the keys of state.json is missing, even if its value is null.
        info = {"citation": "", "description": "", "features": self.features, "homepage": "", "license": ""}
        publish.write_json(directory / INFO, info)
        state: dict[str, Any] = {
            "_data_files": [  # of which `datasets` reads the file name only
                {name: value for name, value in shard._asdict().items() if value is not None} for shard in self.shards
            ],
            "_fingerprint": self.fingerprint,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        publish.write_json(directory / STATE, state)

    @classmethod
    def read(cls, directory: Path, stage: str, contents: bool = False) -> "Dataset":
        """Read what `write` wrote.

        Args:
            directory: Of the dataset.
            stage: The one that writes it, named in error messages.
            contents: Whether to compare the shards with their SHA-256, too, or only to find that they are there.

        Raises:
            StageError: a file is missing or has been changed.
        """
        remedy = f"run `dvc repro -f -s {stage}`"
        try:
            features = publish.read_json(directory / INFO)["features"]
            state = publish.read_json(directory / STATE)
            dataset = cls(features, TypeAdapter(list[Shard]).validate_python(state["_data_files"]))
            recorded = state["_fingerprint"]
        except FileNotFoundError as error:
            raise StageError(f"{error.filename} is missing: run `dvc repro {stage}`") from None
        except (ValueError, KeyError, TypeError):
            raise damaged(directory / STATE, "it has not the keys of a dataset", remedy) from None
        # Computed from what was read, so an edit by hand is found.
        if dataset.fingerprint != recorded:
            raise damaged(directory / STATE, f"its fingerprint is not that of {INFO} and its shards", remedy)
        check_files(dataset.files(directory), remedy, contents)
        return dataset
