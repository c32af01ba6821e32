"""Where plan and the stages after it write.

DVC compares metrics and plots by their paths. So what people compare has the same path in every experiment, and only
what is large, or the start of another training, is in a directory of the experiment's name.
"""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ByteSize, Field

OUTPUTS = Path("outputs")

PLAN = OUTPUTS / "plan.json"
ROWS = OUTPUTS / "rows.txt"
HISTORY = OUTPUTS / "history.tsv"
SPEED = OUTPUTS / "speed.tsv"
TRAIN_METRICS = OUTPUTS / "train_metrics.json"
COST = OUTPUTS / "cost.json"
EVALUATION = OUTPUTS / "evaluation.json"
METRICS = OUTPUTS / "metrics.json"
TASKS = OUTPUTS / "tasks.json"
SCORES = OUTPUTS / "scores.json"
ANSWERS = OUTPUTS / "answers.jsonl"
REPORT = OUTPUTS / "report"

RESTORE = "`dvc get . outputs/NAME/model --rev REV -o outputs/NAME/model` brings back that of commit or experiment REV"
"""About a model that is not here. `dvc repro` would train it again, under the name that params.yaml has now."""

_OF_ALL = (PLAN, ROWS, HISTORY, SPEED, TRAIN_METRICS, COST, EVALUATION, METRICS, TASKS, SCORES, ANSWERS, REPORT)


def _is_free(experiment_name: str) -> str:
    # DVC deletes an out before it runs its stage: in outputs/report/ that would be the checkpoints too.
    if directory(experiment_name) in _OF_ALL:
        raise ValueError(f"{directory(experiment_name)} is an output of every experiment: choose another name")
    return experiment_name


ExperimentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"), AfterValidator(_is_free)]
"""`experiment_name`: the name of a directory under outputs/."""
ShardSize = Annotated[ByteSize, Field(gt=0)]
"""`max_shard_size`: bytes of a file of weights."""


def directory(experiment_name: str) -> Path:
    """The directory of an experiment: run.json, model/, and beside DVC's outs checkpoints, logs and trackers."""
    return OUTPUTS / experiment_name
