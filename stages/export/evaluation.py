"""outputs/evaluation.json: what `evaluate` has measured and sampled, for the report and for people."""

from dataclasses import dataclass
from typing import ClassVar

from stages.artifacts.record import Record


@dataclass(frozen=True)
class Loss:
    """Of some held-out rows."""

    rows: int
    tokens: int
    """Predicted."""
    loss: float
    """Nats per token."""
    perplexity: float
    bits_per_byte: float | None
    """None: how many bytes of text they are is not known."""


@dataclass(frozen=True)
class Sample:
    """A prompt, and what the model wrote after it."""

    prompt: str
    continuation: str


@dataclass(frozen=True)
class Evaluation(Record):
    """Content of outputs/evaluation.json."""

    STAGE: ClassVar[str] = "evaluate"

    run_id: str
    step: int
    dtype: str
    """Of the exported weights."""
    num_parameters: int
    validation: Loss | None
    """All held-out rows, exported weights; None: there are none."""
    by_split: dict[str, Loss]
    """The same, for each held-out split."""
    untrained: Loss | None
    """Before the first step, on the rows that the training measures (`eval_rows`)."""
    trained: Loss | None
    """At the exported step, of the weights that the optimizer updates, on these rows."""
    exported: Loss | None
    """The exported weights, on these rows."""
    samples: list[Sample]
