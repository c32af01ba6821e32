"""state.json of a checkpoint: where the training is; and what its rows say of the training, for the outs of the stage.

Torch-free, as the launcher reads both.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from stages.base import history
from stages.base.files import JsonFile
from stages.base.history import HISTORY, SPEED, Row
from stages.checkpointing.layout import CheckpointManifest

STATE = "state.json"
"""Its name in a checkpoint."""


@dataclass(frozen=True)
class Place:
    """Where and when the newest launch of a run trained: for people, and for what makes other bits of the same run."""

    device: str
    """Name of a GPU, or of the processor."""
    ranks: int
    nodes: int
    commit: str | None
    """Of the project, whose files may have been edited since; null: it is in no git repository."""
    date: str = ""
    """Of the newest checkpoint, in UTC: `2026-03-01 10:31`."""
    threads: int | None = None
    """Of each rank, as sums on CPUs depend on their number; null: the checkpoint is older than this field."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that were set and may change the last bits of the result."""
    since: int = 0
    """The step from which that launch went on."""
    attention: str | None = None
    """What was chosen, with its kernels: `varlen FA3`; null: the checkpoint is older than this field."""


@dataclass(frozen=True)
class ScalerState:
    """The loss scale of fp16; 1 in other precisions."""

    scale: float
    good_steps: int
    """In a row, since the scale was changed."""


@dataclass(frozen=True)
class TrainState(JsonFile):
    """Content of state.json."""

    STAGE: ClassVar[str] = "train"

    loss_scaler: ScalerState
    skipped_steps: int = 0
    """fp16: steps whose gradient was not finite."""
    launches: int = 0
    """That have made the steps of this run; 1: it was never interrupted."""
    place: Place | None = None
    sources: dict[str, float] = field(default_factory=dict)
    """How often a row of each source was used; none: the rows are of all files."""

    @classmethod
    def of(cls, checkpoint: Path) -> "TrainState":
        """The state in a checkpoint.

        Raises:
            StageError: it is missing or not valid.
        """
        return cls.read(checkpoint / STATE)


@dataclass(frozen=True)
class Cost:
    """What the steps of a run have cost, added up over its launches.

    Not in it: steps of another run whose checkpoint it adopted, and time whose work was lost and done again. All
    figures are of rank 0.
    """

    steps: int = 0
    launches: int = 0
    """That have made these steps; 1: the run was never interrupted."""
    training_seconds: float = 0.0
    """All time by the clock between the start of the loop and the save, validations and earlier saves included."""
    milliseconds: dict[str, float] = field(default_factory=dict)
    """Mean per step of each phase; together they are all the time."""
    tokens_per_second: float | None = None
    mfu: float | None = None
    """Model FLOPs utilization, from 0 to 1; None on CPUs, and where it is not known."""
    memory_peak_gib: float | None = None

    @classmethod
    def of(cls, rows: list[Row], first_step: int, launches: int, tokens_per_step: float) -> "Cost":
        """Of the rows of speed.tsv, which are about the steps after `first_step`."""
        columns = {name: np.array([row[name] for row in rows], np.float64) for name in rows[0]}  # None is NaN
        num_steps, seconds = np.diff(columns["step"], prepend=first_step), float(columns["seconds"][-1])
        mfu = float(np.average(columns["mfu"], weights=num_steps / columns["tokens_per_second"]))  # over the time
        return cls(
            steps=int(num_steps.sum()),
            launches=launches,
            training_seconds=round(seconds, 3),
            milliseconds={
                name.removesuffix("_ms"): round(float(np.average(values, weights=num_steps)), 3)
                for name, values in columns.items()
                if name.endswith("_ms")
            },
            tokens_per_second=round(float(num_steps.sum()) * tokens_per_step / seconds, 1),
            mfu=None if math.isnan(mfu) else round(mfu, 4),
            memory_peak_gib=round(float(columns["memory_peak_gib"].max()), 3),
        )


@dataclass(frozen=True)
class TrainMetrics(JsonFile):
    """Content of outputs/train_metrics.json."""

    STAGE: ClassVar[str] = "train"

    steps: int = 0
    tokens: int = 0
    """Seen in these steps."""
    loss: float | None = None
    """Of the last step, in nats per token."""
    validation_loss: float | None = None
    """The newest, on the rows of `eval_rows`, in nats per token."""
    skipped_steps: int = 0
    """fp16: steps whose gradient was not finite."""
    cost: Cost = field(default_factory=Cost)
    place: Place | None = None
    sources: dict[str, float] = field(default_factory=dict)
    """How often a row of each source was used; none: the rows are of all files."""

    @classmethod
    def of(cls, checkpoint: Path) -> "TrainMetrics":
        """Those of the training that has ended with a checkpoint."""
        state, manifest = TrainState.of(checkpoint), CheckpointManifest.read(checkpoint)
        adopted = manifest.adopted
        course, speed = history.read(checkpoint / HISTORY), history.read(checkpoint / SPEED)
        _, validation_losses = history.series(course, "validation_loss")
        tokens = course[-1]["tokens"] or 0.0
        return cls(
            steps=manifest.step,
            tokens=int(tokens),
            loss=course[-1]["loss"],
            validation_loss=validation_losses[-1] if validation_losses else None,
            skipped_steps=state.skipped_steps,
            cost=Cost.of(speed, adopted.step if adopted else 0, state.launches, tokens / manifest.step),
            place=state.place,
            sources=state.sources,
        )
