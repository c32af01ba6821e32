"""The model card: README.md of a consolidated model, for the Hub and for people.

https://huggingface.co/docs/hub/model-cards describes the metadata at its beginning.
"""

import math
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

import yaml
from huggingface_hub import EvalResult, ModelCardData

from stages.export.evaluation import perplexity
from stages.export.lineage import InitialModel, Lineage
from stages.model.license import ModelLicense


@dataclass(frozen=True)
class Losses:
    """What the training measured at the exported step, on held-out rows."""

    loss: float
    """Nats per token."""
    bits_per_byte: float | None
    """None: it is not known how many bytes the text has."""

    def metrics(self) -> dict[str, tuple[str, float]]:
        """For each type of metric on the Hub a name for people and the value."""
        found = {"loss": ("validation loss in nats per token", self.loss)}
        if self.loss < math.log(1e6):  # beyond, it is only a large number
            # Of as many digits as the loss.
            found["perplexity"] = ("perplexity per token", float(f"{perplexity(self.loss):.6g}"))
        if self.bits_per_byte is not None:
            found["bits_per_byte"] = ("bits per byte", self.bits_per_byte)
        return {kind: metric for kind, metric in found.items() if math.isfinite(metric[1])}


def readme(
    lineage: Lineage, architecture: str, dtype: str, is_random: bool, terms: ModelLicense, losses: Losses | None
) -> str:
    """The model card: metadata that the Hub reads, then text for people.

    Args:
        lineage: Of the model.
        architecture: Class in transformers.
        dtype: PyTorch's name of the dtype of the weights.
        is_random: Whether the run started from random weights.
        terms: Of the model that the run started from: the license of the weights, or, if they began as random ones, of
            config and tokenizer.
        losses: Of the weights before they were rounded to `dtype`; None: there are none of this step.
    """
    name = lineage.params["experiment_name"]
    start = "random weights, with the config and tokenizer of" if is_random else "the weights of"
    rank = lineage.params.get("lora_r")
    how = f", as low-rank adapters of rank {rank} that are merged into them" if rank else ""
    use = f"""from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{name}"  # the directory of this file, or its id on the Hub
model = AutoModelForCausalLM.from_pretrained(name)
tokenizer = AutoTokenizer.from_pretrained(name)"""
    intro = f"{architecture}, trained for {lineage.step} steps from {start} {_initial_model(lineage)}{how}."
    return _page(lineage, intro, use, dtype, is_random, terms, losses)


def adapter_readme(
    lineage: Lineage, architecture: str, terms: ModelLicense, losses: Losses | None, problem: str | None
) -> str:
    """The card of the adapters alone, and of PEFT's `problem` with them; the other arguments are those of `readme`."""
    name, rank, model = lineage.params["experiment_name"], lineage.params.get("lora_r"), lineage.model
    base = f'"{_name(model)}"' + (f', revision="{model.commit}"' if model.commit else "")
    use = f"""from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{name}"  # the directory of this file, or its id on the Hub
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base}), name)
tokenizer = AutoTokenizer.from_pretrained(name)"""
    intro = (
        f"Low-rank adapters (LoRA) of rank {rank} for {architecture}, trained for {lineage.step} steps beside the "
        f"weights of {_initial_model(lineage)}. They are fp32." + f"\n\n**{problem}.**" * bool(problem)
    )
    return _page(lineage, intro, use, "float32", False, terms, losses, library="peft")


def _page(
    lineage: Lineage, intro: str, use: str, dtype: str, is_random: bool, terms: ModelLicense, losses: Losses | None,
    library: Literal["transformers", "peft"] = "transformers",
) -> str:  # fmt: skip
    # No date: the same training gives the same bytes.
    data = lineage.data
    inputs = (
        'tokenizer.apply_chat_template([{"role": "user", "content": "Hello!"}], add_generation_prompt=True, '
        'return_dict=True, return_tensors="pt")'
        if _is_chat(lineage)
        else 'tokenizer("Once upon a time", return_tensors="pt")'
    )
    return f"""---
{_metadata(lineage, dtype, is_random, terms, losses, library).to_yaml()}
---

# {lineage.params["experiment_name"]}

{intro}

## Use

```python
{use}
inputs = {inputs}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```

## Evaluation

{_evaluation(lineage, dtype, losses)}

## Training

```yaml
{yaml.safe_dump(lineage.params, sort_keys=False).rstrip()}
```

Fingerprints of the packed tokens:

- training: `{data.train}`
- validation: `{data.validation}`

`lineage.json` contains the same for programs, with digests of code and weights, and package versions.

## License

{_license(_initial_model(lineage), is_random, terms)}
"""


