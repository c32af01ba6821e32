"""A run: what identifies it, and where its checkpoints are.

`run_id` is the digest of all that decides the weights: parameters, tokens, model manifest, and the code that computes
them. So a run can be killed at any time and continue, while with a changed learning rate it is another run.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stages.base import code, outputs, publish
from stages.base.identity import RunIdentity, TokenFingerprints
from stages.base.packed import TRAIN, VALIDATION, PackedTokens
from stages.base.params_file import as_yaml
from stages.checkpointing.layout import checkpoint_root
from stages.model.manifest import MODEL_MANIFEST
from stages.training.order import RowOrder
from stages.training.params import TrainParams

WEIGHTS = ("stages.training.loop", "stages.training.environment")
"""What computes the weights: these modules, and what they reach in `DECIDING`."""

DECIDING = (
    *("stages.training", "stages.building", "stages.forward"),
    *("stages.model.meta", "stages.model.headers", "stages.model.dtypes", "stages.base.splitmix64"),
)
"""The packages and modules whose statements decide numbers. The others that the loop reaches check files, whose digests
are in the identity anyway, or turn errors into sentences."""

ABSENT = "nothing"
"""What a difference shows for a parameter that a run does not have."""


@dataclass(frozen=True)
class Run:
    """One training, from its first step to its last."""

    params: TrainParams
    identity: RunIdentity
    num_rows: int
    """Training rows."""
    seq_length: int
    """Tokens per row."""

    @property
    def run_id(self) -> str:
        """Name of the run: the first 16 hexadecimal digits of the digest of its identity."""
        # 64 bits: names stay short. `decide` compares the identities themselves.
        return publish.sha256_json(dataclasses.asdict(self.identity))[:16]

    @property
    def directory(self) -> Path:
        """Where its checkpoints are."""
        return checkpoint_root(self.params.experiment_name) / self.run_id

    @property
    def log_directory(self) -> Path:
        """For logs and trackers. Like the checkpoints, it is not in the copy that `dvc exp run --temp` deletes."""
        return Path(os.environ.get("DVC_ROOT", ".")) / outputs.directory(self.params.experiment_name)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.params.total_steps(self.num_rows)


def describe(params: TrainParams) -> Run:
    """The run that `params` and the files of this directory make. Imports no torch, reads no tokens.

    Raises:
        StageError: a file is missing or damaged, there are no rows for `export_from`, or no sources for `mixture`.
    """
    train, validation = PackedTokens.read(TRAIN), PackedTokens.read(VALIDATION)
    params.check_export_from(validation.num_rows)
    identity = RunIdentity(
        params=params.identity(),
        data=TokenFingerprints(train.fingerprint, validation.fingerprint),
        model=publish.sha256_file(MODEL_MANIFEST),
        code=code.digest(*WEIGHTS, within=DECIDING),
    )
    return Run(
        params=params,
        identity=identity,
        num_rows=RowOrder(params, train.num_rows, train.sources).num_rows,
        seq_length=train.seq_length,
    )


def differences(theirs: RunIdentity, ours: RunIdentity, words: tuple[str, str] = ("there", "here")) -> list[str]:
    """One line for each leaf that differs: `params.batch_size: 2 there, 4 here`, or in other words."""
    compared = compare(dataclasses.asdict(theirs), dataclasses.asdict(ours))
    return [f"{name}: {old} {words[0]}, {new} {words[1]}" for name, old, new in compared]


SINCE_THE_LAUNCH = "at the launch", "now"
"""The words of `differences` for files that changed while ranks trained."""


def compare(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for name in sorted(old.keys() | new.keys()):
        if isinstance(old.get(name), dict) and isinstance(new.get(name), dict):
            yield from compare(old[name], new[name], f"{prefix}{name}.")
            continue
        if name not in old or name not in new or old[name] != new[name]:
            there, here = (as_yaml(values[name]) if name in values else ABSENT for values in (old, new))
            yield f"{prefix}{name}", there, here


def packages(params: Mapping[str, Any]) -> dict[str, str]:
    """The versions of what computes the result of a run with these parameters, as far as it is installed."""
    names = ["torch", "transformers", "numpy", "safetensors"]
    if params.get("optimizer") == "adamw_8bit" or params.get("precision") == "fp8":
        names.append("torchao")
    return {name: version(name) for name in names if importlib.util.find_spec(name)}
