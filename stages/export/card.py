"""The model card: README.md of a consolidated model, for the Hub and for people."""

from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from stages.export.provenance import Lineage


def readme(
    name: str, lineage: "Lineage", architecture: str, is_random: bool, validation_loss: float | None, is_rounded: bool
) -> str:
    """The model card: metadata that the Hub reads, then text for people.

    Args:
        name: Of the experiment.
        lineage: Of the model.
        architecture: Class in transformers.
        is_random: Whether the run started from random weights.
        validation_loss: Of these very weights, in nats per token; None where it is not known yet.
    """
    model, data = lineage.model, lineage.data
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "license": "unknown"}
    if model.commit:  # the Hub links to `base_model`, which a local directory is not
        metadata["base_model"] = model.name
    is_known = validation_loss is not None and not is_rounded
    if is_known:  # the Hub shows this entry as the model's evaluation
        result = {
            "task": {"type": "text-generation"},
            "dataset": {"name": "held-out splits of the corpus", "type": "text", "revision": data.validation},
            "metrics": [{"type": "loss", "name": "validation loss", "value": validation_loss}],
        }
        metadata["model-index"] = [{"name": name, "results": [result]}]
    origin = f"`{model.name}`" + (f" at commit `{model.commit}`" if model.commit else "")
    if model.lineage:
        origin += f", the result of run `{model.lineage.run_id}`"
    start = "random weights, with the config and tokenizer of" if is_random else "the weights of"
    eval_rows = lineage.params.get("eval_rows")
    if validation_loss is None:
        loss = "not measured"
    elif is_rounded:
        loss = "measured by `evaluate`, because the export rounds the weights"
    else:
        loss = f"{validation_loss:.4f} nats per token" + (f", on up to {eval_rows} rows" if eval_rows else "")
    # sort_keys=False keeps the order above. No date: the same training gives the same bytes.
    return f"""---
{yaml.safe_dump(metadata, sort_keys=False).rstrip()}
---

# {name}

{architecture}, trained for {lineage.step} steps from {start} {origin}.
Loss on the held-out splits: {loss}.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("outputs/{name}/model")
tokenizer = AutoTokenizer.from_pretrained("outputs/{name}/model")
```

## Training

```yaml
{yaml.safe_dump(lineage.params, sort_keys=False).rstrip()}
```

Fingerprints of the packed tokens:

- training: `{data.train}`
- validation: `{data.validation}`

`lineage.json` contains the same for programs, with digests of code and weights, and package versions.

## License

Unknown. The licenses of the training data and of the source model apply.
"""
