"""Measure the finished model, and report what it learned.

Reads     outputs/<experiment_name>/model/, outputs/<experiment_name>/history.tsv, data/tokens/validation,
          data/model.json
Writes    outputs/<experiment_name>/metrics.json: loss and perplexity on the held-out rows, and those before training
          outputs/<experiment_name>/report/: index.html (opens without a network), pictures, sample.md
Command   python -m stages.evaluate

The model is loaded as any user would load it, from its directory alone, and on a GPU if there is one.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from stages.artifacts import command, history, publish
from stages.artifacts.errors import StageError
from stages.artifacts.history import Row
from stages.artifacts.model_files import LINEAGE
from stages.artifacts.params_file import ExperimentName, load_params
from stages.export.lineage import Lineage
from stages.model.manifest import MANIFEST, ModelManifest
from stages.tokens.packed import VALIDATION

# torch, transformers and matplotlib take seconds to import, so functions import what needs them: not for --help.
if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from stages.export.report import Sample
    from stages.tokens.rows import TokenRows

NUM_SAMPLES = 3
PROMPT_TOKENS = 32
NEW_TOKENS = 96

_HOW_SAMPLED = (
    "Each prompt is the beginning of a held-out document, as far as it is in one row. The continuation is sampled from "
    "the model with seed 0, temperature 0.8 and top-k 50."
)
_NO_ROWS = "There are no held-out rows: set validation_splits to 1 or more to measure a loss and to see samples."


@dataclass(frozen=True)
class EvaluateParams:
    """The leaves of `params.yaml` that decide what is measured."""

    experiment_name: ExperimentName
    """Name of the directory under outputs/."""
    batch_size: PositiveInt
    """Rows per forward pass."""
    document_mask: bool
    """Whether tokens attend within their own document only, as in training."""


@dataclass(frozen=True)
class Metrics:
    """Content of metrics.json."""

    validation_loss: float | None
    """Mean over all tokens predicted in the held-out rows, in nats; null where there are no such rows."""
    perplexity: float | None
    untrained_validation_loss: float | None
    """The same, measured by the training before its first step; null where it was not measured."""
    untrained_perplexity: float | None
    validation_rows: int
    validation_tokens: int
    """Tokens predicted."""
    step: int
    """Optimizer steps of the training."""


def main() -> None:
    """Run the stage."""
    command.parser(__doc__).parse_args()
    params = load_params(EvaluateParams)
    from stages.export import report
    from stages.tokens.rows import TokenRows

    outputs = Path("outputs") / params.experiment_name
    lineage = read_verified_lineage(outputs / "model")
    course = history.read(outputs / history.HISTORY)
    eos_token_id = ModelManifest.read().eos_token_id  # the one that `pack` wrote; the exported config may have another
    if eos_token_id is None:
        raise StageError(f"{MANIFEST}: the tokenizer has no EOS token, which must end the documents")
    rows = TokenRows(VALIDATION)
    model, tokenizer = load_model(outputs / "model")

    loss, num_tokens = validation_loss(model, rows, eos_token_id, params)
    untrained = untrained_loss(course)
    metrics = Metrics(
        validation_loss=loss,
        perplexity=report.perplexity(loss),
        untrained_validation_loss=untrained,
        untrained_perplexity=report.perplexity(untrained),
        validation_rows=len(rows),
        validation_tokens=num_tokens,
        step=lineage.step,
    )
    samples = generate_samples(model, tokenizer, rows, eos_token_id)

    facts = make_facts(metrics, lineage, model.num_parameters())
    with publish.directory(outputs / "report") as directory:
        note = _HOW_SAMPLED if len(rows) else _NO_ROWS
        report.write(directory, params.experiment_name, course, facts, samples, note)
    note_on_metrics = {} if len(rows) else {"note": _NO_ROWS}
    # Last: where there are metrics, there is a report.
    publish.write_json(outputs / "metrics.json", dataclasses.asdict(metrics) | note_on_metrics)
    print(
        f"evaluate: validation loss {report.loss_text(loss)}, before training {report.loss_text(untrained)}; "
        f"see {outputs / 'report' / 'index.html'}"
    )


def read_verified_lineage(directory: Path) -> Lineage:
    """The lineage of a model, after its weights have been compared with it.

    Raises:
        StageError: lineage.json or a weight file is missing or was changed.
    """
    lineage = Lineage.read(directory / LINEAGE)
    for name, digest in lineage.weights.items():
        if not (directory / name).is_file() or publish.sha256_file(directory / name) != digest:
            raise StageError(f"{directory / name} is missing or was changed: run `dvc repro -f consolidate`")
    return lineage


def load_model(directory: Path) -> tuple["PreTrainedModel", Any]:
    """The model in evaluation mode, on a GPU if there is one, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would be printed without a terminal too
    model: Any = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    # eval: no dropout, as in the validation of the training.
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return model, AutoTokenizer.from_pretrained(directory, local_files_only=True)


