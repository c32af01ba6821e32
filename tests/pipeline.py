"""The stages of dvc.yaml, and which of them a command ran."""

import re

DATA_STAGES = ["organize", "extract", "deduplicate", "pack"]
STAGES = ["download", *DATA_STAGES, "plan", "train", "consolidate", "evaluate", "score", "report"]


def ran(output: str) -> list[str]:
    """The stages that DVC ran, in order, from what it printed."""
    return re.findall(r"Running stage '(\w+)'", output)
