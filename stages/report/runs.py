"""The results of a run: of this one, whose files are here, and of the previous run, from git and DVC's cache."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from stages.base import history, outputs, publish
from stages.base.errors import StageError
from stages.base.history import Row
from stages.base.names import printable
from stages.base.params_file import PARAMS_FILE, flatten
from stages.export.evaluation import Evaluation
from stages.export.lineage import Lineage
from stages.model.files import LINEAGE

_NUM_COMMITS = 10
"""Of those that changed dvc.lock, how many are looked at. Each takes half a second of DVC."""

Number = tuple[float | None, str]
"""A value and its format; None: it is not known."""


@dataclass(frozen=True)
class Run:
    """What the report shows of a run, beside its data."""

    lineage: Lineage
    evaluation: Evaluation
    trained: dict[str, Any]
    """Content of train_metrics.json."""
    history: list[Row]
    speed: list[Row]
    numbers: dict[str, Number]
    """What two runs are compared by."""

    @classmethod
    def read(cls, root: Path, experiment_name: str) -> "Run":
        """Read the `files` of a run.

        Raises:
            StageError: one of them is missing or damaged.
        """
        evaluation = Evaluation.read(root / outputs.EVALUATION)
        metrics = root / outputs.TRAIN_METRICS
        try:
            trained = publish.read_json(metrics)
            numbers = _numbers(evaluation, trained, trained["cost"])
        except FileNotFoundError:
            raise StageError(f"{metrics} is missing: run `dvc repro train`") from None
        except (ValueError, KeyError, TypeError):
            raise StageError(f"{metrics} is not valid: run `dvc repro -f -s train`") from None
        return cls(
            lineage=Lineage.read(root / files(experiment_name)[0]),
            evaluation=evaluation,
            trained=trained,
            history=history.read(root / outputs.HISTORY),
            speed=history.read(root / outputs.SPEED),
            numbers=numbers,
        )

    def params(self) -> dict[str, dict[str, Any]]:
        """The parameters of each stage that are known, by dotted name."""
        stages = {stage: origin.params for stage, origin in self.lineage.origins.items()}
        found = {stage: dict(flatten(values)) for stage, values in {**stages, "train": self.lineage.params}.items()}
        # What the preset sets is null in `fsdp`.
        return {
            stage: {name: value for name, value in values.items() if value is not None or not name.startswith("fsdp.")}
            for stage, values in found.items()
        }


@dataclass(frozen=True)
class Previous:
    """The previous run, and where it is from."""

    commit: str
    subject: str
    """First line of its message."""
    run: Run


def _numbers(evaluation: Evaluation, trained: dict[str, Any], cost: dict[str, Any]) -> dict[str, Number]:
    loss = evaluation.validation
    return {
        "validation loss": (loss.loss if loss else None, ".4f"),
        "perplexity": (loss.perplexity if loss else None, ",.2f"),
        "bits per byte": (loss.bits_per_byte if loss else None, ".4f"),
        "parameters": (evaluation.num_parameters, ",d"),
        "steps": (trained["steps"], ",d"),
        "tokens": (trained["tokens"], ",d"),
        "seconds": (cost["training_seconds"], ",.1f"),
        "tokens per second": (cost["tokens_per_second"], ",.0f"),
        "MFU": (cost["mfu"], ".3f"),
        "peak memory of rank 0 (GiB)": (cost["memory_peak_gib"], ",.3f"),
    }


def files(experiment_name: str) -> list[Path]:
    """What `Run` reads, relative to the project."""
    lineage = outputs.directory(experiment_name) / "model" / LINEAGE
    return [lineage, outputs.EVALUATION, outputs.TRAIN_METRICS, outputs.HISTORY, outputs.SPEED]


def previous(run: Run) -> Previous | None:
    """The newest run of this branch that is another one, and whose files are in DVC's cache and can be read."""
    problems = []
    for commit, subject in _commits():
        try:
            found = _read(commit)
        except Exception as error:  # DVC's have no common base, and an old commit may have anything
            problems += [f"{commit[:10]}: {error}"]
            continue
        if found and found.lineage.run_id != run.lineage.run_id:
            return Previous(commit[:10], subject, found)
    if problems:
        print(f"report: no previous run can be read; commit {printable(problems[0])}", file=sys.stderr)
    return None


def _commits() -> list[list[str]]:
    """The newest commits that changed dvc.lock, and their subjects; none without git."""
    log = ("git", "log", "--no-show-signature", f"-{_NUM_COMMITS}", "--format=%H %s", "--", "dvc.lock")
    try:
        text = subprocess.run(log, capture_output=True, check=False).stdout.decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [line.split(" ", 1) for line in text.split("\n")[:-1]]


def _read(commit: str) -> Run | None:
    """The run of a commit; None: it had none yet. Nothing is checked out, and no network is used."""
    from dvc.api import DVCFileSystem  # here, not above: it takes a second

    # In place of the project's remote, from which DVC would fetch what its cache lacks.
    project = DVCFileSystem(rev=commit, remote="none", remote_config={"url": "/dev/null"})
    name = yaml.safe_load(project.read_bytes(str(PARAMS_FILE)))["experiment_name"]
    if not project.exists(str(files(name)[0])):
        return None
    with TemporaryDirectory() as directory:
        for path in files(name):
            target = Path(directory, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            project.get_file(str(path), str(target))
        return Run.read(Path(directory), name)
