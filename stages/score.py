"""Ask the finished model the questions of tasks, and the initial model the same ones.

Reads     outputs/<experiment_name>/model/, tasks/, data/model.json, and the weights of the initial model
Writes    outputs/tasks.json: how well both answer
          outputs/scores.json: a number for each task, for `dvc exp show`
          outputs/answers.jsonl: each question, and what both have answered
Command   python -m stages.score
          python -m stages.score --fetch TASK...    the data of public tasks, from the Hub (stages/scoring/fetch.py)

lm-evaluation-harness asks them (stages/scoring/harness.py). It is installed when `tasks` first names one. What an
earlier run has measured of a model is not measured again.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from stages.base import command, outputs, publish
from stages.base.outputs import ExperimentName
from stages.base.params_file import load_params
from stages.base.record import check_files
from stages.export.lineage import Lineage
from stages.export.scores import Scores, Summary, TaskScore
from stages.model.files import CONFIG, LINEAGE
from stages.model.manifest import ModelManifest
from stages.scoring import packages, public
from stages.scoring.fetch import fetch
from stages.scoring.request import Measured, Measurements, Model, Request, Terms, ask_ranks, rounded
from stages.work import reuse


@dataclass(frozen=True)
class ScoreParams:
    """The leaves of `params.yaml` that decide what is asked."""

    experiment_name: ExperimentName
    """Name of the directory under outputs/."""
    tasks: list[str]
    """Names of lm-evaluation-harness, or files in tasks/."""
    task_limit: PositiveInt | None
    """How many questions of each task; null: all."""
    task_chat: bool
    """Whether questions are written with the model's chat template."""


@dataclass(frozen=True)
class ScoreRuntime:
    """What changes no result."""

    nproc_per_node: PositiveInt | None
    """Ranks; null: one per GPU, or 2 where there is none."""
    reuse_gib: Annotated[float, Field(ge=0)]
    """Limit of the disk space, in GiB, for results of earlier runs."""
    timeout_minutes: PositiveFloat
    """How long a rank may take for one thing, such as a chunk of requests."""


def main() -> None:
    """Run the stage."""
    parser = command.parser(__doc__)
    parser.add_argument("--fetch", nargs="+", metavar="TASK", help="only fetch the data of tasks of lm-eval")
    if entries := parser.parse_args().fetch:
        fetch(entries, packages.ensure_installed())
        return
    params, runtime = load_params(ScoreParams), load_params(ScoreRuntime, "runtime")
    with publish.lock(outputs.TASKS):
        print(score(params, runtime))


def score(
    params: ScoreParams, runtime: ScoreRuntime, measure: Callable[[Request, int | None], Measurements] = ask_ranks
) -> str:
    """Write what both models answer; return a text that describes it.

    Args:
        params: What is asked.
        runtime: Where.
        measure: Asks, on so many ranks.

    Raises:
        StageError: a model is missing or damaged, or a task cannot be asked.
    """
    measurements, summary = Measurements({}, {}, 0), "score: nothing is asked, as tasks is []"
    if params.tasks:
        request = make_request(params, runtime)
        print(f"score: asking {', '.join(request.tasks)}", flush=True)  # it may take minutes
        measurements = measure(request, runtime.nproc_per_node)
        reuse.Store(reuse.root(), int).trim(int(runtime.reuse_gib * 2**30))
        summary = f"score: {measurements.num_reused} of the results were reused"
    found = [
        compare(trained, initial)
        for entry, of_trained in measurements.trained.items()
        for trained, initial in zip_longest(of_trained.measured, measurements.initial[entry].measured)
    ]
    scores = Scores(found, packages.VERSION, params.task_limit, params.task_chat)
    with publish.together(outputs.ANSWERS, outputs.SCORES, outputs.TASKS):
        publish.write_text(outputs.ANSWERS, answer_lines(measurements))
        publish.write_json(outputs.SCORES, scores.metrics())
        scores.write(outputs.TASKS)
    return "\n".join([summary, *map(describe, scores.tasks)])


