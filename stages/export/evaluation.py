"""outputs/evaluation.json: the losses of the finished model, and what it writes."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from stages.base.files import JsonFile

DIGITS = 6
"""Significant digits of losses and scores, decimals of log-likelihoods. The last bits may depend on the number of
threads."""


def rounded(number: float) -> float:
    """A loss or a score as it is written."""
    return float(f"{number:.{DIGITS}g}")


def perplexity(loss: float) -> float:
    """The exponential of a loss in nats per token: how many tokens a uniform choice with this loss would have."""
    return math.exp(min(loss, 700.0))  # above 709, exp overflows a float


def bits_per_byte(loss: float, tokens: int, num_bytes: int) -> float | None:
    """A loss in nats per token, in bits per byte of the text, which `tokens` encode; None where there is no text."""
    return loss / math.log(2) * tokens / num_bytes if num_bytes else None


@dataclass(frozen=True)
class Loss:
    """A mean over the tokens that were predicted in some rows."""

    rows: int
    tokens: int
    """Predicted."""
    loss: float
    """Nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """Of the text in UTF-8: comparable between tokenizers. null: the bytes of the text are not known."""


@dataclass(frozen=True)
class Sample:
    """A prompt, what the model wrote after it, and what the document has there."""

    prompt: str
    continuation: str
    reference: str
    """How the held-out document goes on, as far as the row and the next one have it."""
    ends: bool
    """Whether the model ended it by itself, and not the limit of tokens."""
    before: str | None = None
    """What the initial model writes; null: it has random weights."""


@dataclass(frozen=True)
class Evaluation(JsonFile):
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
    untrained: Loss | None
    """Before the first step, on the rows that the training measures (`eval_rows`)."""
    trained: Loss | None
    """At the exported step, of the weights that the optimizer updates, on these rows."""
    exported: Loss | None
    """Of the exported weights, on these rows."""
    samples: list[Sample]
    sources: dict[str, Loss | None] = field(default_factory=dict)
    """Of the exported weights on all held-out rows of each source; none: the rows are of all files."""
    lora_base: str | None = None
    """nf4: the training computed with quantized weights, and the export has those of the files."""

    @property
    def measured_all(self) -> bool:
        """Whether the training has measured all held-out rows, so that `exported` is `validation`."""
        return self.exported == self.validation
