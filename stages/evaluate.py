"""Measure what the finished model has learned, on held-out rows.

Reads    outputs/<experiment_name>/model/, outputs/history.tsv, data/tokens/validation, data/pack.json, data/model.json,
         and for samples the weights of the initial model
Writes   outputs/evaluation.json: losses before training, after it, and of the exported weights; samples of text
         outputs/metrics.json: the loss of the exported weights, for `dvc exp show`
Example  dvc exp run -S eval_samples=5 evaluate
"""

import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stages.base import command, history, outputs, publish, summary
from stages.base.errors import StageError
from stages.base.files import check_files
from stages.base.history import Row
from stages.base.outputs import ExperimentName
from stages.base.packed import METRICS, REMEDY, VALIDATION, PackedTokens, PackMetrics, RowsMetrics
from stages.base.params_file import load_params
from stages.evaluation.request import LossSum, Measurements, Request, Trained, ask_ranks, change_of_export, stored_dtype
from stages.export.evaluation import Evaluation, Loss, bits_per_byte, perplexity, rounded
from stages.export.lineage import Lineage
from stages.model.dtypes import PRECISIONS
from stages.model.files import CARD, LINEAGE
from stages.model.manifest import ModelManifest

BATCH_TOKENS = 8192
"""Of a forward pass, unless a row is longer. More would hardly be faster, and a GPU may hold the whole model here."""
MAX_ROUNDED_AWAY = 0.05
"""Part of the gain that the rounding of the export may undo without a warning."""
TOLERANCES = {"fp32": 1e-4, "fp16": 2**-10, "tf32": 2**-10, "bf16": 2**-7, "fp8": 2**-4, "nf4": 2**-3}
"""By how many nats the loss may change with the rounding of weights, or of what is computed with them, where the
training has gained nothing; above 1 nat by how much of itself."""
MAX_EXPLAINED = 0.5
"""Part of what the training has changed of the loss that rounding may undo. Beyond it the model is not the trained
one."""


@dataclass(frozen=True)
class EvaluateParams:
    """The leaves of `params.yaml` that decide what is measured."""

    experiment_name: ExperimentName
    """Name of the directory under outputs/."""
    batch_size: PositiveInt
    """Rows per forward pass where `eval_batch_size` is null."""
    eval_batch_size: PositiveInt | None
    """Rows per forward pass."""
    eval_samples: NonNegativeInt
    """How many held-out texts the model continues."""


@dataclass(frozen=True)
class EvaluateRuntime:
    """What changes no result."""

    nproc_per_node: PositiveInt | None
    """Ranks; null: one per GPU, or 2 where there is none."""
    timeout_minutes: PositiveFloat
    """How long a rank may take for one thing, such as a batch."""


def main() -> None:
    """Run the stage."""
    command.parser(__doc__).parse_args()
    params, runtime = load_params(EvaluateParams), load_params(EvaluateRuntime, "runtime")
    with publish.lock(outputs.EVALUATION):
        write(evaluate(params, runtime))
        keep_from_dvc(outputs.directory(params.experiment_name))


def keep_from_dvc(directory: Path) -> None:
    """Have DVC leave the model of an experiment where it is when another `experiment_name` has its turn.

    `dvc exp run` and `dvc checkout` delete what DVC put there and no stage of the moment has as an out, unless it was
    changed since (`_remove_unused_links` in dvc/repo/checkout.py). So a small file of each gets a new time and keeps
    its bytes: `dvc status` finds nothing changed.
    """
    with suppress(OSError):  # links to a cache with files of another user, which DVC then deletes as before
        for path in (directory / "model" / CARD, directory / "run.json", *directory.glob(f"adapter/{CARD}")):
            os.utime(path)


