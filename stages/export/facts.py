"""What the report shows of a run: the records of all stages, or of each the few fields that a person wants to see.

The records are defined where they are written, in packages that this one does not import.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from stages.artifacts import history, outputs
from stages.artifacts.history import Row
from stages.artifacts.params_file import flatten
from stages.artifacts.record import Record
from stages.export.evaluation import Evaluation
from stages.export.provenance import Lineage

FILES = (outputs.HISTORY, outputs.SPEED, outputs.TRAIN_METRICS, outputs.EVALUATION)
"""Of a run, beside its model; they have the same paths in all experiments."""


@dataclass(frozen=True)
class Format:
    """The raw files of a format."""

    files: int
    bytes: int


@dataclass(frozen=True)
class Organized(Record):
    """Of data/splits/summary.json."""

    STAGE: ClassVar[str] = "organize"

    files: int
    bytes: int
    formats: dict[str, Format]
    duplicate_files: int
    passed_over_counts: dict[str, int]


@dataclass(frozen=True)
class Extracted(Record):
    """Of data/extract.json."""

    STAGE: ClassVar[str] = "extract"

    fallback_encoded_files: int
    rejected_files: int
    duplicate_strings: int
    strings: int
    characters: int
    rejected: dict[str, int]


@dataclass(frozen=True)
class Part:
    """The documents for training, or those for validation."""

    documents: int
    characters: int
    tokens: int
    characters_per_token: float | None
    unknown_share: float | None
    rows: int


@dataclass(frozen=True)
class Encoder:
    """What encoded."""

    name: str


@dataclass(frozen=True)
class Packed(Record):
    """Of data/pack.json."""

    STAGE: ClassVar[str] = "pack"

    train: Part
    validation: Part
    encoder: Encoder


@dataclass(frozen=True)
class Manifest(Record):
    """Of data/model.json."""

    STAGE: ClassVar[str] = "download"

    weights: list[str]


@dataclass(frozen=True)
class Cost:
    """What the steps of a run have cost."""

    training_seconds: float = 0.0
    milliseconds: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_peak_gib: float | None = None
    launches: int | None = None


@dataclass(frozen=True)
class Trained(Record):
    """Of outputs/train_metrics.json."""

    STAGE: ClassVar[str] = "train"

    steps: int
    tokens: int
    skipped_steps: int
    cost: Cost


@dataclass(frozen=True)
class Result:
    """What two runs are compared by."""

    lineage: Lineage
    history: list[Row]
    speed: list[Row]
    """Empty: there is no such file."""
    trained: Trained | None
    """None: there is no such file."""
    evaluation: Evaluation | None
    """None: there is no such file."""

    @classmethod
    def read(cls, lineage: Path, files: Mapping[Path, Path]) -> "Result":
        """Read a run.

        Args:
            lineage: lineage.json of its model.
            files: Where each of `FILES` is that there is; `outputs.HISTORY` is always needed.

        Raises:
            StageError: a file is missing or damaged.
        """
        return cls(
            lineage=Lineage.read(lineage),
            history=history.read(files[outputs.HISTORY]),
            speed=history.read(files[outputs.SPEED]) if outputs.SPEED in files else [],
            trained=Trained.read(files[outputs.TRAIN_METRICS]) if outputs.TRAIN_METRICS in files else None,
            evaluation=Evaluation.read(files[outputs.EVALUATION]) if outputs.EVALUATION in files else None,
        )

    def params(self) -> dict[str, dict[str, Any]]:
        """The parameters of each stage that are known, by dotted name."""
        stages = {stage: origin.params for stage, origin in self.lineage.origins.items()}
        return {stage: dict(flatten(values)) for stage, values in {**stages, "train": self.lineage.params}.items()}
