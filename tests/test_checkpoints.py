"""Which checkpoints stay, and the commands that look after them."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR

from stages.artifacts.params_file import load_params
from stages.artifacts.record import FileEntry
from stages.checkpointing import retention
from stages.checkpointing.layout import CheckpointManifest, UnsupportedFormat, latest_valid, list_checkpoints, step_name
from stages.checkpointing.lock import writer_lock
from stages.training.params import TrainRuntime
from stages.training.saver import Saver
from tests.project import REPO, Project, flip_bit
from tests.ranks import Ranks
from tests.trainings import checkpoint_manifest, train_state

COMMAND = ("python", "-m", "stages.checkpoints")


def make(run: Path, step: int, loss: float | None = None) -> Path:
    """A checkpoint with one file."""
    path = run / step_name(step)
    path.mkdir(parents=True)
    (path / "state.json").write_text("{}")
    files = {"state.json": FileEntry.of(path / "state.json")}
    checkpoint_manifest(step=step, validation_loss=loss, files=files).write(path)
    return path


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in list_checkpoints(run))


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path: Path) -> None:
    for step, loss in enumerate([None, 3.0, 2.0, 2.5, None, 2.75], 1):
        make(tmp_path, step, loss)
    retention.prune(tmp_path, 2)
    assert steps(tmp_path) == [3, 5, 6]
    make(tmp_path, 7, 1.5)
    retention.prune(tmp_path, 2)
    assert steps(tmp_path) == [6, 7]


def test_27_other_and_incomplete_directories_neither_count_nor_are_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    (make(tmp_path, 4) / "state.json").unlink()
    (make(tmp_path, 5) / "manifest.json").write_text('{"step": 5}')
    make(tmp_path, 6, loss=0.1).joinpath("state.json").write_text("{} ")
    (tmp_path / "step-00000007").mkdir()
    (tmp_path / "step-notes").write_text("mine")
    (tmp_path / "step-00000008.tmp").mkdir()
    retention.prune(tmp_path, 2)
    assert [path.name for path, _ in retention.list_complete(tmp_path)] == ["step-00000003", "step-00000002"]
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [*(f"step-0000000{step}" for step in (2, 3, 4, 5, 6, 7)), "step-notes"]


def test_all_files_are_synced_before_the_rename_and_the_manifest_is_last(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename

    def new_fsync(file: int) -> None:
        events.append(("sync", os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), tmp_path)))
        fsync(file)

    def new_rename(source: Path, target: Path) -> Path:
        events.append(("rename", os.path.relpath(target, tmp_path)))
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", new_fsync)
    monkeypatch.setattr(Path, "rename", new_rename)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    runtime = load_params(TrainRuntime, "runtime", REPO / "params.yaml")
    with Saver(runtime, asynchronous=False) as saver:
        manifest = checkpoint_manifest()
        saver.save(tmp_path / "step-00000001", model, optimizer, scheduler, train_state(), "", manifest)

    published = events.index(("rename", "step-00000001"))
    written = events.index(("rename", "step-00000001.tmp/manifest.json"))
    files = {path.name for path in (tmp_path / "step-00000001").iterdir()}
    assert len(files) == 6
    synced = {path for kind, path in events[written:published] if kind == "sync"}
    assert synced >= {"step-00000001.tmp", *(f"step-00000001.tmp/{name}" for name in files)}
    assert events[published + 1] == ("sync", ".")


def test_a_checkpoint_of_another_format_is_refused_and_not_taken_for_damaged(tmp_path: Path) -> None:
    make(tmp_path, 1)
    make(tmp_path, 2)
    dataclasses.replace(CheckpointManifest.read(tmp_path / step_name(2)), format=99).write(tmp_path / step_name(2))
    with pytest.raises(
        UnsupportedFormat, match=r"has the format 99, this version reads format 1: continue the run with"
    ):
        latest_valid(list_checkpoints(tmp_path), pytest.fail)


def test_an_interrupted_deletion_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    path = make(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            retention.delete([path])
    assert steps(tmp_path) == []
    retention.prune(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_step_may_be_damaged_twice(tmp_path: Path) -> None:
    for _ in range(2):
        retention.quarantine(make(tmp_path, 1))
    assert [path.name for path in retention.list_leftovers(tmp_path)] == ["step-00000001.damaged"]


def test_checkpoints_are_listed_verified_and_pruned(training: Project, ranks: Ranks) -> None:
    assert "contains no checkpoints" in training.run(*COMMAND, "list", status=2)
    training.set(runtime={"async_checkpoint": False})
    ranks.run(training, "kill rank 0 at step 9", -9)
    unfinished = training.checkpoints()
    training.set(seed=1, eval_freq=2)
    ranks.run(training)
    (finished,) = (path for path in unfinished.parent.iterdir() if path != unfinished)
    for path in (unfinished / "step-00000009.damaged", unfinished / "step-00000010.tmp"):
        path.mkdir()
    before = [steps(path) for path in (unfinished, finished)]
    assert [found[-2:] for found in before] == [[6, 8], [10, 12]]
    losses = {step: CheckpointManifest.read(finished / f"step-{step:08d}").validation_loss for step in before[1]}
    last_and_best = sorted({12, min(losses, key=losses.__getitem__)})

    output = training.run(*COMMAND, "list")
    assert len(output.splitlines()) == 1 + len(before[0]) + len(before[1]) + 2
    assert "damaged, in quarantine" in output and "left by a crash" in output
    assert f"{losses[12]:.4f}  complete" in output
    assert training.run(*COMMAND, "verify").count("is valid") == len(before[0]) + len(before[1])

    with writer_lock(unfinished, print):
        output = training.run(*COMMAND, "prune", "--other-runs", "--yes")
    assert f"{unfinished.name} is being trained: skipped" in output
    assert [steps(path) for path in (unfinished, finished)] == [before[0], last_and_best]
    assert len(retention.list_leftovers(unfinished)) == 2

    output = training.run(*COMMAND, "prune")
    assert "would delete" in output and "prune --yes" in output
    assert len(retention.list_leftovers(unfinished)) == 2
    training.run(*COMMAND, "prune", "--yes")
    assert retention.list_leftovers(unfinished) == []
    assert 8 in steps(unfinished)

    shard = next((unfinished / "step-00000008").glob("*.distcp"))
    flip_bit(shard, 100)
    assert "is damaged" in training.run(*COMMAND, "verify", status=2)
    training.run(*COMMAND, "prune", "--yes")
    assert 6 in steps(unfinished)
    training.run(*COMMAND, "prune", "--other-runs", "--yes")
    assert [steps(path) for path in (unfinished, finished)] == [[], last_and_best]