def evaluate(
    params: EvaluateParams, runtime: EvaluateRuntime,
    measure: Callable[[Request, int | None], Measurements] = ask_ranks,
) -> Evaluation:  # fmt: skip
    """Measure the model, and compare it with what was trained.

    Args:
        params: What is measured.
        runtime: Where.
        measure: Measures it, on so many ranks.

    Raises:
        StageError: the model, the history or the held-out rows are missing, damaged or of another training, or the
            exported weights have another loss than the trained ones.
    """
    directory = outputs.directory(params.experiment_name) / "model"
    lineage = read_verified_lineage(directory)
    course = history.read(outputs.HISTORY)
    model, data = ModelManifest.read(), PackMetrics.read(METRICS)
    lineage.check_initial_model("evaluate")
    rows = PackedTokens.read(VALIDATION)
    if rows.fingerprint != lineage.data.validation:
        raise StageError(f"{VALIDATION} has other rows than the training measured: run `dvc repro evaluate`")
    check_files(rows.digests, REMEDY)
    request = Request(
        model=str(directory),
        weights=[*lineage.weights],
        # Where it has weights but is not on this machine, an error: without its samples this would be another result.
        initial=str(model.verify()) if params.eval_samples and model.weights else None,
        initial_weights=model.weights,
        layer_classes=model.layer_classes,
        eos_token_id=model.eos_token_id,
        eval_rows=lineage.params["eval_rows"],
        batch_size=min(params.eval_batch_size or params.batch_size, max(1, BATCH_TOKENS // rows.seq_length)),
        document_mask=lineage.params["document_mask"],
        num_samples=params.eval_samples,
        timeout_minutes=runtime.timeout_minutes,
        trained=find_trained(course, lineage, stored_dtype(directory)),
    )
    print(f"evaluate: measuring {summary.counted(rows.num_rows, 'held-out row')}", flush=True)  # it may take minutes
    measurements = measure(request, runtime.nproc_per_node)
    texts = {source: data.sources[f"{VALIDATION.name} {source}"] for source in rows.sources}
    return describe(measurements, data.validation, texts, lineage, course, stored_dtype(directory))


def write(evaluation: Evaluation) -> None:
    """Write the evaluation and the metrics, and print the losses."""
    validation = evaluation.validation
    # Each name is a column of `dvc exp show`, so there are few; null without held-out rows.
    metrics = {
        "validation_loss": validation and validation.loss,
        "perplexity": validation and validation.perplexity,
        "bits_per_byte": validation and validation.bits_per_byte,
    }
    with publish.together(outputs.EVALUATION, outputs.METRICS):
        evaluation.write(outputs.EVALUATION)
        publish.write_json(outputs.METRICS, metrics)
    cost, warning = rounding_texts(evaluation)
    if cost:
        print(f"note: {cost}")
    if warning:
        print(f"warning: {warning}")
    if validation:
        print(summary.table(*loss_rows(validation, evaluation)))
    else:
        print("note: no rows are held out to measure a loss on")


def read_verified_lineage(directory: Path) -> Lineage:
    """The lineage of a model, after the files of the model and the history were compared with it.

    Raises:
        StageError: one of these is missing or was changed.
    """
    lineage = Lineage.read(directory / LINEAGE)
    files = {directory / name: digest for name, digest in {**lineage.weights, **lineage.files}.items()}
    check_files(files, "run `dvc repro -f -s consolidate`")
    if lineage.history not in (None, history.digest(outputs.HISTORY, lineage.step)):
        raise StageError(
            f"{outputs.HISTORY} is not of the run that made {directory}: run `dvc repro evaluate`; if it is damaged, "
            "`dvc repro -f -s train` writes it again from the checkpoint"
        )
    return lineage


def describe(
    measurements: Measurements, text: RowsMetrics, texts: Mapping[str, RowsMetrics], lineage: Lineage,
    course: list[Row], dtype: str,
) -> Evaluation:  # fmt: skip
    """The content of evaluation.json.

    Args:
        measurements: Of the exported weights.
        text: What `pack` has counted of the held-out documents.
        texts: Of those of each source.
        lineage: Of the model.
        course: Of the training.
        dtype: Of the stored weights.
    """
    document_mask: bool = lineage.params["document_mask"]

    def measured(*parts: LossSum, of: RowsMetrics = text) -> Loss | None:
        # fsum: exact, whatever the order. A mean over tokens, not over batches, which have different numbers of them.
        nats, tokens = math.fsum(part.nats for part in parts), sum(part.tokens for part in parts)
        rows = sum(part.rows for part in parts)
        return make_loss(rounded(nats / tokens) if tokens else None, rows, tokens, of, document_mask)

    exported = measured(measurements.eval_rows)
    losses = dict(zip(*history.series(course, "validation_loss"), strict=True))
    untrained, trained = (
        make_loss(losses.get(step), exported.rows, exported.tokens, text, document_mask) if exported else None
        for step in (0, lineage.step)
    )
    return Evaluation(
        run_id=lineage.run_id,
        step=lineage.step,
        dtype=dtype,
        num_parameters=measurements.num_parameters,
        validation=measured(measurements.eval_rows, measurements.others),
        untrained=untrained,
        trained=trained,
        exported=exported,
        samples=measurements.samples,
        sources={source: measured(found, of=texts[source]) for source, found in measurements.sources.items()},
        lora_base=lineage.params.get("lora_base"),
    )


def make_loss(loss: float | None, rows: int, tokens: int, text: RowsMetrics, document_mask: bool) -> Loss | None:
    """A loss in nats per token of a text, and what follows from it; None where there is none."""
    if loss is None:
        return None
    bits = bits_per_byte(loss, text.measured_tokens(document_mask), text.measured_bytes)
    return Loss(rows, tokens, loss, rounded(perplexity(loss)), None if bits is None else rounded(bits))


def find_trained(course: list[Row], lineage: Lineage, dtype: str) -> Trained | None:
    """The loss of the trained weights, and by how many nats that of the exported ones, in `dtype`, may differ.

    A part of the loss alone would be nothing where it is near 0, as of those who fine-tune well.

    Raises:
        StageError: it is not finite.
    """
    losses = dict(zip(*history.series(course, "validation_loss"), strict=True))
    loss, untrained = losses.get(lineage.step), losses.get(0)
    if loss is None:
        return None
    if not math.isfinite(loss):
        raise StageError(
            f"the validation loss of the training was {loss} at step {lineage.step}: the training has diverged. Lower "
            "lr, or compute in another precision"
        )
    params = lineage.params
    precision = "tf32" if params["tf32"] and params["precision"] == "fp32" else params["precision"]
    exported_as = {name: short for short, name in PRECISIONS.items()}.get(dtype, "fp32")
    tolerance = max(TOLERANCES[each] for each in (precision, exported_as, params.get("lora_base") or "fp32"))
    allowed = tolerance * max(1.0, loss)
    if tolerance > TOLERANCES["fp32"] and untrained is not None and math.isfinite(untrained):  # something is rounded
        allowed = max(allowed, MAX_EXPLAINED * abs(untrained - loss))
    return Trained(loss, lineage.step, allowed, params.get("lora_base"))


def rounding_texts(evaluation: Evaluation) -> tuple[str, str]:
    """What the export costs, and what to change where that is more than `MAX_ROUNDED_AWAY` of the gain.

    Either is "" where there is nothing to say.
    """
    change, remedy = change_of_export(evaluation.dtype, evaluation.lora_base)
    if not (change and evaluation.trained and evaluation.exported):
        return "", ""
    trained, exported = evaluation.trained.loss, evaluation.exported.loss
    cost = f"{change} costs {exported - trained:.4f} nats per token"
    untrained = evaluation.untrained.loss if evaluation.untrained else trained
    if trained >= untrained:
        return cost, ""
    undone = (exported - trained) / (untrained - trained)
    cost += f", {undone:.1%} of the gain"
    if undone <= MAX_ROUNDED_AWAY:
        return cost, ""
    return cost, (
        f"{change} has undone {min(undone, 1):.0%} of the gain: the loss on held-out rows was {untrained:.4f} before "
        f"training and {trained:.4f} after it, and is {exported:.4f} with the exported weights. {remedy}"
    )


def loss_rows(loss: Loss, evaluation: Evaluation) -> list[summary.Row]:
    """The loss of the exported weights on all held-out rows, for people to read, beside that before training."""
    before, where = evaluation.untrained, "" if evaluation.measured_all else " (on eval_rows rows of a source)"
    rows: list[summary.Row] = []
    for name, what, form in (
        ("loss", "validation loss", ".4f"),
        ("perplexity", "perplexity", ",.1f"),
        ("bits_per_byte", "bits per byte", ".4f"),
    ):
        if (number := getattr(loss, name)) is not None:
            note = f"{getattr(before, name):{form}} before training{where}" if before else ""
            rows.append((f"{number:{form}}", what, note))
    return rows


if __name__ == "__main__":
    command.run(main)
