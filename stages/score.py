"""Ask the finished model the questions of `tasks`, and the initial model the same ones.

Reads    outputs/<experiment_name>/model/, evals/, data/model.json, the weights of the initial model, and the documents
         that were trained on: data/corpus/, data/duplicates/, data/pack.json
Writes   outputs/tasks.json, outputs/scores.json: how well both answer; a number for each task
         outputs/answers.jsonl: each question, and what both have answered
Example  dvc exp run -S 'tasks=[evals/sums.yaml]' score
         python -m stages.score --fetch arc_easy: the data of public tasks, from the Hub
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from itertools import chain, zip_longest
from pathlib import Path

from pydantic import PositiveFloat, PositiveInt

from stages.base import command, outputs, publish
from stages.base.files import check_files
from stages.base.outputs import ExperimentName
from stages.base.packed import fingerprint
from stages.base.params_file import load_params
from stages.base.summary import Row, counted, table
from stages.export.evaluation import rounded
from stages.export.lineage import Lineage
from stages.export.scores import Scores, Summary, TaskScore
from stages.model.files import CONFIG, LINEAGE
from stages.model.manifest import ModelManifest
from stages.scoring import contamination, packages, public
from stages.scoring.fetch import fetch
from stages.scoring.request import Measured, Measurements, Model, Request, Terms, ask_ranks
from stages.work import reuse


@dataclass(frozen=True)
class ScoreParams:
    """The leaves of `params.yaml` that decide what is asked."""

    experiment_name: ExperimentName
    """Name of the directory under outputs/."""
    tasks: list[str]
    """What is asked: names of lm-evaluation-harness, or files in evals/."""
    task_limit: PositiveInt | None
    """How many questions of each task are asked. null: all."""
    task_chat: bool
    """Whether questions are written with the model's chat template."""


@dataclass(frozen=True)
class ScoreRuntime(reuse.Runtime):
    """What changes no result."""

    nproc_per_node: PositiveInt | None
    """Ranks; null: one per GPU, or 2 where there is none."""
    timeout_minutes: PositiveFloat
    """How long a rank may take for one thing, such as a chunk of requests."""


def main() -> None:
    """Run the stage."""
    parser = command.parser(__doc__)
    parser.add_argument("--fetch", nargs="+", metavar="TASK", help="only fetch the data of tasks of lm-eval")
    if entries := parser.parse_args().fetch:
        with publish.lock(public.PUBLIC):  # another one reads the manifest before its downloads, and writes it after
            fetch(entries)
        return
    params, runtime = load_params(ScoreParams), load_params(ScoreRuntime, "runtime")
    with publish.lock(outputs.TASKS):
        print(score(params, runtime))


def score(
    params: ScoreParams, runtime: ScoreRuntime, measure: Callable[[Request, int | None], Measurements] = ask_ranks
) -> str:
    """Write what both models answer; return a table of it.

    lm-evaluation-harness asks them (stages/scoring/harness.py). It is installed when `tasks` first names one. What an
    earlier run has measured of a model is not measured again.

    Args:
        params: What is asked.
        runtime: Where.
        measure: Asks, on so many ranks.

    Raises:
        StageError: a model is missing or damaged, or a task cannot be asked.
    """
    measurements, flags = Measurements({}, {}, 0, {}), dict[str, list[bool | None]]()
    if params.tasks:
        request = make_request(params, runtime)
        print(f"score: asking {', '.join(request.tasks)}", flush=True)  # it may take minutes
        measurements = measure(request, runtime.nproc_per_node)
        flags = contamination.find(measurements.passages, request.tokens, runtime)
        reuse.Store(reuse.root(), int).trim(int(runtime.reuse_gib * 2**30))
    of_entry = {
        entry: [*chain.from_iterable(flags[task] for task in dict.fromkeys(each.task for each in found.answers))]
        for entry, found in measurements.trained.items()
    }
    found = [
        compare(trained, initial, [*chain.from_iterable(flags[task] for task in trained.members)])
        for entry, of_trained in measurements.trained.items()
        for trained, initial in zip_longest(of_trained.measured, measurements.initial[entry].measured)
    ]
    for each in found:
        if each.contaminated:
            others = "" if each.clean_score is None else f"; {each.metric} without them is {each.clean_score:.4f}"
            number = counted(each.contaminated, "question")
            print(f"warning: {number} of {each.task} in the documents to train on{others}")
    scores = Scores(found, packages.VERSION, params.task_limit, params.task_chat)
    with publish.together(outputs.ANSWERS, outputs.SCORES, outputs.TASKS):
        publish.write_text(outputs.ANSWERS, answer_lines(measurements, of_entry))
        publish.write_json(outputs.SCORES, scores.metrics())
        scores.write(outputs.TASKS)
    if not params.tasks:
        return table((0, "tasks", "nothing is asked, as tasks is []"))
    return table(*map(describe, scores.tasks), (measurements.num_reused, "results", "reused"))