def make_request(params: ScoreParams, runtime: ScoreRuntime) -> Request:
    """What the ranks are to measure, after the files of the models were compared with what is known of them."""
    public.check(params.tasks)  # before anything is installed
    directory = outputs.directory(params.experiment_name) / "model"
    lineage = Lineage.read(directory / LINEAGE)
    files = {**lineage.weights, **lineage.files}
    check_files({directory / name: found for name, found in files.items()}, "run `dvc repro -f -s consolidate`")
    others = {name: found for name, found in lineage.files.items() if name != CONFIG}
    return Request(
        tasks=[*dict.fromkeys(params.tasks)],
        limit=params.task_limit,
        chat=params.task_chat,
        trained=_model(directory, {name: files[name] for name in files if name not in others}, [*lineage.weights]),
        initial=find_initial(lineage),
        tokenizer=publish.sha256_json(others),
        packages=str(packages.ensure_installed()),
        store=str(reuse.root()),
        timeout_minutes=runtime.timeout_minutes,
    )


def find_initial(lineage: Lineage) -> Model | None:
    """The initial model; None: it had random weights.

    Raises:
        StageError: it is not on this machine, or was changed.
    """
    manifest = ModelManifest.read()
    if not manifest.weights or lineage.params.get("initial_weights") == "random":
        return None
    names = [*manifest.weights, CONFIG]
    return _model(manifest.verify(names), {name: manifest.files[name].sha256 for name in names}, manifest.weights)


def _model(directory: Path, files: dict[str, str], weights: list[str]) -> Model:
    return Model(str(directory), weights, publish.sha256_json(files))


def compare(trained: Measured, initial: Measured | None) -> TaskScore:
    """A line of the table."""
    paired: list[Terms] = []
    if initial and trained.terms and initial.terms:
        paired = [
            Terms(new.value - old.value, new.weight) for new, old in zip(trained.terms, initial.terms, strict=True)
        ]
    return TaskScore(
        **{field.name: getattr(trained, field.name) for field in fields(Summary)},
        stderr=stderr(trained.terms),
        initial=initial.score if initial else None,
        difference=rounded(trained.score - initial.score) if initial else None,
        difference_stderr=stderr(paired),
    )


def stderr(terms: list[Terms]) -> float | None:
    """The standard error of sum(value) / sum(weight) over questions that were drawn at random; None: of less than two.

    With equal weights it is that of a mean. Otherwise it is the one of a ratio, by its linear approximation.
    """
    if len(terms) < 2:
        return None
    total = math.fsum(term.weight for term in terms)
    ratio = math.fsum(term.value for term in terms) / total
    squares = math.fsum((term.value - ratio * term.weight) ** 2 for term in terms)
    return rounded(math.sqrt(len(terms) / (len(terms) - 1) * squares) / total)


def answer_lines(measurements: Measurements) -> str:
    """The content of outputs/answers.jsonl."""
    lines = []
    for entry, found in measurements.trained.items():
        for trained, initial in zip_longest(found.answers, measurements.initial[entry].answers):
            line = asdict(trained) | {"answer_of_initial": initial.answer if initial else None}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)


def describe(found: TaskScore) -> str:
    """A line for people."""
    before = "" if found.initial is None else f", before training {found.initial:.4f}"
    error = (
        ""
        if found.difference_stderr is None
        else f", difference {found.difference:+.4f} ± {found.difference_stderr:.4f}"
    )
    chance = "" if found.chance is None else f"; by chance {found.chance:.4f}"
    return (
        f"score: {found.task} {found.metric} {found.score:.4f}{before}{error}{chance} ({found.questions:,} questions)"
    )


if __name__ == "__main__":
    command.run(main, "tasks that are finished are in data/.reuse, and the next run continues with them")
