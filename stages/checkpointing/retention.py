"""How often checkpoints are saved, and which ones stay on the disk."""

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from stages.base import publish
from stages.base.errors import StageError, as_stage_error
from stages.base.history import lowest
from stages.checkpointing.layout import CheckpointManifest, list_checkpoints, verify

TEMPORARY = ".tmp"
"""Suffix of a checkpoint that is being written or deleted."""

DAMAGED = ".damaged"
"""Suffix of a checkpoint in quarantine: its files did not match its manifest."""


@dataclass(frozen=True)
class CheckpointRuntime:
    """The part of `runtime` in params.yaml that is about checkpoints."""

    ckpt_freq: PositiveInt | None
    """Distance between two checkpoints, in optimizer steps. null: none by steps."""
    ckpt_minutes: PositiveFloat | None
    """Time between two checkpoints, in minutes. null: none by time. The clock is that of rank 0."""
    async_checkpoint: bool
    """Whether training continues while a checkpoint is written. This needs as much CPU memory as the weights and the
    optimizer state."""
    keep_checkpoints: Annotated[int, Field(ge=2)]
    """How many of the newest checkpoints stay, beside the best. At least 2, so that a damaged one has a predecessor."""


def prunable(run_directory: Path, keep: int) -> list[Path]:
    """The valid checkpoints of a run that are neither among its `keep` newest nor its best, by validation loss.

    Those with a missing or truncated file neither count as newest nor are returned.
    """
    # Incomplete ones do not count among the `keep`: the intact ones before them could all be deleted for their sake.
    found = list_complete(run_directory)
    kept = best(found)
    return [path for path, _ in found[keep:] if path != kept]


def best(checkpoints: Iterable[tuple[Path, CheckpointManifest]]) -> Path | None:
    """The one with the lowest validation loss, the newest of several; None where none was measured."""
    found = {manifest.step: (path, manifest.validation_loss) for path, manifest in checkpoints}
    step = lowest({step: loss for step, (_, loss) in found.items() if loss is not None})
    return None if step is None else found[step][0]


def list_complete(run_directory: Path) -> list[tuple[Path, CheckpointManifest]]:
    """The checkpoints of a run whose files have the sizes in their manifest, newest first, with the manifest."""
    # Sizes only: this runs after every save, and hashing all that is kept would read it all from the disk again.
    found = []
    for path in list_checkpoints(run_directory):
        with suppress(StageError, FileNotFoundError):  # the latter where a training deletes it meanwhile
            found.append((path, verify(path, contents=False)))
    return found


def list_leftovers(run_directory: Path) -> list[Path]:
    """What a crash left half-written or half-deleted, and what is in quarantine."""
    return [path for suffix in (TEMPORARY, DAMAGED) for path in run_directory.glob(f"step-*{suffix}")]


def prune(run_directory: Path, keep: int, report: Callable[[str], None]) -> None:
    """Delete the prunable checkpoints of a run, and what a crash left half-written or half-deleted.

    Where the file system refuses, `report` is called, and the next call deletes them: that must not end a training.
    """
    try:
        # Not what is in quarantine: a person may want to look at it. `checkpoints prune` deletes that.
        delete([*prunable(run_directory, keep), *run_directory.glob(f"step-*{TEMPORARY}")])
    except OSError as error:  # on NFS, as long as a process of this node has a file in it open
        report(f"warning: an old checkpoint is not deleted yet ({as_stage_error(error)}); a later save tries it again")


def delete(paths: Iterable[Path]) -> None:
    """Delete checkpoints.

    Each is renamed first: one whose deletion is interrupted must not be taken for a checkpoint again.
    """
    for path in paths:
        # With a suffix it is a leftover or in quarantine, and does not count as a checkpoint anyway.
        _remove(path if path.suffix else _rename(path, TEMPORARY))


def quarantine(path: Path) -> None:
    """Rename what is in the place of a checkpoint, if anything is, so that the run can publish that step.

    A person can look at it: a damaged checkpoint, or a part of one that somebody has copied.
    """
    if os.path.lexists(path):
        _rename(path, DAMAGED)


def _rename(path: Path, suffix: str) -> Path:
    target = path.with_name(path.name + suffix)
    if os.path.lexists(target):  # this step was damaged before; a rename does not replace a directory that has files
        _remove(target)
    publish.rename(path, target)
    return target


def _remove(path: Path) -> None:
    """Delete a directory, or a link to one, which leaves what it leads to, or what somebody has put there instead."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
