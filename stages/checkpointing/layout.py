"""Where checkpoints are on the disk, what a checkpoint consists of, and when it is valid.

    outputs/<experiment_name>/checkpoints/<run_id>/step-00000150/
        model/, optimizer/  tensors, as torch.distributed.checkpoint writes them: an export reads only the model's
            __0_0.distcp ...  a file of each rank
            .metadata         which tensor is in which file
        state.json  history.tsv  speed.tsv
        manifest.json       size and SHA-256 of every file above, and of itself; written last, in a directory of
                            another name (.tmp), whose rename publishes the checkpoint

They are not DVC outs: DVC deletes the outs of a stage before it runs, and a resume needs them.
"""

import dataclasses
import errno
import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from stages.base import outputs, publish
from stages.base.errors import MAY_PASS, StageError, as_stage_error
from stages.base.files import (
    DamagedFile,
    FileEntry,
    RelativePath,
    check_files,
    damaged,
    first_problem,
    read_sealed,
    write_sealed,
)
from stages.base.history import HISTORY
from stages.base.identity import Adoption, RunId, RunIdentity
from stages.base.shared_disk import find_size, refresh

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
MODEL, OPTIMIZER = "model", "optimizer"
METADATA = ".metadata"
REMEDY = (
    "put a good copy of it back, or move the checkpoint away and run `dvc repro -f -s train`, which trains it again"
)
"""About a file of a checkpoint that is damaged."""
AGAIN = ".again"
"""Where `lineage segments` trains, beside the runs. What a killed one has left, the next one deletes, or `prune`."""
FORMAT = 2
"""Of the manifest and of the files that it lists. Another one is refused."""

# Eight digits, so that names sort as their steps do: "newest" is decided by name.
_STEP_NAME = re.compile(r"step-\d{8}")