def make_request(params: ScoreParams, runtime: ScoreRuntime) -> Request:
    """What the ranks are to measure, after the files of the models were compared with what is known of them."""
    public.check(params.tasks)  # before anything is installed
    directory = outputs.directory(params.experiment_name) / "model"
    lineage, manifest = Lineage.read(directory / LINEAGE), ModelManifest.read()
    lineage.check_initial_model("score")
    files = {**lineage.weights, **lineage.files}
    check_files({directory / name: found for name, found in files.items()}, "run `dvc repro -f -s consolidate`")
    others = {name: found for name, found in lineage.files.items() if name != CONFIG}
    return Request(
        tasks=[*dict.fromkeys(params.tasks)],
        limit=params.task_limit,
        chat=params.task_chat,
        trained=_model(directory, {name: files[name] for name in files if name not in others}, [*lineage.weights]),
        initial=find_initial(manifest),
        tokenizer=publish.sha256_json(others),
        packages=str(packages.ensure_installed()),
        store=str(reuse.root()),
        layer_classes=manifest.layer_classes,
        tokens=fingerprint(lineage.data.train, lineage.data.validation),
        timeout_minutes=runtime.timeout_minutes,
    )


def find_initial(manifest: ModelManifest) -> Model | None:
    """The initial model; None: it had random weights.

    Raises:
        StageError: it is not on this machine, or was changed.
    """
    if not manifest.weights:
        return None
    names = [*manifest.weights, CONFIG]
    return _model(manifest.verify(names), {name: manifest.files[name].sha256 for name in names}, manifest.weights)


def _model(directory: Path, files: dict[str, str], weights: list[str]) -> Model:
    return Model(str(directory), weights, publish.sha256_json(files))


def compare(trained: Measured, initial: Measured | None, flags: list[bool | None]) -> TaskScore:
    """A line of the table; the flags say which questions are in the training documents."""
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
        contaminated=flags.count(True),
        too_short=flags.count(None),
        clean_score=mean([term for term, flag in zip(trained.terms, flags, strict=False) if flag is False]),
    )


def mean(terms: list[Terms]) -> float | None:
    """The metric of some questions; None: there are none."""
    total = math.fsum(term.weight for term in terms)
    return rounded(math.fsum(term.value for term in terms) / total) if total else None


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


def answer_lines(measurements: Measurements, flags: dict[str, list[bool | None]]) -> str:
    """The content of outputs/answers.jsonl."""
    lines = []
    for entry, found in measurements.trained.items():
        for trained, initial, flag in zip_longest(found.answers, measurements.initial[entry].answers, flags[entry]):
            line = asdict(trained) | {"answer_of_initial": initial.answer if initial else None, "in_training": flag}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)


def describe(found: TaskScore) -> Row:
    """A line for people."""
    note = [counted(found.questions, "question")]
    if found.initial is not None:
        note.append(f"{found.initial:.4f} before training")
    if found.difference_stderr is not None:
        note.append(f"{found.difference:+.4f} ± {found.difference_stderr:.4f}")
    if found.chance is not None:
        note.append(f"{found.chance:.4f} by chance")
    return f"{found.score:.4f}", f"{found.task} {found.metric}", ", ".join(note)


if __name__ == "__main__":
    command.run(main, "tasks that are finished are in data/.reuse, and the next run continues with them")
