"""The report on a training: what data, what model, what it cost, and what it learned.

    report.html                        opens without a network; wide or narrow, on paper
    loss.svg, learning_rate.svg, ...   its pictures

The same files give the same bytes, without dates or random ids, so DVC sees a change only where there is one.
"""

import base64
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from stages.artifacts import history, origin, outputs, publish
from stages.artifacts.errors import StageError
from stages.artifacts.identity import Adoption
from stages.artifacts.model_files import CONFIG, LINEAGE
from stages.artifacts.params_file import flatten
from stages.export import pictures
from stages.export.evaluation import Evaluation
from stages.export.provenance import Lineage

PAGE = "report.html"
_MANIFEST = Path("data/model.json")


def write(directory: Path, experiment_name: str) -> None:
    """Write the report and its pictures into a directory, from the files of the project.

    Args:
        directory: An empty directory.
        experiment_name: As in params.yaml.

    Raises:
        StageError: a file of the run is missing or damaged.
    """
    model = outputs.directory(experiment_name) / "model"
    evaluation, lineage = Evaluation.read(outputs.EVALUATION), Lineage.read(model / LINEAGE)
    trained, numbers = _trained(evaluation)
    figures = {}
    for kind, table in ((pictures.COURSE, outputs.HISTORY), (pictures.SPEED, outputs.SPEED)):
        rows = history.read(table)
        for name, picture in kind.items():
            if drawn := pictures.draw(picture, rows):
                svg, text = drawn
                publish.write_text(directory / f"{name}.svg", svg)
                figures[picture.caption] = (base64.b64encode(svg.encode()).decode(), text)
    content = _environment().get_template(PAGE).render(
        name=experiment_name,
        colors=pictures.COLORS,
        is_random=lineage.params.get("initial_weights") == "random" or not publish.read_json(_MANIFEST)["weights"],
        lineage=lineage,
        evaluation=evaluation,
        trained=trained,
        numbers=numbers,
        adopted=_adoptions(lineage.adopted),
        figures=figures,
        params=_params(lineage),
        data=_records(lineage),
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


def _trained(evaluation: Evaluation) -> tuple[dict[str, Any], dict[str, tuple[float | None, str]]]:
    """The content of train_metrics.json; and the numbers of a run, each with its format, None where it is not known.

    Raises:
        StageError: the file is missing or damaged.
    """
    loss = evaluation.validation
    try:
        trained: dict[str, Any] = publish.read_json(outputs.TRAIN_METRICS)
        cost = trained["cost"]
        return trained, {
            "validation loss": (loss.loss if loss else None, ".4f"),
            "perplexity": (loss.perplexity if loss else None, ",.2f"),
            "bits per byte": (loss.bits_per_byte if loss else None, ".4f"),
            "parameters": (evaluation.num_parameters, ",d"),
            "steps": (trained["steps"], ",d"),
            "tokens": (trained["tokens"], ",d"),
            "tokens per second": (cost["tokens_per_second"], ",.0f"),
            "MFU": (cost["mfu"], ".3f"),
            "peak memory of rank 0 (GiB)": (cost["memory_peak_gib"], ",.3f"),
        }
    except FileNotFoundError:
        raise StageError(f"{outputs.TRAIN_METRICS} is missing: run `dvc repro train`") from None
    except (ValueError, KeyError, TypeError):
        raise StageError(f"{outputs.TRAIN_METRICS} is not valid: run `dvc repro -f -s train`") from None


def _params(lineage: Lineage) -> dict[str, dict[str, Any]]:
    """The parameters of each stage that are known, by dotted name."""
    stages = {stage: origin.params for stage, origin in lineage.origins.items()}
    return {stage: dict(flatten(values)) for stage, values in {**stages, "train": lineage.params}.items()}


def _adoptions(adopted: Adoption | None) -> list[Adoption]:
    """The checkpoints of other runs that it continued from, the newest first."""
    return [adopted, *_adoptions(adopted.adopted)] if adopted else []


def _records(lineage: Lineage) -> dict[str, Any]:
    """What the data stages have recorded of the rows that the run was trained on, by stage."""
    tokens = publish.sha256_json([lineage.data.train, lineage.data.validation])
    return {stage: publish.read_json(origin.RECORDS[stage]) for stage in origin.find_records(tokens)}


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
