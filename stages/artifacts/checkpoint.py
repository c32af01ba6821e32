"""Where checkpoints lie, and when one is whole.

    outputs/<experiment_name>/checkpoints/<run_id>/step-00000150/
        __0_0.distcp ...    tensors, as torch.distributed.checkpoint writes them, one file a rank
        .metadata           which tensor lies where
        lr_scheduler.pt  state.json  history.tsv
        manifest.json       size and SHA-256 of every file above, and its own; written last: the checkpoint exists when
                            this does

They are no DVC outs: DVC deletes outs before a stage runs, and a resume needs them.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.artifacts.command import StageError
from stages.artifacts.publish import read_json, sha256_file, sha256_json, write_json

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-\d{8}")


def root(experiment_name: str) -> Path:
    """The directory of all checkpoints of an experiment.

    It is resolved against `$DVC_ROOT`, which DVC sets, so that `dvc exp run --temp` and queued experiments, which run
    in a copy of the project, find the checkpoints of the project itself. `$CHECKPOINT_ROOT` puts them elsewhere.
    """
    if elsewhere := os.environ.get("CHECKPOINT_ROOT"):
        return Path(elsewhere) / experiment_name
    return Path(os.environ.get("DVC_ROOT", ".")) / "outputs" / experiment_name / "checkpoints"


def write_manifest(checkpoint: Path, content: dict[str, Any]) -> None:
    """Write the manifest of a checkpoint: `content`, and the digest of it."""
    write_json(checkpoint / MANIFEST, {**content, "sha256": sha256_json(content)})


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        StageError: it is missing, or not as it was written.
    """
    try:
        manifest: dict[str, Any] = read_json(checkpoint / MANIFEST)
        if manifest.pop("sha256") == sha256_json(manifest):
            return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise StageError(f"{checkpoint} is no whole checkpoint: {MANIFEST} is missing or damaged")


def verify(checkpoint: Path, contents: bool = True) -> dict[str, Any]:
    """Hold every file of a checkpoint against its manifest and return the manifest.

    Args:
        checkpoint: Its directory.
        contents: Whether to read the files, too, and not only look at their sizes.

    Raises:
        StageError: naming the file that is missing, has another size, or another SHA-256.
    """
    manifest = read_manifest(checkpoint)
    for name, entry in manifest["files"].items():
        path = checkpoint / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise StageError(f"{path} is missing")
        if size != entry["size"]:
            raise StageError(f"{path} has {size} bytes instead of {entry['size']}: it was truncated or changed")
        if contents and sha256_file(path) != entry["sha256"]:
            raise StageError(f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}")
    return manifest


def step_name(step: int) -> str:
    """`step-00000150`."""
    return f"step-{step:08d}"


def find(run_directory: Path) -> list[Path]:
    """The published checkpoints of a run, newest first. Foreign directories and half-written ones do not count."""
    if not run_directory.is_dir():
        return []
    found = [path for path in run_directory.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, reverse=True)


def newest_whole(checkpoints: list[Path], report: Callable[[str], None]) -> Path | None:
    """The first of `checkpoints` whose files are all as its manifest says; `report` hears of the damaged ones.

    Raises:
        StageError: there are checkpoints, and none of them is whole.
    """
    for path in checkpoints:
        try:
            verify(path)
        except StageError as error:
            report(f"skipping a damaged checkpoint: {error}")
        else:
            return path
    if checkpoints:
        raise StageError(
            f"no checkpoint in {checkpoints[0].parent} is whole; to start over, set runtime.resume=never, "
            "or move that directory away"
        )
    return None
