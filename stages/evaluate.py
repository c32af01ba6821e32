"""Measure the finished model, and report what it learned.

Reads     outputs/<experiment_name>/model/, outputs/history.tsv, data/tokens/validation, data/model.json
Writes    outputs/metrics.json: the loss on all held-out rows
          outputs/report/: report.html (opens without a network), pictures, samples.md, eval_losses.json: the losses
          before training, after it, and of the exported weights, on the rows that the training measured too
Command   python -m stages.evaluate

The model is loaded as any user would load it, from its directory alone, and on a GPU if there is one. On CPUs it
computes in fp32: bf16 weights take seven times as long on a CPU without bf16 instructions (SmolLM2-135M on two cores:
2.6 s a row of 256 tokens instead of 0.37 s). The same weights have the same loss on every CPU, up to rounding.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt

from stages.artifacts import command, history, outputs, publish
from stages.artifacts.errors import StageError
from stages.artifacts.history import Row
from stages.artifacts.model_files import CONFIG, LINEAGE
from stages.artifacts.outputs import ExperimentName
from stages.artifacts.params_file import load_params
from stages.export.provenance import Lineage
from stages.model.manifest import MANIFEST, ModelManifest
from stages.tokens.attention_names import IMPLEMENTATIONS, NEED_LENGTHS, Attention
from stages.tokens.packed import VALIDATION, PackedTokens

# torch, transformers and matplotlib take seconds to import, so functions import what needs them: not for --help.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

    from stages.export.evaluation import Sample
    from stages.tokens.rows import TokenRows

NUM_SAMPLES = 3
PROMPT_TOKENS = 32
NEW_TOKENS = 96
TEMPERATURE = 0.8
EVAL_LOSSES = "eval_losses.json"
MAX_ROUNDED_AWAY = 0.05
"""Part of the gain that the rounding of the export may undo without a warning."""


@dataclass(frozen=True)
class EvaluateParams:
    """The leaves of `params.yaml` that decide what is measured."""

    experiment_name: ExperimentName
    """Name of the directory under outputs/."""
    batch_size: PositiveInt
    """Rows per forward pass where `eval_batch_size` is null."""
    eval_batch_size: PositiveInt | None
    """Rows per forward pass."""
    document_mask: bool
    """Whether tokens attend within their own document only, as in training."""
    attention: Attention
    """The attention function of the training."""
    eval_rows: PositiveInt | None
    """Held-out rows that the training measured; null for all."""
    loss: Literal["auto", "fused", "plain"]
    """How it is computed, as in training."""


@dataclass(frozen=True)
class Metrics:
    """Content of metrics.json: each name is a column of `dvc exp show`, so there are few."""

    validation_loss: float | None
    """Of the exported weights: mean over all tokens predicted in all held-out rows, in nats; null without such rows."""


@dataclass(frozen=True)
class EvalLosses:
    """Content of report/eval_losses.json: losses on the held-out rows that the training also measured, in nats.

    They can be compared with each other, but not with the loss on all rows.
    """

    rows: int
    """How many rows these are."""
    untrained: float | None
    """Before the first step; null where it was not measured."""
    trained: float | None
    """After the last step, of the weights that the optimizer updates."""
    exported: float | None
    """Of the exported weights."""


def main() -> None:
    """Run the stage."""
    command.parser(__doc__).parse_args()
    params = load_params(EvaluateParams)
    with publish.lock(outputs.REPORT):
        evaluate(params)


def evaluate(params: EvaluateParams) -> None:
    """Write the report and the metrics, and print the losses.

    Raises:
        StageError: the model, the history or the held-out rows are missing or damaged.
    """
    import numpy as np

    from stages.export import generation, report
    from stages.export.evaluation import Evaluation, Loss
    from stages.tokens.rows import TokenRows

    directory = outputs.directory(params.experiment_name) / "model"
    lineage = read_verified_lineage(directory)
    course = history.read(outputs.HISTORY)
    eos_token_id = ModelManifest.read().eos_token_id  # the one that `pack` wrote; the exported config may have another
    if eos_token_id is None:
        raise StageError(f"{MANIFEST}: the tokenizer has no EOS token, which must end the documents")
    PackedTokens.read(VALIDATION).verify()
    rows = TokenRows(VALIDATION)
    model, tokenizer = generation.load(directory)
    prepare_loss(model, directory, params)

    # All rows in two parts: those that the training measured, and the others.
    eval_rows = rows.spread(params.eval_rows)
    other_rows = np.setdiff1d(np.arange(len(rows)), eval_rows)
    with training_attention(model, directory, rows.seq_length, params) as lengths:
        eval_total, eval_tokens = total_validation_loss(model, rows, eval_rows, eos_token_id, params, lengths)
        other_total, other_tokens = total_validation_loss(model, rows, other_rows, eos_token_id, params, lengths)
    loss = mean(eval_total + other_total, eval_tokens + other_tokens)
    metrics = Metrics(loss)
    losses = EvalLosses(len(eval_rows), *training_losses(course, lineage.step), mean(eval_total, eval_tokens))
    samples = generate_samples(model, tokenizer, rows, eos_token_id)

    def measured(value: float | None, num_rows: int, num_tokens: int) -> Loss | None:
        return None if value is None else Loss(num_rows, num_tokens, value, perplexity(value), None)

    Evaluation(
        run_id=lineage.run_id,
        step=lineage.step,
        dtype=stored_dtype(directory),
        num_parameters=model.num_parameters(),
        validation=measured(loss, len(rows), eval_tokens + other_tokens),
        by_split={},
        untrained=measured(losses.untrained, len(eval_rows), eval_tokens),
        trained=measured(losses.trained, len(eval_rows), eval_tokens),
        exported=measured(losses.exported, len(eval_rows), eval_tokens),
        samples=samples,
    ).write(outputs.EVALUATION)
    with publish.directory(outputs.REPORT) as report_directory:
        report.write(report_directory, params.experiment_name)
        publish.write_json(report_directory / EVAL_LOSSES, losses)
        publish.write_json(outputs.METRICS, metrics)  # in the block: if the disk is full, there is no report either
    print(
        f"evaluate: validation loss {loss_text(loss)} on {len(rows):,} rows; on the {losses.rows:,} that the "
        f"training measured {loss_text(losses.exported)}, before training "
        f"{loss_text(losses.untrained)}; see {outputs.REPORT / report.PAGE}"
    )
    if warning := rounding_warning(losses, stored_dtype(directory)):
        print(f"warning: {warning}")


def read_verified_lineage(directory: Path) -> Lineage:
    """The lineage of a model, after the files of the model, the history and data/model.json were compared with it.

    Raises:
        StageError: one of these is missing or was changed.
    """
    lineage = Lineage.read(directory / LINEAGE)
    for name, digest in {**lineage.weights, **lineage.files}.items():
        if not (directory / name).is_file() or publish.sha256_file(directory / name) != digest:
            raise StageError(f"{directory / name} is missing or was changed: run `dvc repro -f -s consolidate`")
    if publish.sha256_file(MANIFEST) != lineage.model.manifest:
        raise StageError(f"{MANIFEST} is not the one that {directory} was made with: run `dvc repro -f -s download`")
    if lineage.history not in (None, history.digest(outputs.HISTORY, lineage.step)):
        raise StageError(f"{outputs.HISTORY} is not that of {directory}: run `dvc repro -f -s train`")
    return lineage


@contextmanager
def training_attention(
    model: "PreTrainedModel", directory: Path, seq_length: int, params: EvaluateParams
) -> Iterator[bool]:
    """Have a model use the attention function of the training; yields whether it needs the lengths of documents.

    The exported weights may have another dtype than the training computed in, in which its function may not work: then
    it is the one that `auto` stands for. All that are accepted give the same loss, up to rounding.
    """
    from stages.tokens.document_mask import choose_attention

    given = directory, params.document_mask, seq_length, model.dtype, model.device.type
    try:
        attention = choose_attention(params.attention, *given)
    except StageError:
        if params.attention == "auto":
            raise
        attention = choose_attention("auto", *given)
        print(f"evaluate: attention {params.attention} does not work in {model.dtype} here, {attention} is used")
    own = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATIONS[attention])
    yield attention in NEED_LENGTHS
    model.set_attn_implementation(own)  # to generate text, one token after another


def prepare_loss(model: "PreTrainedModel", directory: Path, params: EvaluateParams) -> None:
    """Let the model compute its loss without logits of all tokens, where that gives the same.

    Raises:
        StageError: `loss` is fused, which the model does not allow.
    """
    from stages.tokens.loss import fuse
    from stages.tokens.loss_probe import choose_loss

    loss = choose_loss(params.loss, directory, model.dtype, model.device.type)
    if loss.reason:
        print(f"evaluate: loss {loss.name}, because {loss.reason}")
    if loss.name == "fused":
        fuse(model)


def total_validation_loss(
    model: "PreTrainedModel", rows: "TokenRows", indices: "NDArray[np.int64]", eos_token_id: int,
    params: EvaluateParams, lengths: bool,
) -> tuple[float, int]:  # fmt: skip
    """The loss of the rows at `indices` in nats, summed over the tokens predicted, and their number."""
    import torch
    from tqdm import tqdm

    from stages.tokens.batch import make_batch
    from stages.tokens.device import to_device
    from stages.tokens.loss import total_loss

    def batches() -> Iterator[dict[str, "Tensor"]]:
        size = params.eval_batch_size or params.batch_size
        starts = range(0, len(indices), size)
        for start in tqdm(starts, desc="evaluate", unit="batch", disable=len(starts) == 0 or None):
            some = torch.from_numpy(rows.rows(indices[start : start + size]))  # (B, T)
            yield to_device(make_batch(some, eos_token_id, params.document_mask, lengths), model.device)

    with torch.inference_mode():
        return total_loss(model, batches())


def mean(total: float, number: int) -> float | None:
    """Over tokens, not the mean of batches: the last batch may have fewer rows. None where there are no tokens."""
    return total / number if number else None


def training_losses(course: list[Row], last_step: int) -> tuple[float | None, float | None]:
    """The validation losses that the training measured before its first step and after its last one."""
    losses = dict(zip(*history.series(course, "validation_loss"), strict=True))
    return losses.get(0), losses.get(last_step)


def stored_dtype(directory: Path) -> str:
    """The dtype of a model's weights, as its config.json names it."""
    dtype: str = publish.read_json(directory / CONFIG)["dtype"]
    return dtype


