"""outputs/tasks.json: how well the finished model, and the one it started from, answer the questions of tasks."""

from dataclasses import dataclass
from typing import ClassVar

from stages.base.record import Record


@dataclass(frozen=True)
class TaskScore:
    """Of one task, or of a group of tasks."""

    task: str
    metric: str
    """The first one of the task, as lm-evaluation-harness names it."""
    higher_is_better: bool
    questions: int
    num_fewshot: int
    """Answered examples before each question."""
    initial: float | None
    """Of the initial model; null: it has random weights."""
    trained: float
    stderr: float | None
    """Standard error of `trained`; null: the metric is no mean over questions."""
    difference: float | None
    """`trained` minus `initial`."""
    difference_stderr: float | None
    """Paired: of the differences of single questions."""
    chance: float | None
    """Of guessing; null: there are no choices."""
    truncated: int
    """Requests that were cut on the left, as they were longer than the model allows."""


@dataclass(frozen=True)
class Scores(Record):
    """Content of outputs/tasks.json."""

    STAGE: ClassVar[str] = "score"

    tasks: list[TaskScore]
    lm_eval: str
    """Version of lm-evaluation-harness."""
    task_limit: int | None
    task_chat: bool

    def metrics(self) -> dict[str, dict[str, float]]:
        """Content of outputs/scores.json: each is a column of `dvc exp show`."""
        return {score.task: {score.metric: score.trained} for score in self.tasks}
