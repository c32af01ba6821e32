"""What trainings leave on the disk, to compare two of them."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.base.files import FileEntry
from stages.base.identity import RunIdentity, TokenFingerprints
from stages.checkpointing.layout import FORMAT, CheckpointManifest, list_checkpoints, step_name, verify
from stages.checkpointing.pointer import RunPointer
from stages.checkpointing.state import ScalerState, TrainState
from tests.project import Project


def checkpoint_manifest(**values: Any) -> CheckpointManifest:
    """A manifest of which only `values` matter."""
    identity = RunIdentity(params={}, data=TokenFingerprints(train="", validation=""), model="", code="")
    defaults: dict[str, Any] = {
        "format": FORMAT, "run_id": "0123456789abcdef", "step": 1, "total_steps": 9, "validation_loss": None,
        "identity": identity, "adopted": None, "packages": {}, "files": {}, "tensors": {},
    }  # fmt: skip
    return CheckpointManifest(**{**defaults, **values})


def write_checkpoint(run: Path, step: int, **values: Any) -> Path:
    """Write a checkpoint with one file, with a manifest of which only `values` matter."""
    path = run / step_name(step)
    path.mkdir(parents=True)
    (path / "state.json").write_text("{}")
    files = {"state.json": FileEntry.of(path / "state.json")}
    checkpoint_manifest(step=step, **{"files": files, **values}).write(path)
    return path


def train_state(loss_scaler: ScalerState | None = None) -> TrainState:
    """The state of a training, as it is given to a `Saver`."""
    return TrainState(loss_scaler=loss_scaler or ScalerState(scale=1.0, good_steps=0))


Given = tuple[Project, dict[str, str]]
"""A project with dropout, and the `result` of its run without faults."""


def result(project: Project, step: int = 12) -> dict[str, str]:
    """SHA-256 of the shards (weights and optimizer) of the last checkpoint, of the history, and the one in run.json."""
    last = project.checkpoints() / step_name(step)
    files = [*sorted(last.rglob("*.distcp")), last / "history.tsv"]
    digests = {str(file.relative_to(last)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return {**digests, "result": RunPointer.to(last).result_sha256}


def published(project: Project) -> list[str]:
    """The names of the checkpoints, oldest first, all of which are valid."""
    found = list_checkpoints(project.checkpoints())
    for path in found:
        verify(path)
    return [path.name for path in reversed(found)]


def names(*steps: int) -> list[str]:
    return [step_name(step) for step in steps]


def newest_checkpoint(project: Project, step: int) -> Path:
    """The checkpoint of a step, of the newest run that has one."""
    manifests = project.path.glob(f"outputs/test/checkpoints/*/{step_name(step)}/manifest.json")
    return max(manifests, key=lambda path: path.stat().st_mtime).parent


def weights(project: Project, step: int = 12) -> dict[str, str]:
    """SHA-256 of the shards, weights and optimizer, of the newest run's last checkpoint."""
    files = CheckpointManifest.read(newest_checkpoint(project, step)).files
    return {name: entry.sha256 for name, entry in files.items() if name.endswith(".distcp")}


def steps(project: Project, seed: int) -> list[str]:
    """The checkpoints of the run with this seed."""
    found = []
    # Not `step-*`: `step-00000002.tmp` has a manifest too, while its files are written to the disk.
    for manifest in (project / "outputs").glob("test/checkpoints/*/step-*[0-9]/manifest.json"):
        try:
            if json.loads(manifest.read_text())["identity"]["params"]["seed"] == seed:
                found.append(manifest.parent.name)
        except FileNotFoundError:  # pruned in between
            continue
    return found


def each_rank(monkeypatch: pytest.MonkeyPatch, world_size: int) -> Iterator[int]:
    """The number of each rank, while torch says that this process is that rank."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: world_size)
    for rank in range(world_size):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        yield rank
