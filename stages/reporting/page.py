"""The page on a training: what data, what model, what it cost, what it learned.

    report.html                        opens without a network; wide or narrow, on paper
    loss.svg, learning_rate.svg, ...   its pictures

The same files give the same bytes, without dates or random ids, so DVC sees a change only where there is one.
"""

import base64
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from stages.base import history, origin, outputs, publish
from stages.base.errors import StageError
from stages.base.identity import Adoption
from stages.base.packed import fingerprint
from stages.base.params_file import flatten
from stages.checkpointing.state import TrainMetrics
from stages.export.evaluation import Evaluation
from stages.export.lineage import Lineage
from stages.export.scores import Scores
from stages.model.files import CONFIG, LINEAGE
from stages.model.manifest import MODEL_MANIFEST
from stages.reporting import pictures

PAGE = "report.html"


def write(directory: Path, experiment_name: str, raw_dir: str) -> None:
    """Write the page and its pictures into a directory, from the files of the project.

    Args:
        directory: An empty directory.
        experiment_name: As in params.yaml.
        raw_dir: As in params.yaml.

    Raises:
        StageError: a file of the run is missing or damaged, or another model was evaluated.
    """
    model = outputs.directory(experiment_name) / "model"
    lineage, evaluation = Lineage.read(model / LINEAGE), Evaluation.read(outputs.EVALUATION)
    if (evaluation.run_id, evaluation.step) != (lineage.run_id, lineage.step):
        raise StageError(f"{outputs.EVALUATION} is not of the model in {model}: run `dvc repro report`")
    trained = TrainMetrics.read(outputs.TRAIN_METRICS)
    scores, figures, answers = Scores.read(outputs.TASKS), {}, None
    if of_tasks := pictures.draw_tasks(scores.tasks):
        publish.write_text(directory / "tasks.svg", of_tasks[0])
        answers = base64.b64encode(of_tasks[0].encode()).decode(), of_tasks[1]
    course = pictures.COURSE | ({"loss_by_source": pictures.of_sources(trained.sources)} if trained.sources else {})
    for kind, table in ((course, outputs.HISTORY), (pictures.SPEED, outputs.SPEED)):
        rows = history.read(table)
        for name, picture in kind.items():
            if drawn := pictures.draw(picture, rows):
                svg, text = drawn
                publish.write_text(directory / f"{name}.svg", svg)
                figures[picture.caption] = (base64.b64encode(svg.encode()).decode(), text)
    content = _environment().get_template("page.html").render(
        name=experiment_name,
        colors=pictures.COLORS,
        is_random=not publish.read_json(MODEL_MANIFEST)["weights"],
        lineage=lineage,
        evaluation=evaluation,
        scores=scores,
        answers=answers,
        trained=trained,
        adopted=_adoptions(lineage.adopted),
        figures=figures,
        params=_params(lineage),
        data=_records(lineage),
        raw_dir=raw_dir,
        rows=_text(outputs.ROWS, "plan"),
        config=json.loads(_text(model / CONFIG, "consolidate")),
    )  # fmt: skip
    publish.write_text(directory / PAGE, content)


def _environment() -> Environment:
    # autoescape: names of files and the text of samples may be anything.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "duration": duration, "value": value}
    return environment


def _params(lineage: Lineage) -> dict[str, dict[str, Any]]:
    """The parameters of each stage that are known, by dotted name."""
    stages = {stage: origin.params for stage, origin in lineage.origins.items()} | {"train": lineage.params}
    # What the preset sets is null in `fsdp`.
    return {
        stage: {name: found for name, found in flatten(values) if found is not None or not name.startswith("fsdp.")}
        for stage, values in stages.items()
    }


def _adoptions(adopted: Adoption | None) -> list[Adoption]:
    """The checkpoints of other runs that it continued from, the newest first."""
    return [adopted, *_adoptions(adopted.adopted)] if adopted else []


def _records(lineage: Lineage) -> dict[str, Any]:
    """What the data stages have recorded of the rows that the run was trained on, by stage."""
    tokens = fingerprint(lineage.data.train, lineage.data.validation)
    return {stage: publish.read_json(origin.DATA_METRICS[stage]) for stage in origin.find_data_metrics(tokens)}


def _text(path: Path, stage: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise StageError(f"{path} is missing: run `dvc repro {stage}`") from None


def number(found: Any, spec: str = ",d") -> str:
    """A number that may not be known."""
    return format(found, spec) if isinstance(found, (int, float)) else "not known"


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def value(found: Any) -> str:
    """A value of a JSON or YAML file, for people."""
    return found if isinstance(found, str) else json.dumps(found)
