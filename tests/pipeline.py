"""The stages of dvc.yaml, and which of them a command ran."""

import re

STAGES = ["download", "organize", "extract", "pack", "plan", "train", "consolidate", "evaluate", "score", "report"]
DATA_STAGES = ["organize", "extract", "pack"]


def ran(output: str) -> list[str]:
    """The stages that DVC ran, in order, from what it printed."""
    return re.findall(r"Running stage '(\w+)'", output)
