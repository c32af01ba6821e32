"""The report on a training: what data, what model, what it cost, what it learned, and the run before beside it.

    report.html                        opens without a network; light or dark, wide or narrow, on paper
    loss.svg, learning_rate.svg, ...   its pictures, in light colors
    samples.md                         what the model writes

The same files give the same bytes, without dates or random ids, so DVC sees a change only where there is one. What is
missing is a sentence in the report that says how to get it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from stages.artifacts import origin, outputs, publish
from stages.artifacts.errors import StageError
from stages.artifacts.model_files import CONFIG, LINEAGE
from stages.artifacts.publish import write_text
from stages.export import page, pictures, previous
from stages.export.evaluation import Evaluation, Loss, Sample
from stages.export.facts import FILES, Extracted, Manifest, Organized, Packed, Result
from stages.export.previous import Previous

PAGE = "report.html"
SAMPLES = "samples.md"

_MODEL_MANIFEST = Path("data/model.json")
_DIMENSIONS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden size": ("hidden_size", "n_embd"),
    "size of the MLP": ("intermediate_size", "n_inner"),
    "attention heads": ("num_attention_heads", "n_head"),
    "key and value heads": ("num_key_value_heads",),
    "experts": ("num_local_experts", "num_experts"),
    "vocabulary": ("vocab_size",),
    "longest sequence": ("max_position_embeddings", "n_positions"),
    "tied embeddings": ("tie_word_embeddings",),
}
"""What a config calls them, in most models and in GPT-2."""
_NO_ROWS = "There are no held-out rows: set validation_splits to 1 or more to measure a loss and to see samples."
_SHORT = (
    "There are no held-out rows, because the held-out text is shorter than a row of seq_length tokens: to measure a "
    "loss and to see samples, set validation_splits to more than {splits}, or seq_length to less than {length}."
)
_NO_EVALUATION = f"{outputs.EVALUATION} is missing: run `dvc repro evaluate`"

Comparison = tuple[str, str, str, str]
"""A line of the comparison with the run before: name, here, there, difference."""


def write(directory: Path, experiment_name: str) -> None:
    """Write the report, its pictures and the samples into a directory, from the files of the project.

    Args:
        directory: An empty directory.
        experiment_name: As in params.yaml.

    Raises:
        StageError: the lineage or the history is missing, or a file of the run is damaged.
    """
    model = outputs.directory(experiment_name) / "model"
    files = {path: path for path in FILES if path == outputs.HISTORY or path.exists()}
    run = Result.read(model / LINEAGE, files)
    before: Previous | None = None
    reason = ""
    try:
        before = previous.find(outputs.directory(experiment_name) / "run.json")
    except StageError as error:
        reason = f"{error}."
    drawn = {
        name: (draw(rows, older), caption)
        for kind, rows, older in (
            (pictures.COURSE, run.history, before.result.history if before else []),
            (pictures.SPEED, run.speed, before.result.speed if before else []),
        )
        for name, (draw, caption) in kind.items()
    }
    svgs = {name: (svg, caption) for name, (svg, caption) in drawn.items() if svg is not None}
    for name, (svg, _) in svgs.items():
        write_text(directory / f"{name}.svg", svg)
    figures = {name: page.figure(svg, name, caption) for name, (svg, caption) in svgs.items()}
    samples = run.evaluation.samples if run.evaluation else []
    write_text(directory / SAMPLES, _markdown(experiment_name, samples))
    content = page.document(
        experiment_name,
        f"Run {run.lineage.run_id}, {run.lineage.step:,} steps, from {_start(run)}",
        page.tiles(_headline(run)),
        _section("Loss", lambda: _losses(run)),
        _section("Course of the training", lambda: _course(figures)),
        _section("The run before", lambda: _compared(run, before) if before else page.paragraph(reason)),
        _section("Cost", lambda: _cost(run)),
        _section("Data", lambda: _data(run)),
        _section("Rows as the model saw them", _rows),
        _section("Model", lambda: _model(run, model)),
        _section("Samples", lambda: _sample_texts(run.evaluation)),
        _section("Parameters", lambda: _params(run, before)),
    )
    write_text(directory / PAGE, content)


def _section(heading: str, *parts: Callable[[], str]) -> str:
    """A section of parts; in place of one that lacks a file there is a sentence."""
    return page.section(heading, *(_or_sentence(part) for part in parts))


def _or_sentence(part: Callable[[], str]) -> str:
    try:
        return part()
    except StageError as error:
        return page.paragraph(f"{error}.")


def _start(run: Result) -> str:
    """What the run started from."""
    source = run.lineage.model
    is_random = run.lineage.params.get("initial_weights") == "random"
    with suppress(StageError):  # no record
        is_random = is_random or not Manifest.read(_MODEL_MANIFEST).weights
    return f"random weights with the config of {source.name}" if is_random else source.name


def _headline(run: Result) -> list[tuple[str, str]]:
    values = []
    if run.evaluation and (loss := run.evaluation.validation):
        values += [("validation loss", f"{loss.loss:.4f}"), ("perplexity", f"{loss.perplexity:,.2f}")]
        values += [("bits per byte", f"{loss.bits_per_byte:.4f}")] if loss.bits_per_byte is not None else []
    if run.evaluation:
        values += [("parameters", f"{run.evaluation.num_parameters:,}")]
    if run.trained:
        values += [
            ("tokens trained on", f"{run.trained.tokens:,}"),
            ("time", _duration(run.trained.cost.training_seconds)),
        ]
    return values


def _losses(run: Result) -> str:
    evaluation = run.evaluation
    if evaluation is None:
        raise StageError(_NO_EVALUATION)
    if evaluation.validation is None:
        packed = run.params().get("pack", {})
        splits, length = packed.get("validation_splits"), packed.get("seq_length")
        return page.paragraph(_SHORT.format(splits=splits, length=length) if splits else _NO_ROWS)
    # Of a single split it would be the same line again.
    by_split = evaluation.by_split if len(evaluation.by_split) > 1 else {}
    tables: dict[str, dict[str, Loss | None]] = {
        "The exported weights on all held-out rows": {"all held-out rows": evaluation.validation, **by_split},
        "On the rows that the training measured": {
            "before training": evaluation.untrained,
            "after training": evaluation.trained,
            f"exported as {evaluation.dtype}": evaluation.exported,
        },
    }
    header = ["", "nats per token", "perplexity", "bits per byte", "rows", "tokens"]
    return "\n".join(
        page.table(caption, header, [[name, *_cells(loss)] for name, loss in losses.items() if loss], numbers=True)
        for caption, losses in tables.items()
    )


def _cells(loss: Loss) -> list[str]:
    bits = "not known" if loss.bits_per_byte is None else f"{loss.bits_per_byte:.4f}"
    return [f"{loss.loss:.4f}", f"{loss.perplexity:,.2f}", bits, f"{loss.rows:,}", f"{loss.tokens:,}"]


def _course(figures: dict[str, str]) -> str:
    notes = [
        page.paragraph(f"{source} is missing or has no values: run `dvc repro train`.")
        for kind, source in ((pictures.COURSE, outputs.HISTORY), (pictures.SPEED, outputs.SPEED))
        if not figures.keys() & kind.keys()
    ]
    return "\n".join([page.columns(*figures.values()), *notes])


def _cost(run: Result) -> str:
    if run.trained is None:
        raise StageError(f"{outputs.TRAIN_METRICS} is missing: run `dvc repro train`")
    cost, adopted = run.trained.cost, run.lineage.adopted
    facts = [
        ("time", _duration(cost.training_seconds)),
        ("steps", f"{run.trained.steps:,}"),
        ("tokens", f"{run.trained.tokens:,}"),
        ("tokens per second", _number(cost.tokens_per_second, ",.0f")),
        ("MFU", _number(cost.mfu, ".1%")),
        ("peak memory of rank 0", _number(cost.memory_peak_gib, ",.2f", " GiB")),
        ("launches that saved a checkpoint", _launches(cost.launches)),
    ]
    if run.trained.skipped_steps:
        facts += [("skipped steps", f"{run.trained.skipped_steps:,} whose gradient was not finite")]
    while adopted:
        facts += [
            ("continued from", f"step {adopted.step:,} of run {adopted.run_id}; {'; '.join(adopted.differences)}")
        ]
        adopted = adopted.adopted
    total = sum(cost.milliseconds.values())
    phases = [[name, f"{value:,.1f}", f"{value / total:.1%}"] for name, value in cost.milliseconds.items() if value]
    return page.columns(
        page.table("The training", (), facts),
        page.table("A step, on average", ["", "ms", "share"], phases, numbers=True) if phases else "",
    )


def _launches(number: int | None) -> str:
    resumed = "" if (number or 0) < 2 else ", each after the first resumed the run where the one before was interrupted"
    return _number(number, ",d") + resumed


def _data(run: Result) -> str:
    tokens = publish.sha256_json([run.lineage.data.train, run.lineage.data.validation])
    if not (records := origin.find_records(tokens)):
        raise StageError("There are no records of how these tokens were made: they were made elsewhere")
    parts = []
    if "organize" in records:
        organized = Organized.read(origin.RECORDS["organize"])
        formats = [[name, f"{found.files:,}", f"{found.bytes / 1e6:,.2f}"] for name, found in organized.formats.items()]
        formats += [["all", f"{organized.files:,}", f"{organized.bytes / 1e6:,.2f}"]]
        parts += [page.table("Raw files", ["", "files", "MB"], formats, numbers=True)]
        left_out = [*_counts(organized.passed_over_counts)]
        left_out += [("duplicate files", f"{organized.duplicate_files:,}")] if organized.duplicate_files else []
        parts += [page.table("Files that were passed over", (), left_out)] if left_out else []
    if "extract" in records:
        extracted = Extracted.read(origin.RECORDS["extract"])
        text = [("strings", f"{extracted.strings:,}"), ("characters", f"{extracted.characters:,}")]
        if extracted.duplicate_strings:
            text += [("duplicate strings, dropped", f"{extracted.duplicate_strings:,}")]
        if extracted.fallback_encoded_files:
            text += [("files in another encoding than UTF-8", f"{extracted.fallback_encoded_files:,}")]
        named = f" ({origin.RECORDS['extract']} names them)" if extracted.rejected_files else ""
        text += [("files rejected, entirely or in part", f"{extracted.rejected_files:,}{named}")]
        text += [(f"rejected: {reason}", count) for reason, count in _counts(extracted.rejected)]
        parts += [page.table("Text", (), text)]
    packed = Packed.read(origin.RECORDS["pack"])
    sets = {"training": packed.train, "held out": packed.validation}
    total = sum(part.tokens for part in sets.values())
    rows = {
        "documents": [f"{part.documents:,}" for part in sets.values()],
        "characters": [f"{part.characters:,}" for part in sets.values()],
        "tokens": [f"{part.tokens:,}" for part in sets.values()],
        "share of the tokens": [f"{part.tokens / max(1, total):.1%}" for part in sets.values()],
        "rows": [f"{part.rows:,}" for part in sets.values()],
        "characters per token": [_number(part.characters_per_token, ".2f") for part in sets.values()],
        "unknown tokens": [_number(part.unknown_share, ".2%") for part in sets.values()],
    }
    caption = f"Tokens, encoded by {packed.encoder.name}"
    parts += [page.table(caption, ["", *sets], [[name, *cells] for name, cells in rows.items()], numbers=True)]
    return page.columns(*parts)


def _counts(found: dict[str, int]) -> Iterator[tuple[str, str]]:
    for reason, number in sorted(found.items(), key=lambda item: (-item[1], item[0])):
        yield reason, f"{number:,}"


def _rows() -> str:
    if not outputs.ROWS.is_file():
        raise StageError(f"{outputs.ROWS} is missing: run `dvc repro plan`")
    legend, _, shown = outputs.ROWS.read_text(encoding="utf-8").partition("\n\n")
    rows = re.split(r"\n\n(?=row \d+\n)", shown.rstrip("\n"))
    # What is read but not predicted is between brackets.
    texts = [
        page.text((part, bool(index % 2)) for index, part in enumerate(re.split("(⟦.*?⟧)", row, flags=re.DOTALL)))
        for row in rows
    ]
    return "\n".join([page.paragraph(f"The first rows of the first step. {legend}."), *texts])


def _model(run: Result, directory: Path) -> str:
    source, packages = run.lineage.model, run.lineage.packages
    facts = [("started from", _start(run)), ("revision", source.revision)]
    facts += [("commit", source.commit)] if source.commit else []
    facts += [("made by run", source.lineage.run_id)] if source.lineage else []
    if run.evaluation:
        facts += [("parameters", f"{run.evaluation.num_parameters:,}"), ("dtype", run.evaluation.dtype)]
    facts += [("computed by", ", ".join(f"{name} {version}" for name, version in packages.items()))]
    try:
        config = publish.read_json(directory / CONFIG)
    except (FileNotFoundError, ValueError):
        raise StageError(f"{directory / CONFIG} is missing or damaged: run `dvc repro -f -s consolidate`") from None
    dimensions = [("architecture", ", ".join(config.get("architectures") or ["not known"]))]
    for name, keys in _DIMENSIONS.items():
        dimensions += [(name, page.value(config[key])) for key in keys if config.get(key) is not None]
    return page.columns(page.table("This model", (), facts), page.table("Its config", (), dimensions))


def _sample_texts(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        raise StageError(_NO_EVALUATION)
    if not evaluation.samples:
        reason = "eval_samples is 0" if evaluation.validation else "no rows are held out"
        raise StageError(f"There are no samples, because {reason}")
    texts = [page.text([(sample.prompt, True), (sample.continuation, False)]) for sample in evaluation.samples]
    return "\n".join([page.paragraph("Pale: text from a held-out document. After it, what the model writes."), *texts])


def _params(run: Result, before: Previous | None) -> str:
    theirs = before.result.params() if before else {}
    parts = []
    for stage, values in run.params().items():
        older = theirs.get(stage, values)
        rows = [[name, page.value(value)] for name, value in values.items()]
        changed = {index for index, (name, value) in enumerate(values.items()) if older.get(name) != value}
        parts += [page.table(stage, (), rows, marked=changed)]
    note = "Marked: not as in the run before." if before else "Those of the stages that made data and model."
    return "\n".join([page.paragraph(note), page.columns(*parts)])


def _compared(run: Result, before: Previous) -> str:
    other = before.result
    parts = [page.paragraph(f"Run {other.lineage.run_id}, of commit {before.commit}: {before.subject}")]
    results = [*_results(run, other)]
    parts += (
        [page.table("Results", ["", "this run", "run before", "difference"], results, numbers=True)] if results else []
    )
    differences = [*_differences(run, other)]
    if differences:
        table = page.table("Differences", ["", "this run", "run before"], differences)
    else:
        table = page.paragraph(
            "Both have the same parameters of data and training, data, initial model, code, packages and dtype."
        )
    if run.lineage.data.validation != other.lineage.data.validation:
        parts += [page.paragraph("The held-out rows are not the same, so the losses are not those of the same text.")]
    return "\n".join([*parts[:1], page.columns(*parts[1:], table)])


def _results(run: Result, other: Result) -> Iterator[Comparison]:
    ours, theirs = run.evaluation, other.evaluation
    if ours and theirs and ours.validation and theirs.validation:
        here, there = ours.validation, theirs.validation
        yield _line("validation loss", here.loss, there.loss, ".4f")
        yield _line("perplexity", here.perplexity, there.perplexity, ",.2f")
        if here.bits_per_byte is not None and there.bits_per_byte is not None:
            yield _line("bits per byte", here.bits_per_byte, there.bits_per_byte, ".4f")
    if run.trained and other.trained:
        yield _line("steps", run.trained.steps, other.trained.steps, ",d")
        yield _line("tokens", run.trained.tokens, other.trained.tokens, ",d")
        here_cost, there_cost = run.trained.cost, other.trained.cost
        yield _line("seconds", here_cost.training_seconds, there_cost.training_seconds, ",.1f")
        for name, spec in (("tokens_per_second", ",.0f"), ("mfu", ".3f"), ("memory_peak_gib", ",.3f")):
            a, b = getattr(here_cost, name), getattr(there_cost, name)
            if a is not None and b is not None:
                yield _line(name.replace("_", " ").replace("gib", "(GiB)"), a, b, spec)


def _line(name: str, here: float, there: float, spec: str) -> Comparison:
    shown, other = format(here, spec), format(there, spec)
    a, b = (float(text.replace(",", "")) for text in (shown, other))  # as a reader computes it
    return name, shown, other, format(a - b, f"+{spec.replace('d', '.0f')}") if a != b else "0"


def _differences(run: Result, other: Result) -> Iterator[tuple[str, str, str]]:
    ours, theirs = run.lineage, other.lineage
    here, there = run.params(), other.params()
    for stage, values in here.items():
        older = there.get(stage, {})
        for name in [*values, *(name for name in older if name not in values)]:
            if older and values.get(name) != older.get(name):
                yield name, page.value(values.get(name)), page.value(older.get(name))
    models = [f"{model.name}, {model.revision}" for model in (ours.model, theirs.model)]
    if models[0] != models[1]:
        yield "initial model", models[0], models[1]
    if run.evaluation and other.evaluation and run.evaluation.dtype != other.evaluation.dtype:
        yield "dtype of the exported weights", run.evaluation.dtype, other.evaluation.dtype
    things = {
        "training rows": (ours.data.train, theirs.data.train),
        "held-out rows": (ours.data.validation, theirs.data.validation),
        "files of the initial model": (ours.model.manifest, theirs.model.manifest),
        "code of train": (ours.code, theirs.code),
    }
    for name, (a, b) in things.items():
        if a != b:
            yield name, a[:10], b[:10]
    for name in sorted(ours.packages.keys() | theirs.packages.keys()):
        if ours.packages.get(name) != theirs.packages.get(name):
            yield name, ours.packages.get(name, "none"), theirs.packages.get(name, "none")


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "not known" if value is None else f"{value:{spec}}{unit}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def _markdown(name: str, samples: Sequence[Sample]) -> str:
    about = "Each prompt is text from a held-out document." if samples else "There are none."
    blocks = [f"# Samples from {name}\n\n{about}\n"]
    for number, sample in enumerate(samples, 1):
        blocks.append(
            f"## {number}\n\nPrompt:\n\n{_quote(sample.prompt)}\n\nContinuation:\n\n{_quote(sample.continuation)}\n"
        )
    return "\n".join(blocks)


def _quote(text: str) -> str:
    # Indented code, not a fence: a sample may contain any number of backticks.
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    "