def _is_chat(lineage: Lineage) -> bool:
    """Whether rules may have made conversations of the data: all do but those of a text."""
    extract = lineage.origins.get("extract")
    return any("text" not in rule for rule in (extract and extract.params.get("records")) or ())


def _metadata(
    lineage: Lineage, dtype: str, is_random: bool, terms: ModelLicense, losses: Losses | None, library: str
) -> ModelCardData:
    given: dict[str, Any] = {} if is_random else terms.metadata
    model, name = lineage.model, lineage.params["experiment_name"]
    # The Hub links to it, so a local directory cannot be it; but what that was trained from, here, can.
    base = None if is_random else model.name if model.commit else given.get("base_model") if model.lineage else None
    results = [
        EvalResult(
            task_type="text-generation", task_name="Text Generation",
            dataset_type="text", dataset_name="held-out text of the corpus", dataset_revision=lineage.data.validation,
            metric_type=kind, metric_name=text + _rounded(dtype), metric_value=value,
        )
        for kind, (text, value) in (losses.metrics() if losses else {}).items()
    ]  # fmt: skip
    return ModelCardData(
        library_name=library,
        pipeline_tag="text-generation",
        license=given.get("license", "unknown"),
        license_name=given.get("license_name"),
        license_link=given.get("license_link"),
        language=given.get("language"),
        base_model=base,
        base_model_relation=("adapter" if library == "peft" else "finetune") if base else None,
        tags=["corpus-to-checkpoint"],
        model_name=name if results else None,
        eval_results=results or None,
    )


def _name(model: InitialModel) -> str:
    """Without where a directory was on this machine, which tells a reader of the card nothing."""
    path = PurePath(model.name)
    return path.name if path.is_absolute() else model.name


def _initial_model(lineage: Lineage) -> str:
    model = lineage.model
    text = f"`{_name(model)}`" + (f" at commit `{model.commit}`" if model.commit else "")
    return text + (f", the result of run `{model.lineage.run_id}`" if model.lineage else "")


def _rounded(dtype: str) -> str:
    # The training updates weights in fp32.
    return "" if dtype == "float32" else f", before the weights were rounded to {dtype}"


def _evaluation(lineage: Lineage, dtype: str, losses: Losses | None) -> str:
    if losses is None:
        return f"The loss on held-out text was not measured at step {lineage.step}."
    if not losses.metrics():
        return f"The loss on held-out text is not finite at step {lineage.step}."
    eval_rows = lineage.params.get("eval_rows")
    rows = f", up to {eval_rows} rows of each source" if eval_rows else ""
    lines = [f"On held-out text{rows}{_rounded(dtype)}:", "", "| metric | value |", "|---|---|"]
    return "\n".join([*lines, *(f"| {text} | {value:.6g} |" for text, value in losses.metrics().values())])


def _license(name: str, is_random: bool, terms: ModelLicense) -> str:
    given = terms.metadata.get("license_name") or terms.metadata.get("license")
    link = terms.metadata.get("license_link")
    if terms.problem:
        whose = f"That of {name} is unknown: {terms.problem}."
    else:
        text = ", ".join(given) if isinstance(given, list) else given
        whose = f"That of {name} is `{text}`" + (f" ({link})." if link else ".")
    if is_random:
        whose = f"None is chosen yet for the weights. Config and tokenizer have a license of their own. {whose}"
    if texts := terms.texts():
        whose += f" Its text is in {', '.join(f'`{file}`' for file in texts)}."
    return f"{whose}\nThe licenses of the training data apply, too."
