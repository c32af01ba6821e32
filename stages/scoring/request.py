"""What `score` asks the ranks of this machine, and what they answer."""

import sys
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from stages.base.record import Record
from stages.export.scores import Summary
from stages.ranks import torchrun

REQUEST, MEASUREMENTS = "request.json", "measurements.json"
"""Their names in the directory that the ranks share."""
DIGITS = 6
"""Significant digits of a score, decimals of a log-likelihood. The last bits may depend on the number of threads."""
REMEDY = "if memory ran out, use fewer ranks (runtime.nproc_per_node), or a machine with more memory"
"""What to do where memory runs out."""


class Terms(NamedTuple):
    """What one question adds to a metric that is sum(value) / sum(weight)."""

    value: float
    weight: float


@dataclass(frozen=True)
class Answer:
    """Of one question."""

    task: str
    row: int
    """Number of the question in its task, from 0."""
    prompt: str
    """The last one, where each choice has its own."""
    choices: list[str]
    """What follows the prompt; none: the model writes it."""
    target: Any
    """The right answer, as the task gives it."""
    answer: Any
    """What the model has written, or the log-likelihood of each choice."""


@dataclass(frozen=True)
class Measured(Summary):
    """Of one task, or of a group of tasks, and one model."""

    terms: list[Terms]
    """One a question; none: the metric is no mean over questions."""


@dataclass(frozen=True)
class Found:
    """What an entry of `tasks` gives for one model."""

    measured: list[Measured]
    answers: list[Answer]


@dataclass(frozen=True)
class Model:
    """A model to measure."""

    directory: str
    weights: list[str]
    """Its safetensors files."""
    digest: str
    """Of its weights and its config."""


@dataclass(frozen=True)
class Request(Record):
    """What to measure, and how."""

    STAGE: ClassVar[str] = "score"

    tasks: list[str]
    limit: int | None
    chat: bool
    trained: Model
    initial: Model | None
    """null: it has random weights."""
    tokenizer: str
    """Digest of the trained model's tokenizer and chat template, which both models are asked with."""
    packages: str
    """The directory of lm-eval and what it needs."""
    store: str
    """Results of earlier runs."""
    timeout_minutes: float


@dataclass(frozen=True)
class Measurements(Record):
    """What the ranks found, by entry of `tasks`."""

    STAGE: ClassVar[str] = "score"

    trained: dict[str, Found]
    initial: dict[str, Found]
    """With nothing in it where the initial model has random weights."""
    num_reused: int
    """How many of these the store had."""


def ask_ranks(request: Request, nproc_per_node: int | None) -> Measurements:
    """Start the ranks, and return what they have found. Where they fail, this process ends as they did.

    Args:
        request: What to measure.
        nproc_per_node: How many ranks; None: one per GPU, or 2 on CPUs.

    Raises:
        StageError: this machine has no GPUs for so many ranks.
    """
    ranks = torchrun.Ranks(torchrun.count_local_ranks(nproc_per_node))
    with torchrun.shared_directory(ranks) as directory:
        request.write(directory / REQUEST)
        if not (status := torchrun.run("stages.scoring.rank", ranks, directory)):
            return Measurements.read(directory / MEASUREMENTS)
    if status == torchrun.CRASHED:  # else the ranks have printed the reason
        print(f"error: the measurement failed as shown above; {REMEDY}", file=sys.stderr)
    sys.exit(status)


def rounded(number: float) -> float:
    """A score as it is written."""
    return float(f"{number:.{DIGITS}g}")
