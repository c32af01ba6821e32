"""What `score` asks the ranks of this machine, and what they answer."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from stages.base.files import JsonFile
from stages.evaluation.request import remedies_for, weight_bytes
from stages.export.scores import Summary
from stages.ranks import asking


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

    members: list[str]
    """The tasks whose questions are asked."""
    terms: list[Terms]
    """One a question of these; none: the metric is no mean over questions."""


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
class Request(asking.Request):
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
    layer_classes: list[str]
    """Classes of the models' layers, by which they can be sharded."""
    tokens: str
    """Fingerprint of those that the model was trained on."""


@dataclass(frozen=True)
class Measurements(JsonFile):
    """What the ranks found, by entry of `tasks`."""

    STAGE: ClassVar[str] = "score"
    LARGEST: ClassVar[int] = sys.maxsize  # prompts of tasks with long documents

    trained: dict[str, Found]
    initial: dict[str, Found]
    """With nothing in it where the initial model has random weights."""
    num_reused: int
    """How many of these the store had."""
    passages: dict[str, list[str]]
    """By task, each of its questions with the right answer, in the order of the answers."""


def ask_ranks(request: Request, nproc_per_node: int | None) -> Measurements:
    """See `asking.ask`."""
    return asking.ask("stages.scoring.rank", request, Measurements, nproc_per_node, remedies)


def remedies(request: Request, num_ranks: int) -> str:
    """What needs less memory, in words, and how much the weights need."""
    return remedies_for(weight_bytes(Path(request.trained.directory), request.trained.weights), num_ranks, [])
