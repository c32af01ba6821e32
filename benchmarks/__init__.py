"""Measurements compared with the usual way to do the same, and with what the hardware allows."""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def environment(**variables: str) -> dict[str, str]:
    """For processes elsewhere that import this repository, and what else the environment adds; without the Hub."""
    paths = filter(None, [str(REPO), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", **variables}
