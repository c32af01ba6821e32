"""Which checkpoints stay, and the commands that look after them."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR

from stages.artifacts import checkpoint, params
from stages.training import retention
from stages.training.checkpoint import Saver
from stages.training.params import TrainRuntime
from stages.training.process import single_writer
from tests.conftest import REPO, Project, Ranks

COMMAND = ("python", "-m", "stages.checkpoints")


def make(run: Path, step: int, loss: float | None = None) -> Path:
    """A checkpoint with one file."""
    path = run / checkpoint.step_name(step)
    path.mkdir(parents=True)
    (path / "state.json").write_text("{}")
    files = {"state.json": {"size": 2, "sha256": checkpoint.sha256_file(path / "state.json")}}
    checkpoint.write_manifest(path, {"step": step, "total_steps": 9, "validation_loss": loss, "files": files})
    return path


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in checkpoint.find(run))


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    for step, loss in enumerate([None, 3.0, 2.0, 2.5, None, 2.75], 1):
        make(tmp_path, step, loss)
    retention.prune(tmp_path, 2)
    assert steps(tmp_path) == [3, 5, 6]
    make(tmp_path, 7, 1.5)
    retention.prune(tmp_path, 2)
    assert steps(tmp_path) == [6, 7]


def test_27_what_is_foreign_or_not_whole_neither_counts_nor_goes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    (make(tmp_path, 4) / "state.json").unlink()
    (make(tmp_path, 5) / "manifest.json").write_text('{"step": 5}')
    make(tmp_path, 6, loss=0.1).joinpath("state.json").write_text("{} ")
    (tmp_path / "step-00000007").mkdir()
    (tmp_path / "step-notes").write_text("mine")
    (tmp_path / "step-00000008.tmp").mkdir()
    retention.prune(tmp_path, 2)
    assert [path.name for path, _ in retention.complete(tmp_path)] == ["step-00000003", "step-00000002"]
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [*(f"step-0000000{step}" for step in (2, 3, 4, 5, 6, 7)), "step-notes"]


def test_all_is_on_the_disk_before_the_rename_and_the_manifest_last(
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
    runtime = params.load(TrainRuntime, "runtime", REPO / "params.yaml")
    with Saver(runtime, asynchronous=False) as saver:
        saver.save(
            tmp_path / "step-00000001", model, optimizer, scheduler, {}, "", {"step": 1, "validation_loss": None}
        )

    published = events.index(("rename", "step-00000001"))
    written = events.index(("rename", "step-00000001.tmp/manifest.json"))
    files = {path.name for path in (tmp_path / "step-00000001").iterdir()}
    assert len(files) == 6
    synced = {path for kind, path in events[written:published] if kind == "sync"}
    assert synced >= {"step-00000001.tmp", *(f"step-00000001.tmp/{name}" for name in files)}
    assert events[published + 1] == ("sync", ".")


def test_a_deletion_that_is_cut_short_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(path: Path) -> None:
        raise KeyboardInterrupt

    path = make(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut_short)
        with pytest.raises(KeyboardInterrupt):
            retention.delete([path])
    assert steps(tmp_path) == []
    retention.prune(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_step_may_be_damaged_twice(tmp_path: Path) -> None:
    for _ in range(2):
        retention.set_aside(make(tmp_path, 1))
    assert [path.name for path in retention.leftovers(tmp_path)] == ["step-00000001.damaged"]


def test_list_verify_and_prune(training: Project, ranks: Ranks) -> None:
    assert "holds no checkpoints" in training.run(*COMMAND, "list", status=2)
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
    losses = {step: checkpoint.read_manifest(finished / f"step-{step:08d}")["validation_loss"] for step in before[1]}
    last_and_best = sorted({12, min(losses, key=losses.__getitem__)})

    output = training.run(*COMMAND, "list")
    assert len(output.splitlines()) == 1 + len(before[0]) + len(before[1]) + 2
    assert "damaged, set aside" in output and "left by a crash" in output
    assert f"{losses[12]:.4f}  complete" in output
    assert training.run(*COMMAND, "verify").count("is whole") == len(before[0]) + len(before[1])

    with single_writer(unfinished, print):
        output = training.run(*COMMAND, "prune", "--other-runs", "--yes")
    assert f"{unfinished.name} is being trained: left alone" in output
    assert [steps(path) for path in (unfinished, finished)] == [before[0], last_and_best]
    assert len(retention.leftovers(unfinished)) == 2

    output = training.run(*COMMAND, "prune")
    assert "would delete" in output and "prune --yes" in output
    assert len(retention.leftovers(unfinished)) == 2
    training.run(*COMMAND, "prune", "--yes")
    assert retention.leftovers(unfinished) == []
    assert 8 in steps(unfinished)

    shard = next((unfinished / "step-00000008").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    assert "is damaged" in training.run(*COMMAND, "verify", status=2)
    training.run(*COMMAND, "prune", "--yes")
    assert 6 in steps(unfinished)
    training.run(*COMMAND, "prune", "--other-runs", "--yes")
    assert [steps(path) for path in (unfinished, finished)] == [[], last_and_best]
