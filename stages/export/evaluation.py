"""outputs/evaluation.json: the losses of the finished model, and what it writes."""

from dataclasses import dataclass
from typing import ClassVar

from stages.artifacts.record import Record


@dataclass(frozen=True)
class Loss:
    """A mean over the tokens that were predicted in some rows."""

    rows: int
    tokens: int
    """Predicted."""
    loss: float
    """Nats per token."""
    perplexity: float
    """exp(loss): a model with this loss is as uncertain as a uniform choice among that many tokens."""
    bits_per_byte: float | None
    """Of the text in UTF-8: comparable between tokenizers. null: the bytes of the text are not known."""


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
    """Of the exported weights."""
    dtype: str
    """In which they are stored."""
    num_parameters: int
    validation: Loss | None
    """Of the exported weights on all held-out rows; null: there are none."""
    by_split: dict[str, Loss]
    """The same for each held-out split. A row that begins in one and ends in the next is counted in both."""
    untrained: Loss | None
    """Before the first step, on the rows that the training measures (`eval_rows`)."""
    trained: Loss | None
    """At the exported step, of the weights that the optimizer updates, on these rows."""
    exported: Loss | None
    """Of the exported weights, on these rows."""
    samples: list[Sample]
