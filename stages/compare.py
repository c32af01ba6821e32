"""Write a page that compares all experiments of the project: what differs, what it gave, and their curves.

Reads    what `dvc exp show` reads: dvc.lock and the metrics of the workspace, of all commits with results on any
         branch, and of all experiments; params.yaml of queued, running and failed ones; curves from DVC's cache
Writes   outputs/experiments.html, which opens without a network
Command  python -m stages.compare
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.artifacts import command, history, outputs, publish
from stages.artifacts.errors import StageError
from stages.artifacts.params_file import flatten
from stages.export import page, previous

if TYPE_CHECKING:
    from dvc.repo import Repo
    from dvc.repo.experiments.serialize import ExpState

    from stages.export.pictures import Series

_METRICS = {
    "validation_loss": ("validation loss", ".4f"),
    "perplexity": ("perplexity", ",.2f"),
    "bits_per_byte": ("bits per byte", ".4f"),
    "steps": ("steps", ",d"),
    "tokens_per_s": ("tokens per second", ",.0f"),
    "memory_peak_gib": ("peak memory (GiB)", ",.2f"),
}
"""Columns of the table: names in the files of metrics, for people, and formats."""
_UNWATCHED = ("runtime.", "plan.")
"""Parameters that change no training."""


@dataclass(frozen=True)
class Experiment:
    """A line of the table."""

    name: str
    state: str
    """Empty: it has finished."""
    params: dict[str, Any]
    """Those with which the stages ran, or will run, by dotted name."""
    metrics: dict[str, Any]
    curves: "dict[str, Series]"
    """`loss` and `validation_loss` of its history.tsv; empty: there is none in DVC's cache."""

    @property
    def loss(self) -> float:
        """By which they are sorted; those without one, or with one that is not finite, are last."""
        loss = self.metrics.get("validation_loss")
        return loss if loss is not None and math.isfinite(loss) else math.inf


def main() -> None:
    """Run the command."""
    command.parser(__doc__).parse_args()
    experiments = find()
    publish.write_text(outputs.EXPERIMENTS, render(experiments))
    print(f"compare: {len(experiments)} experiments; see {outputs.EXPERIMENTS}")


def find() -> list[Experiment]:
    """All experiments of the project, the best one first.

    Raises:
        StageError: this is no project of git and DVC, or has no commit.
    """
    # Here, not above: it takes a second.
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.scm import Git

    try:
        with Repo() as repo:
            if not isinstance(repo.scm, Git) or repo.scm.no_commits:
                raise StageError("there is nothing to compare: `git init`, and `git commit` after `dvc repro`")
            found = [*_collect(repo)]
    except DvcException as error:
        raise StageError(" ".join(str(error).split())) from None
    return sorted(found, key=lambda experiment: (experiment.loss, experiment.state))


def _collect(repo: "Repo") -> Iterator[Experiment]:
    from dvc.repo.experiments.utils import exp_refs

    subjects = dict(previous.commits(Path(repo.root_dir), "HEAD", "--branches"))
    queue = repo.experiments.celery_queue
    entries = [*queue.iter_queued(), *queue.iter_active(), *(entry for entry, _ in queue.iter_failed())]
    # Not all commits: each takes a moment, and most have the results of the one before.
    baselines = [*(info.baseline_sha for info in exp_refs(repo.scm)), *(entry.baseline_rev for entry in entries)]
    revisions = [repo.scm.get_rev(), *subjects, *baselines]

    names: dict[str, list[str]] = {}
    known: dict[str, Experiment] = {}
    for commit in repo.experiments.show(revs=revisions):
        label = ": ".join(filter(None, [commit.name or commit.rev[:9], subjects.get(commit.rev)]))  # 9: "workspace"
        candidates = [(label, "", commit)]
        for experiment in commit.experiments or ():
            state = experiment.executor.state if experiment.executor else ""
            first = experiment.revs[0]
            name = first.name or experiment.name or first.rev[:7]
            candidates += [(name, "" if state == "success" else state, first)]
        for name, state, revision in candidates:
            experiment = _read(repo, name, state, revision)
            # The workspace is mostly that of the last commit, and a branch may begin with one of another branch.
            key = publish.sha256_json([experiment.params, experiment.metrics, experiment.state or "finished"])
            if not experiment.metrics and not experiment.state:
                continue  # code, without results
            known.setdefault(key, experiment)
            names.setdefault(key, []).append(name)
    for key, experiment in known.items():
        yield Experiment(
            ", ".join(names[key]), experiment.state, experiment.params, experiment.metrics, experiment.curves
        )


