"""outputs/tasks.json: how well the finished model, and the one it started from, answer the questions of tasks."""

from dataclasses import dataclass
from typing import ClassVar

from stages.base.files import JsonFile


@dataclass(frozen=True)
class Summary:
    """Of one task, or of a group of tasks, and one model."""

    task: str
    metric: str
    """The first one of the task, as lm-evaluation-harness names it."""
    higher_is_better: bool
    questions: int
    num_fewshot: int
    """Answered examples before each question."""
    score: float
    chance: float | None
    """The score of guessing; null: there are no choices."""
    truncated: int
    """Requests that were cut on the left, as they were longer than the model allows."""


@dataclass(frozen=True)
class TaskScore(Summary):
    """A line of the table: of the finished model, and what is different in the initial one."""

    stderr: float | None
    """Standard error of `score`; null: the metric is no mean over questions."""
    initial: float | None
    """The score of the initial model; null: it has random weights."""
    difference: float | None
    """`score` minus `initial`."""
    difference_stderr: float | None
    """Paired: of the differences of single questions."""
    contaminated: int
    """Questions that are in the training documents."""
    too_short: int
    """Questions that are too short to tell."""
    clean_score: float | None
    """The score on all other questions; null: there are none, or the metric is no mean over questions."""


@dataclass(frozen=True)
class Scores(JsonFile):
    """Content of outputs/tasks.json."""

    STAGE: ClassVar[str] = "score"

    tasks: list[TaskScore]
    lm_eval: str
    """Version of lm-evaluation-harness."""
    task_limit: int | None
    task_chat: bool

    def metrics(self) -> dict[str, dict[str, float | None]]:
        """Content of outputs/scores.json: each is a column of `dvc exp show`."""
        return {
            score.task: {
                score.metric: score.score,
                f"{score.metric}_clean": score.clean_score,
                "contaminated": score.contaminated,
                "too_short": score.too_short,
            }
            for score in self.tasks
        }
