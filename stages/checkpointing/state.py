"""state.json of a checkpoint: where the training is, beside its tensors. Torch-free, as the launcher reads it too."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from stages.base.record import Record, damaged
from stages.checkpointing.layout import REMEDY, CheckpointManifest

STATE = "state.json"
"""Its name in a checkpoint."""


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


@dataclass(frozen=True)
class TrainMetrics(Record):
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


@dataclass(frozen=True)
class CostColumns:
    """Content of outputs/cost.json: each name is a column of `dvc exp show`, so there are few."""

    steps: int
    tokens_per_s: float | None
    memory_peak_gib: float | None

    @classmethod
    def of(cls, metrics: TrainMetrics) -> "CostColumns":
        """The columns of a training."""
        return cls(metrics.steps, metrics.cost.tokens_per_second, metrics.cost.memory_peak_gib)


@dataclass(frozen=True)
class ScalerState:
    """The loss scale of fp16; 1 in other precisions."""

    scale: float
    good_steps: int
    """In a row, since the scale was changed."""


@dataclass(frozen=True)
class TrainState(Record):
    """Content of state.json."""

    STAGE: ClassVar[str] = "train"

    step: int
    """Optimizer steps done."""
    epoch: float
    metrics: TrainMetrics
    loss_scaler: ScalerState

    @classmethod
    def of(cls, checkpoint: Path) -> "TrainState":
        """The state in a checkpoint.

        Raises:
            StageError: it is missing, not valid, or of another step than the checkpoint.
        """
        state, step = cls.read(checkpoint / STATE), CheckpointManifest.read(checkpoint).step
        if state.step != step:
            raise damaged(checkpoint / STATE, f"it is of step {state.step}, not of step {step}", REMEDY)
        return state