def _read(repo: "Repo", name: str, state: str, revision: "ExpState") -> Experiment:
    data = revision.data
    if data is None:
        error = revision.error.msg if revision.error else "without data"
        return Experiment(name, state or f"not readable: {' '.join(error.split())}", {}, {}, {})
    if state:  # what is there, and in dvc.lock, is of the commit that it started from
        params = {name: value for file in data.params.values() for name, value in flatten(file.get("data") or {})}
        params = {name: value for name, value in params.items() if not name.startswith(_UNWATCHED)}
        return Experiment(name, state, params, {}, {})
    lock = previous.read_lock(Path(repo.root_dir), revision.rev)  # params.yaml may have been edited since
    file = Path(repo.root_dir, outputs.METRICS)
    is_locked = revision.rev != "workspace" or not file.exists() or lock.has(outputs.METRICS, file.read_bytes())
    if not (is_locked and lock.is_complete):  # a stage ran without DVC, or none after it
        return Experiment(name, "not finished: `dvc repro`", lock.params, {}, {})
    metrics = {name: value for file in data.metrics.values() for name, value in flatten(file.get("data") or {})}
    digest = lock.outs.get(str(outputs.HISTORY))
    curves = _curves(Path(repo.cache.local.oid_to_path(digest))) if digest else {}
    return Experiment(name, state, lock.params, metrics, curves)


def _curves(path: Path) -> "dict[str, Series]":
    """What is drawn of a history.tsv; not all its rows, of which many experiments have too many for the memory."""
    from stages.export import pictures  # matplotlib takes a second to import

    rows: list[history.Row] = []
    with suppress(StageError):  # missing, or of another version
        rows = history.read(path)
    return pictures.curves(rows)


def render(experiments: Sequence[Experiment]) -> str:
    """The page."""
    from stages.export import pictures

    differing = _differing(experiments)
    shown = [name for name in _METRICS if any(experiment.metrics.get(name) is not None for experiment in experiments)]
    states = any(experiment.state for experiment in experiments)
    header = ["experiment", *(["state"] if states else []), *(_METRICS[name][0] for name in shown), *differing]
    rows = [
        [
            f"{number}. {experiment.name}",
            *([experiment.state or "finished"] if states else []),
            *(_cell(experiment.metrics.get(name), _METRICS[name][1]) for name in shown),
            *(page.value(experiment.params[name]) if name in experiment.params else "" for name in differing),
        ]
        for number, experiment in enumerate(experiments, 1)
    ]
    runs = {number: experiment.curves for number, experiment in enumerate(experiments, 1) if experiment.curves}
    curves = {
        name: picture
        for name in ("loss", "validation_loss")
        if (picture := pictures.experiments(runs, name)) is not None
    }
    captions = {"loss": "Training loss, running mean", "validation_loss": "Validation loss"}
    figures = [page.figure(picture, name, captions[name]) for name, picture in curves.items()]
    parts = [
        page.section(
            "Results and what differs",
            page.table("The best one first", header, rows, numbers=True),
        )
    ]
    without = sum(not (one.curves or one.state) for one in experiments)
    notes = (
        [page.paragraph(f"DVC's cache has no history.tsv of {without} of them that can be read.")] if without else []
    )
    parts += [page.section("Curves", page.columns(*figures), *notes)]
    return page.document("Experiments", f"{len(experiments)} in this project, by their validation loss", *parts)


def _differing(experiments: Iterable[Experiment]) -> list[str]:
    """The parameters that not all experiments have with the same value."""
    seen: dict[str, set[str]] = {}
    params = [experiment.params for experiment in experiments if experiment.params]
    for name in dict.fromkeys(name for values in params for name in values):
        # As the page shows them: 1e-05 is a string in dvc.lock, and a number in params.yaml.
        seen[name] = {page.value(values.get(name)) for values in params}
    return [name for name, values in seen.items() if len(values) > 1]


def _cell(value: Any, spec: str) -> str:
    return "" if value is None else format(value, spec)


if __name__ == "__main__":
    command.run(main)