def rounding_warning(losses: EvalLosses, dtype: str) -> str | None:
    """What to change where the export has undone more than `MAX_ROUNDED_AWAY` of the gain, else None."""
    untrained, trained, exported = losses.untrained, losses.trained, losses.exported
    if dtype == "float32" or untrained is None or trained is None or exported is None or trained >= untrained:
        return None
    undone = (exported - trained) / (untrained - trained)
    if undone <= MAX_ROUNDED_AWAY:
        return None
    return (
        f"rounding the weights to {dtype} has undone {min(undone, 1):.0%} of the gain: the loss on held-out rows was "
        f"{untrained:.4f} before training and {trained:.4f} after it, and is {exported:.4f} with the exported weights. "
        "Set export_dtype: fp32"
    )


def generate_samples(model: "PreTrainedModel", tokenizer: Any, rows: "TokenRows", eos_token_id: int) -> list["Sample"]:
    """What the model writes after the beginning of the longest document in each of a few rows, spread over all rows."""
    import numpy as np
    import torch

    from stages.export import generation
    from stages.export.evaluation import Sample

    torch.manual_seed(0)  # DVC watches the report: the same model must write the same samples
    samples = []
    for index in np.unique(np.linspace(0, len(rows) - 1, NUM_SAMPLES, dtype=np.int64)) if len(rows) else ():
        (row,) = rows.rows(np.array([index]))  # (T,)
        documents = np.split(row, np.flatnonzero(row == eos_token_id) + 1)  # each with its EOS, (n,)
        longest = max(documents, key=len)[:PROMPT_TOKENS]
        prompt = torch.from_numpy(longest).long().to(model.device)
        continuation = generation.generate(model, prompt[None], NEW_TOKENS, TEMPERATURE)
        samples.append(Sample(tokenizer.decode(prompt), tokenizer.decode(continuation, skip_special_tokens=True)))
    return samples


def loss_text(loss: float | None) -> str:
    """A loss and its perplexity, for people to read."""
    return "not measured" if loss is None else f"{loss:.4f} nats per token (perplexity {perplexity(loss):,.1f})"


def perplexity(loss: float) -> float:
    """exp(loss): a model with this loss is as uncertain as a uniform choice among that many tokens."""
    return math.exp(min(loss, 700.0))  # above 709, exp overflows a float


if __name__ == "__main__":
    command.run(main)
