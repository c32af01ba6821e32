"""What identifies a training, in run.json, in the manifests of its checkpoints and in lineage.json."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

RunId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Name of a run, and of the directory of its checkpoints."""


@dataclass(frozen=True)
class TokenFingerprints:
    """Digests of the packed tokens."""

    train: str
    validation: str


@dataclass(frozen=True)
class RunIdentity:
    """All that decides the result of a training. `run_id` is its digest."""

    params: dict[str, Any]
    """`TrainParams` as a dictionary."""
    data: TokenFingerprints
    model: str
    """SHA-256 of the model manifest, data/model.json."""
    code: str
    """Digest of the modules that the train stage reaches (stages/base/code.py)."""


@dataclass(frozen=True)
class Adoption:
    """The checkpoint of another run that a run continued from."""

    run_id: RunId
    step: int
    differences: list[str]
    """Between the identities of the two runs, one per line: `params.batch_size: 2 there, 4 here`."""
    adopted: "Adoption | None"
    """The same of that other run."""
