"""Which checkpoints of a run stay on the disk."""

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.artifacts import checkpoint
from stages.artifacts.command import StageError

TEMPORARY = ".tmp"
"""Ends the name of a checkpoint that is being written or deleted."""

DAMAGED = ".damaged"
"""Ends the name of a checkpoint that was set aside because it was not as its manifest says."""


def superfluous(run_directory: Path, keep: int) -> list[Path]:
    """The checkpoints of a run that are neither among its `keep` newest nor its best, by validation loss.

    Those that miss a file, or a part of one, neither count nor are among them.
    """
    found = complete(run_directory)
    losses = {path: manifest["validation_loss"] for path, manifest in found if manifest["validation_loss"] is not None}
    best = min(losses, key=losses.__getitem__, default=None)
    return [path for path, _ in found[keep:] if path != best]


def complete(run_directory: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The checkpoints of a run whose files have the sizes that their manifest says, newest first, with it."""
    found = []
    for path in checkpoint.find(run_directory):
        with suppress(StageError, FileNotFoundError):  # the latter where a training deletes it meanwhile
            found.append((path, checkpoint.verify(path, contents=False)))
    return found


def leftovers(run_directory: Path) -> list[Path]:
    """What a crash left half-written or half-deleted, and what was set aside."""
    return [path for suffix in (TEMPORARY, DAMAGED) for path in run_directory.glob(f"step-*{suffix}")]


def prune(run_directory: Path, keep: int) -> None:
    """Delete the superfluous checkpoints of a run, and what a crash left half-written or half-deleted."""
    delete([*superfluous(run_directory, keep), *run_directory.glob(f"step-*{TEMPORARY}")])


def delete(paths: Iterable[Path]) -> None:
    """Delete checkpoints, so that one whose deletion is cut short has no manifest and does not count any more."""
    for path in paths:
        shutil.rmtree(path if path.suffix else _renamed(path, TEMPORARY))


def set_aside(path: Path) -> None:
    """Take a damaged checkpoint out of the way of those to come."""
    _renamed(path, DAMAGED)


def _renamed(path: Path, suffix: str) -> Path:
    target = path.with_name(path.name + suffix)
    if target.exists():
        shutil.rmtree(target)
    return path.rename(target)
