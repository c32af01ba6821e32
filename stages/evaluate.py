"""Measure the finished model, and show what it learnt.

Reads     outputs/<experiment_name>/model/, outputs/<experiment_name>/history.tsv, data/tokens/validation,
          data/model.json
Writes    outputs/<experiment_name>/metrics.json: loss and perplexity on the held-out rows, and those before training
          outputs/<experiment_name>/report/: index.html (opens without a network), pictures, sample.md
Command   python -m stages.evaluate

The model is loaded as any user would load it, from its directory alone, on a GPU where there is one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PositiveInt

from stages.artifacts import command, params, publish
from stages.artifacts.command import StageError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from stages.export.report import Sample
    from stages.training.data import TokenRows

VALIDATION = Path("data/tokens/validation")

NUM_SAMPLES = 3
PROMPT_TOKENS = 32
NEW_TOKENS = 96
_NO_ROWS = "There are no held-out rows: set validation_splits to 1 or more to measure a loss and to see samples."
_HOW = (
    "The prompts are the beginnings of held-out documents, as far as a row holds them. What follows is "
    "sampled from the model: seed 0, temperature 0.8, the 50 likeliest tokens."
)


@dataclass(frozen=True)
class EvaluateParams:
    """The leaves of `params.yaml` that decide what is measured."""

    experiment_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the directory under outputs/."""
    batch_size: PositiveInt
    """Rows per forward pass."""
    document_mask: bool
    """Whether tokens attend within their own document only, as in training."""


def main() -> None:
    """Run the stage."""
    command.parser(__doc__).parse_args()
    options = params.load(EvaluateParams)

    # torch, transformers and matplotlib take seconds to import: not for --help.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from stages.export import history, report
    from stages.model import manifest
    from stages.training.data import TokenRows

    outputs = Path("outputs") / options.experiment_name
    lineage = _verified(outputs / "model")
    eos_token_id = manifest.read().eos_token_id
    if eos_token_id is None:
        raise StageError("data/model.json: the tokenizer has no EOS token, which must end the documents")
    rows = TokenRows(VALIDATION)
    logging.disable_progress_bar()  # it would show without a terminal too
    model: Any = AutoModelForCausalLM.from_pretrained(outputs / "model", local_files_only=True)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    tokenizer = AutoTokenizer.from_pretrained(outputs / "model", local_files_only=True)

    loss, num_tokens = validation_loss(model, rows, eos_token_id, options)
    samples = write_samples(model, tokenizer, rows, eos_token_id)
    course = history.read(outputs / "history.tsv")
    steps, losses = history.values(course, "validation_loss")
    untrained = losses[0] if steps and steps[0] == 0 else None
    metrics = {
        "validation_loss": loss,
        "perplexity": report.perplexity(loss),
        "untrained_validation_loss": untrained,
        "untrained_perplexity": report.perplexity(untrained),
        "validation_rows": len(rows),
        "validation_tokens": num_tokens,
        "step": lineage["step"],
    }
    facts = [
        ("validation loss", report.loss_text(loss)),
        ("before training", report.loss_text(untrained)),
        ("held-out tokens", f"{num_tokens:,} in {len(rows):,} rows"),
        ("steps", f"{lineage['step']:,}"),
        ("started from", lineage["model"]["name"]),
        ("parameters", f"{model.num_parameters():,}"),
        ("run", lineage["run_id"]),
    ]
    with publish.directory(outputs / "report") as directory:
        report.write(directory, options.experiment_name, course, facts, samples, _HOW if len(rows) else _NO_ROWS)
    publish.write_json(outputs / "metrics.json", metrics if len(rows) else {**metrics, "note": _NO_ROWS})
    print(
        f"evaluate: validation loss {report.loss_text(loss)}, before training {report.loss_text(untrained)}; "
        f"see {outputs / 'report' / 'index.html'}"
    )


def _verified(directory: Path) -> dict[str, Any]:
    """The lineage of a model whose weights are those that it names."""
    try:
        lineage: dict[str, Any] = publish.read_json(directory / "lineage.json")
    except FileNotFoundError:
        raise StageError(f"{directory / 'lineage.json'} is missing: run `dvc repro consolidate`") from None
    for name, digest in lineage["weights"].items():
        if not (directory / name).is_file() or publish.sha256_file(directory / name) != digest:
            raise StageError(f"{directory / name} is missing or was changed: run `dvc repro -f consolidate`")
    return lineage


def validation_loss(
    model: "PreTrainedModel", rows: "TokenRows", eos_token_id: int, options: EvaluateParams
) -> tuple[float | None, int]:
    """Mean loss over all rows in nats per token, None where there are none, and the number of tokens predicted."""
    import numpy as np
    import torch
    from tqdm import tqdm

    from stages.training.batch import loss_sum, make_batch, num_labels

    total, count = 0.0, 0
    with torch.inference_mode():
        for start in tqdm(range(0, len(rows), options.batch_size), desc="evaluate", unit="batch", disable=None):
            indices = np.arange(start, min(start + options.batch_size, len(rows)))
            input_ids = torch.from_numpy(rows.rows(indices)).to(model.device)
            batch = make_batch(input_ids, eos_token_id, options.document_mask)
            total += loss_sum(model, batch).item()
            count += num_labels(batch)
    return (total / count if count else None), count


def write_samples(model: "PreTrainedModel", tokenizer: Any, rows: "TokenRows", eos_token_id: int) -> list["Sample"]:
    """What the model makes of the beginning of the longest document in each of a few rows, spread over all rows."""
    import numpy as np
    import torch

    from stages.export.report import Sample

    torch.manual_seed(0)
    samples = []
    for index in np.unique(np.linspace(0, len(rows) - 1, NUM_SAMPLES, dtype=np.int64)) if len(rows) else ():
        (row,) = rows.rows(np.array([index]))
        documents = np.split(row, np.flatnonzero(row == eos_token_id) + 1)
        longest = max(documents, key=len)[:PROMPT_TOKENS]
        prompt = torch.from_numpy(longest).long().to(model.device)
        written = _generate(model, prompt[None])
        samples.append(Sample(tokenizer.decode(prompt), tokenizer.decode(written, skip_special_tokens=True)))
    return samples


def _generate(model: "PreTrainedModel", prompt: "Tensor") -> "Tensor":
    """The tokens that follow a prompt of one row."""
    import torch

    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or PROMPT_TOKENS + NEW_TOKENS
    output: Tensor = model.generate(  # type: ignore[operator]  # transformers types it as no callable
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=True,
        temperature=0.8,
        top_k=50,
        top_p=1.0,
        max_new_tokens=max(1, min(NEW_TOKENS, limit - prompt.shape[1])),
        pad_token_id=0,  # of one row alone, nothing is padded
    )
    return output[0, prompt.shape[1] :]


if __name__ == "__main__":
    command.run(main)
