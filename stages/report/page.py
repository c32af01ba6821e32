"""The report on a training: what data, what model, what it cost, what it learned, and the previous run beside it.

    report.html                        opens without a network; wide or narrow, on paper
    loss.svg, learning_rate.svg, ...   its pictures

The same files give the same bytes, without dates or random ids, so DVC sees a change only where there is one.
"""

import base64
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from stages.base import origin, outputs, publish
from stages.base.errors import StageError
from stages.base.identity import Adoption
from stages.base.packed import fingerprint
from stages.model.files import CONFIG
from stages.model.manifest import MANIFEST
from stages.report import pictures, runs
from stages.report.runs import Number, Run

PAGE = "report.html"


def write(directory: Path, experiment_name: str, raw_dir: str) -> None:
    """Write the report and its pictures into a directory, from the files of the project.

    Args:
        directory: An empty directory.
        experiment_name: As in params.yaml.
        raw_dir: As in params.yaml.

    Raises:
        StageError: a file of the run is missing or damaged.
    """
    run = Run.read(Path(), experiment_name)
    before = runs.previous(run)
    figures = {}
    sources = run.trained.get("sources", {})
    course = pictures.COURSE | ({"loss_by_source": pictures.of_sources(sources)} if sources else {})
    for kind, table in ((course, "history"), (pictures.SPEED, "speed")):
        for name, picture in kind.items():
            rows, older = getattr(run, table), getattr(before.run, table) if before else []
            if drawn := pictures.draw(picture, rows, older):
                svg, text = drawn
                publish.write_text(directory / f"{name}.svg", svg)
                figures[picture.caption] = (base64.b64encode(svg.encode()).decode(), text)
    here, there = (made_of(one) if one else {} for one in (run, before.run if before else None))
    content = _environment().get_template(PAGE).render(
        name=experiment_name,
        colors=pictures.COLORS,
        is_random=run.lineage.params.get("initial_weights") == "random" or not publish.read_json(MANIFEST)["weights"],
        run=run,
        adopted=_adoptions(run.lineage.adopted),
        figures=figures,
        before=before,
        results=compared(run.numbers, before.run.numbers) if before else [],
        differences=[
            (name, here.get(name), there.get(name)) for name in here | there if here.get(name) != there.get(name)
        ],
        data=_records(run),
        raw_dir=raw_dir,
        rows=_text(outputs.ROWS, "plan"),
        config=json.loads(_text(outputs.directory(experiment_name) / "model" / CONFIG, "consolidate")),
    )  # fmt: skip
    publish.write_text(directory / PAGE, content)


def _environment() -> Environment:
    # autoescape: names of files and the text of samples may be anything.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "duration": duration, "value": value}
    return environment


def compared(here: dict[str, Number], there: dict[str, Number]) -> list[tuple[str, str, str, str]]:
    """The numbers of two runs, where both are known, and the difference as a reader computes it."""
    lines = []
    for name, (ours, spec) in here.items():
        theirs, _ = there[name]
        if ours is not None and theirs is not None:
            shown, other = format(ours, spec), format(theirs, spec)
            a, b = (float(text.replace(",", "")) for text in (shown, other))
            lines += [(name, shown, other, format(a - b, f"+{spec.replace('d', '.0f')}") if a != b else "0")]
    return lines


def made_of(run: Run) -> dict[str, Any]:
    """What decided the result of a run."""
    lineage = run.lineage
    params = {name: found for values in run.params().values() for name, found in values.items()}
    return params | {
        "initial model": f"{lineage.model.name}, {lineage.model.revision}",
        "files of the initial model": lineage.model.manifest[:10],
        "training rows": lineage.data.train[:10],
        "held-out rows": lineage.data.validation[:10],
        "code of train": lineage.code[:10],
        "dtype of the exported weights": run.evaluation.dtype,
        **lineage.packages,
    }


def _adoptions(adopted: Adoption | None) -> list[Adoption]:
    """The checkpoints of other runs that it continued from, the newest first."""
    return [adopted, *_adoptions(adopted.adopted)] if adopted else []


def _records(run: Run) -> dict[str, Any]:
    """What the data stages have recorded of the rows that the run was trained on, by stage."""
    tokens = fingerprint(run.lineage.data.train, run.lineage.data.validation)
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
