"""The files that say what a model is and where it comes from: README.md and lineage.json."""

from typing import Any

import yaml


def lineage(
    pointer: dict[str, Any],
    model_name: str,
    model_revision: str,
    commit: str | None,
    parent: dict[str, Any] | None,
    weights: dict[str, str],
) -> dict[str, Any]:
    """Everything that made the weights, and their digests. It holds no clock times and no paths of this machine.

    Args:
        pointer: Content of run.json.
        model_name: Of the model that the run started from, as given.
        model_revision: The same.
        commit: Of that model; null for a local directory.
        parent: The lineage of that model, where an earlier training made it.
        weights: SHA-256 of each weight file.
    """
    identity = pointer["identity"]
    return {
        "run_id": pointer["run_id"],
        "step": pointer["step"],
        "adopted": pointer["adopted"],
        "model": {
            "name": model_name,
            "revision": model_revision,
            "commit": commit,
            "manifest": identity["model"],
            "lineage": parent,
        },
        "data": identity["data"],
        "params": identity["params"],
        "code": identity["code"],
        "packages": pointer["packages"],
        "checkpoint_manifest": pointer["manifest_sha256"],
        "weights": weights,
    }


def readme(name: str, lineage: dict[str, Any], architecture: str, random: bool, validation_loss: float | None) -> str:
    """The model card: metadata that the Hub reads, then text for people.

    Args:
        name: Of the experiment.
        lineage: Content of lineage.json.
        architecture: Class in transformers.
        random: Whether the run started from random weights.
        validation_loss: In nats per token, or None.
    """
    model, data = lineage["model"], lineage["data"]
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "license": "unknown"}
    if model["commit"]:
        metadata["base_model"] = model["name"]
    if validation_loss is not None:
        result = {
            "task": {"type": "text-generation"},
            "dataset": {"name": "held-out splits of the corpus", "type": "text", "revision": data["validation"]},
            "metrics": [{"type": "loss", "name": "validation loss", "value": validation_loss}],
        }
        metadata["model-index"] = [{"name": name, "results": [result]}]
    origin = f"`{model['name']}`" + (f" at commit `{model['commit']}`" if model["commit"] else "")
    if model["lineage"]:
        origin += f", the result of run `{model['lineage']['run_id']}`"
    start = "random weights, with the config and tokenizer of" if random else "the weights of"
    loss = "none was measured" if validation_loss is None else f"{validation_loss:.4f} nats per token"
    return f"""---
{yaml.safe_dump(metadata, sort_keys=False).rstrip()}
---

# {name}

{architecture}, trained for {lineage["step"]} steps from {start} {origin}.
Loss on the held-out splits: {loss}.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("outputs/{name}/model")
tokenizer = AutoTokenizer.from_pretrained("outputs/{name}/model")
```

## Training

```yaml
{yaml.safe_dump(lineage["params"], sort_keys=False).rstrip()}
```

Fingerprints of the packed tokens:

- training: `{data["train"]}`
- validation: `{data["validation"]}`

`lineage.json` holds the same for programs, with the digests of code and weights, and the versions of the packages.

## Licence

Unknown: that of the data and of the model it started from hold.
"""
