"""outputs/<experiment_name>/run.json, the out of the train stage: which checkpoint is the result of the training.

Checkpoints are not DVC outs, so this small file stands for them: it changes when the training's result does, and only
then. With clock times or random ids in it, or in what its digest covers, all stages after `train` would run again each
time it is written.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from stages.base import outputs
from stages.base.errors import StageError
from stages.base.files import FileName, JsonFile
from stages.base.identity import Adoption, RunId, RunIdentity
from stages.checkpointing.layout import MANIFEST, CheckpointManifest, checkpoint_root

_TRAIN_AGAIN = "dvc repro -f -s train"
"""-s: `-f` alone would also run all data stages, whose raw files another clone may not have."""


@dataclass(frozen=True)
class RunPointer(JsonFile):
    """Content of run.json."""

    STAGE: ClassVar[str] = "train"

    run_id: RunId
    step: int
    checkpoint: FileName
    """Name of its directory, such as `step-00000150`."""
    result_sha256: str
    """Of what the run computed (`CheckpointManifest.result_sha256`)."""
    identity: RunIdentity
    adopted: Adoption | None
    packages: dict[str, str]

    @classmethod
    def to(cls, checkpoint: Path) -> "RunPointer":
        """The pointer to a checkpoint."""
        manifest = CheckpointManifest.read(checkpoint)
        return cls(
            run_id=manifest.run_id,
            step=manifest.step,
            checkpoint=checkpoint.name,
            result_sha256=manifest.result_sha256,
            identity=manifest.identity,
            adopted=manifest.adopted,
            packages=manifest.packages,
        )

    def path(self, experiment_name: str) -> Path:
        """Where the checkpoint is on this machine, whether it exists or not."""
        return checkpoint_root(experiment_name) / self.run_id / self.checkpoint


def pointer_path(experiment_name: str) -> Path:
    """Where run.json of an experiment is."""
    return outputs.directory(experiment_name) / "run.json"


def resolve(experiment_name: str) -> tuple[RunPointer, Path]:
    """The pointer of an experiment, and the checkpoint that it points to.

    Raises:
        StageError: run.json or the checkpoint is missing, or it is another checkpoint by the same name.
    """
    path = pointer_path(experiment_name)
    pointer = RunPointer.read(path)
    checkpoint = pointer.path(experiment_name)
    if not (checkpoint / MANIFEST).is_file():
        raise StageError(
            f"{path} points to the checkpoint {checkpoint}, which does not exist: copy it from where it was "
            f"trained, set CHECKPOINT_ROOT to where it is, or train it again with `{_TRAIN_AGAIN}`"
        )
    # A run that was started over (resume=never) has other checkpoints under the same names; on a GPU not even the
    # weights need to be the same to the bit.
    if RunPointer.to(checkpoint) != pointer:
        raise StageError(f"{checkpoint / MANIFEST} is not the one that {path} names: run `{_TRAIN_AGAIN}`")
    return pointer, checkpoint