class UnsupportedFormat(StageError):
    """A checkpoint is intact, but was written by another version of the pipeline."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the model's state dict, as the checkpoint must contain it."""

    shape: list[int]
    dtype: str
    """PyTorch's name, such as `float32`."""

    @classmethod
    def of(cls, tensor: "Tensor") -> "TensorEntry":
        """That of a tensor on any device, also on meta."""
        return cls(list(tensor.shape), str(tensor.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint contains, and which run it belongs to."""

    format: int
    run_id: RunId
    step: int
    """Optimizer steps done."""
    total_steps: int
    """Of the whole run."""
    identity: RunIdentity
    validation_loss: float | None
    """In nats per token, measured by this run at this very step; None where it was not."""
    adopted: Adoption | None
    packages: dict[str, str]
    """Versions of what computed the weights."""
    files: dict[RelativePath, FileEntry]
    tensors: dict[str, TensorEntry]
    """The model's, without the optimizer's."""

    @property
    def is_finished(self) -> bool:
        """Whether the run was trained to its last step."""
        return self.step >= self.total_steps

    @property
    def result_sha256(self) -> str:
        """Digest of what the run computed: two runs of the same inputs that compute the same have the same.

        It covers identity, step, history and the files of the tensors. The manifest's own digest also covers what
        differs between such runs: the timings in state.json and speed.tsv, and the random id that torch writes into
        .metadata.
        """
        files = [name for name in self.files if name.endswith(".distcp") or name == HISTORY]
        content = {name: self.files[name].sha256 for name in files}
        tensors = {name: dataclasses.astuple(entry) for name, entry in self.tensors.items()}
        return publish.sha256_json([dataclasses.asdict(self.identity), self.step, tensors, content])

    def write(self, checkpoint: Path) -> None:
        """Write the manifest of a checkpoint, with its own digest as the last key."""
        write_sealed(checkpoint / MANIFEST, dataclasses.asdict(self), "sha256")

    @classmethod
    def read(cls, checkpoint: Path) -> "CheckpointManifest":
        """Read the manifest of a checkpoint.

        Raises:
            DamagedFile: it is missing or damaged.
            UnsupportedFormat: it was written by another version of the pipeline.
        """
        path = checkpoint / MANIFEST
        try:
            # All other files are checked against the manifest, and it against its own digest: a flipped bit in it
            # would otherwise be a traceback, or another run's identity.
            content = read_sealed(path, REMEDY, "sha256")
        except OSError as error:
            # While a file server is away nothing is damaged, and a valid checkpoint must not be put in quarantine. EIO
            # may be a bad block.
            if error.errno in MAY_PASS - {errno.EIO}:
                raise
            raise DamagedFile(f"{as_stage_error(error)}: {REMEDY}") from None
        # Only after the digest: an intact manifest that does not fit is not damaged but from another version, and needs
        # another remedy.
        remedy = "continue the run with the version that wrote it, or move the checkpoint away"
        if content.get("format") != FORMAT:
            raise UnsupportedFormat(
                f"{path} has the format {content.get('format')!r}, this version reads format {FORMAT}: {remedy}"
            )
        try:
            manifest = TypeAdapter(cls).validate_python(content)
        except ValidationError as error:
            raise UnsupportedFormat(f"{path} is not valid ({first_problem(error)}): {remedy}") from None
        if _STEP_NAME.fullmatch(checkpoint.name) and checkpoint.name != step_name(manifest.step):
            raise damaged(path, f"it is of step {manifest.step}", REMEDY)  # of a copy of another name, it may be
        return manifest


def checkpoint_root(experiment_name: str) -> Path:
    """The directory of all checkpoints of an experiment.

    It is resolved against `$DVC_ROOT`, which DVC sets, so that `dvc exp run --temp` and queued experiments, which run
    in a copy of the project, find the checkpoints of the project itself. `$CHECKPOINT_ROOT` moves them elsewhere.
    """
    project = Path(os.environ.get("DVC_ROOT", "."))
    if elsewhere := os.environ.get("CHECKPOINT_ROOT"):
        return project / elsewhere / experiment_name  # of a path that is absolute, only that
    return project / outputs.directory(experiment_name) / "checkpoints"


def is_copy() -> bool:
    """Whether this is the copy that DVC makes of a project for `dvc exp run --temp` and queued experiments."""
    return Path(os.environ.get("DVC_ROOT", ".")).resolve() != Path.cwd()


def step_name(step: int) -> str:
    """`step-00000150`."""
    return f"step-{step:08d}"


def list_checkpoints(run_directory: Path) -> list[Path]:
    """The published checkpoints of a run, newest first. Other directories and half-written ones do not count."""
    return [path for path in _list_named(run_directory) if _has_manifest(path)]


def list_incomplete(run_directory: Path) -> list[Path]:
    """What has the name of a checkpoint and no manifest: no crash leaves that, but an incomplete copy does."""
    return [path for path in _list_named(run_directory) if not _has_manifest(path)]


def _list_named(run_directory: Path) -> list[Path]:
    try:
        names = os.listdir(run_directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((run_directory / name for name in names if _STEP_NAME.fullmatch(name)), reverse=True)


def _has_manifest(checkpoint: Path) -> bool:
    # Not `is_file`, which since Python 3.14 is False also where a file server is away: the run would start at step 0.
    return find_size(checkpoint / MANIFEST) is not None


def size_of(directory: Path) -> int:
    """Bytes of all files below a directory, without those that a training deletes meanwhile."""
    found = 0
    for root, _, names in os.walk(directory):  # unlike `rglob`, it passes over a directory that is gone
        for name in names:
            with suppress(FileNotFoundError):
                found += os.stat(os.path.join(root, name)).st_size
    return found


def verify(checkpoint: Path, contents: bool = True, names: Collection[str] | None = None) -> CheckpointManifest:
    """Compare the files of a checkpoint with its manifest, and return the manifest.

    Args:
        checkpoint: Its directory.
        contents: Whether to hash the files too, or only to compare their sizes.
        names: Of the files to compare; None: all.

    Raises:
        DamagedFile: naming the file that is missing, has another size, or another SHA-256.
        UnsupportedFormat: it was written by another version of the pipeline.
    """
    refresh([checkpoint])  # another node may have published it a moment ago
    manifest = CheckpointManifest.read(checkpoint)
    chosen = manifest.files if names is None else names
    if unlisted := sorted({*chosen}.difference(manifest.files)):
        raise damaged(checkpoint / MANIFEST, f"it does not list {unlisted[0]}", REMEDY)
    check_files({checkpoint / name: manifest.files[name] for name in chosen}, REMEDY, contents)
    return manifest


def latest_valid(
    checkpoints: list[Path], report: Callable[[str], None], verify: Callable[[Path], object] = verify
) -> Path | None:
    """The first of `checkpoints` that `verify` accepts; `report` is called with each damaged one.

    Raises:
        StageError: there are checkpoints, and none of them is valid. A run never starts over by itself.
        UnsupportedFormat: of the newest one that is intact.
    """
    for path in checkpoints:
        try:
            verify(path)
        except DamagedFile as error:
            report(f"skipping a damaged checkpoint: {error}")
        else:
            return path
    if checkpoints:
        raise StageError(
            f"no checkpoint in {checkpoints[0].parent} is valid; to start over, set runtime.resume=never, "
            "or move that directory away"
        )
    return None