def validation_loss(
    model: "PreTrainedModel", rows: "TokenRows", eos_token_id: int, params: EvaluateParams
) -> tuple[float | None, int]:
    """Mean loss over all rows in nats per token, None where there are none, and the number of tokens predicted."""
    import numpy as np
    import torch
    from tqdm import tqdm

    from stages.tokens.batch import make_batch
    from stages.tokens.loss import total_loss

    def batches() -> Iterator[dict[str, "Tensor"]]:
        for start in tqdm(range(0, len(rows), params.batch_size), desc="evaluate", unit="batch", disable=None):
            indices = np.arange(start, min(start + params.batch_size, len(rows)))
            input_ids = torch.from_numpy(rows.rows(indices)).to(model.device)  # (B, T)
            yield make_batch(input_ids, eos_token_id, params.document_mask)

    with torch.inference_mode():
        total, num_labels = total_loss(model, batches())
    # Over tokens, not the mean of batches: the last batch may have fewer rows.
    return (total / num_labels if num_labels else None), num_labels


def untrained_loss(course: list[Row]) -> float | None:
    """The validation loss that the training measured before its first step."""
    steps, losses = history.series(course, "validation_loss")
    return losses[0] if steps and steps[0] == 0 else None


def generate_samples(model: "PreTrainedModel", tokenizer: Any, rows: "TokenRows", eos_token_id: int) -> list["Sample"]:
    """What the model writes after the beginning of the longest document in each of a few rows, spread over all rows."""
    import numpy as np
    import torch

    from stages.export.report import Sample

    torch.manual_seed(0)  # DVC watches the report: the same model must write the same samples
    samples = []
    for index in np.unique(np.linspace(0, len(rows) - 1, NUM_SAMPLES, dtype=np.int64)) if len(rows) else ():
        (row,) = rows.rows(np.array([index]))  # (T,)
        documents = np.split(row, np.flatnonzero(row == eos_token_id) + 1)  # each with its EOS, (n,)
        longest = max(documents, key=len)[:PROMPT_TOKENS]
        prompt = torch.from_numpy(longest).long().to(model.device)
        continuation = _generate(model, prompt[None])
        samples.append(Sample(tokenizer.decode(prompt), tokenizer.decode(continuation, skip_special_tokens=True)))
    return samples


def _generate(model: "PreTrainedModel", prompt: "Tensor") -> "Tensor":
    """The tokens that follow a prompt: (1, T) int64 -> (at most NEW_TOKENS,) int64."""
    import torch

    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or PROMPT_TOKENS + NEW_TOKENS
    output: Tensor = model.generate(  # type: ignore[operator]  # transformers types it as not callable
        prompt,
        attention_mask=torch.ones_like(prompt),  # (1, T)
        # Given here, because those in the model's own generation_config differ from model to model.
        do_sample=True,
        temperature=0.8,
        top_k=50,
        top_p=1.0,
        # Beyond its limit a model with learned positions has no embedding for a token.
        max_new_tokens=max(1, min(NEW_TOKENS, limit - prompt.shape[1])),
        pad_token_id=0,  # a batch of one is never padded, but generate warns without it
    )
    return output[0, prompt.shape[1] :]


def make_facts(metrics: Metrics, lineage: Lineage, num_parameters: int) -> list[tuple[str, str]]:
    """Names and values for the table at the top of the report."""
    from stages.export.report import loss_text

    return [
        ("validation loss", loss_text(metrics.validation_loss)),
        ("before training", loss_text(metrics.untrained_validation_loss)),
        ("held-out tokens", f"{metrics.validation_tokens:,} in {metrics.validation_rows:,} rows"),
        ("steps", f"{lineage.step:,}"),
        ("started from", lineage.model.name),
        ("parameters", f"{num_parameters:,}"),
        ("run", lineage.run_id),
    ]


if __name__ == "__main__":
    command.run(main)
