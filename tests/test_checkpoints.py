"""Which checkpoints stay, and the commands that look after them."""

import dataclasses
import errno
import fcntl
import os
import re
import shutil
import time
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.two_tensor import TwoTensor

from stages.base.errors import StageError
from stages.base.history import HISTORY, SPEED
from stages.base.params_file import load_params
from stages.base.record import FileEntry
from stages.checkpointing import retention
from stages.checkpointing.layout import (
    CheckpointManifest,
    UnsupportedFormat,
    latest_valid,
    list_checkpoints,
    size_of,
    step_name,
    verify,
)
from stages.checkpointing.lock import rank_lock, try_writer_lock, writer_lock
from stages.checkpointing.pointer import RunPointer, resolve
from stages.checkpointing.saver import Saver, load
from stages.export.mapped import ShardedTensors, TensorSpec, write_safetensors
from stages.launching.runtime import TrainRuntime
from stages.ranks.watchdog import Heartbeat
from tests.project import REPO, Project, flip_bit
from tests.ranks import Ranks
from tests.trainings import Given, checkpoint_manifest, train_state

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
    retention.prune(tmp_path, 2, print)
    assert steps(tmp_path) == [3, 5, 6]
    make(tmp_path, 7, 1.5)
    retention.prune(tmp_path, 2, print)
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
    retention.prune(tmp_path, 2, print)
    assert [path.name for path, _ in retention.list_complete(tmp_path)] == ["step-00000003", "step-00000002"]
    kept = sorted(path.name for path in tmp_path.glob("step-*"))
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
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    runtime = load_params(TrainRuntime, "runtime", REPO / "params.yaml")
    with Saver(dataclasses.replace(runtime, async_checkpoint=False), timeout_minutes=30) as saver:
        manifest = checkpoint_manifest()
        saver.save(tmp_path / "step-00000001", model, optimizer, train_state(), {HISTORY: "", SPEED: ""}, manifest)

    published = events.index(("rename", "step-00000001"))
    written = events.index(("rename", "step-00000001.tmp/manifest.json"))
    checkpoint = tmp_path / "step-00000001"
    files = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*")}
    assert len(files) == 10
    synced = {path for kind, path in events[written:published] if kind == "sync"}
    assert synced >= {"step-00000001.tmp", *(f"step-00000001.tmp/{name}" for name in files)}
    assert events[published + 1] == ("sync", ".")


class Odd(torch.nn.Module):
    """Tensors of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 3) for _ in range(2)])
        for name, buffer in {
            "scalar": torch.tensor(1.5, dtype=torch.bfloat16), "empty": torch.zeros(0, 3),
            "transposed": torch.arange(6.0).view(2, 3).T, "part": torch.arange(9)[3:5], "bool": torch.tensor([True]),
            "two": TwoTensor(torch.ones(2, 3), torch.zeros(2, 3)),  # as the state of an 8-bit optimizer
        }.items():  # fmt: skip
            self.register_buffer(name, buffer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        for layer in self.layers:
            layer(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for buffer in self.buffers():
            buffer.copy_(~buffer if buffer.dtype == torch.bool else buffer + 1)


def save_thrice(directory: Path, asynchronous: bool) -> list[bytes]:
    """The tensor files of the last of three saves."""
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters())
    model.step(optimizer)
    runtime = load_params(TrainRuntime, "runtime", REPO / "params.yaml")
    with Saver(dataclasses.replace(runtime, async_checkpoint=asynchronous), timeout_minutes=30) as saver:
        for step in (1, 2, 3):
            path = directory / step_name(step)
            saver.save(path, model, optimizer, train_state(step), {}, checkpoint_manifest(step=step))
            model.step(optimizer)  # while it is saved
    return [file.read_bytes() for file in sorted(path.rglob("*.distcp"))]


def test_an_asynchronous_save_writes_the_bytes_of_a_synchronous_one(mesh: DeviceMesh, tmp_path: Path) -> None:
    synchronous, asynchronous = (save_thrice(tmp_path / str(kind), kind) for kind in (False, True))
    assert len(synchronous) == 2 and asynchronous == synchronous
    path = tmp_path / "True" / step_name(3)
    verify(path)
    torch.manual_seed(0)
    expected, found = Odd(), Odd()
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (expected, found)]
    for _ in range(3):
        expected.step(optimizers[0])
    found.step(optimizers[1])  # its state is allocated, as that of `make_optimizer` is
    with torch.serialization.safe_globals([TwoTensor]):
        load(path, found, optimizers[1])
    states = [
        [
            *model.parameters(),
            *model.buffers(),
            *(value for state in optimizer.state.values() for value in state.values()),
        ]
        for model, optimizer in zip((expected, found), optimizers, strict=True)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_27_what_is_no_checkpoint_makes_room_for_one(mesh: DeviceMesh, tmp_path: Path) -> None:
    """A part of a checkpoint that somebody has copied; before, the step was never saved, without a word."""
    left = tmp_path / step_name(2)
    left.mkdir()
    (left / "part").touch()
    save_thrice(tmp_path, asynchronous=False)
    assert verify(left).step == 2
    assert [path.name for path in (tmp_path / f"{step_name(2)}.damaged").iterdir()] == ["part"]


def test_the_bytes_of_a_tensor_are_in_the_order_of_its_elements(mesh: DeviceMesh, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("transposed", torch.arange(6.0).view(2, 3).T)
    optimizer = torch.optim.AdamW(model.parameters())
    runtime = load_params(TrainRuntime, "runtime", REPO / "params.yaml")
    path = tmp_path / step_name(1)
    for asynchronous in (False, True):
        with Saver(dataclasses.replace(runtime, async_checkpoint=asynchronous), timeout_minutes=30) as saver:
            saver.save(path, model, optimizer, train_state(), {}, checkpoint_manifest())
        weights = ShardedTensors(path)
        specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()}
        write_safetensors(weights, specs, path, num_workers=1, dtypes=dict.fromkeys(specs, torch.float32))
        assert torch.equal(load_file(path / "model.safetensors")["transposed"], model.get_buffer("transposed"))
        shutil.rmtree(path)


def test_a_save_and_a_load_go_on_with_each_tensor_and_each_part_of_a_file(mesh: DeviceMesh, tmp_path: Path) -> None:
    """So the watchdog does not take a slow disk for a rank that hangs."""
    model = torch.nn.Sequential(*(torch.nn.Linear(700, 700, bias=False) for _ in range(3)))  # 2 MB each
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 700)).sum().backward()
    optimizer.step()
    runtime = load_params(TrainRuntime, "runtime", REPO / "params.yaml")
    heartbeat = Heartbeat()
    for asynchronous in (False, True):
        heartbeat.pieces, path = 0, tmp_path / str(asynchronous) / step_name(1)
        runtime = dataclasses.replace(runtime, async_checkpoint=asynchronous)
        with Saver(runtime, timeout_minutes=30, goes_on=heartbeat.goes_on) as saver:
            saver.save(path, model, optimizer, train_state(), {}, checkpoint_manifest())
        num_tensors, num_mib = 3 + 2 * 3 + 3, size_of(path) >> 20  # weights, two moments, steps
        assert heartbeat.pieces >= num_tensors + num_mib
        heartbeat.pieces = 0
        load(path, model, optimizer, heartbeat.goes_on)
        assert heartbeat.pieces == num_tensors


def test_the_plan_of_a_save_is_kept_for_the_next(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_thrice(tmp_path / "before", asynchronous=False)
    monkeypatch.setattr(DefaultSavePlanner, "_create_global_plan", pytest.fail)
    save_thrice(tmp_path, asynchronous=False)


@pytest.mark.parametrize("error", [MemoryError(), KeyError(type)])
def test_a_copy_that_fails_for_an_asynchronous_save_is_a_clear_error(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """On all ranks, which would otherwise wait for the one that has failed. A closed stager raises the second one."""

    def stage(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(StateDictStager, "stage", stage)
    with pytest.raises(
        StageError, match=rf"rank 0: .* {type(error).__name__}.* set runtime\.async_checkpoint to false"
    ):
        save_thrice(tmp_path, asynchronous=True)


def test_a_save_that_fails_while_the_training_fails_is_reported(mesh: DeviceMesh, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / step_name(1)

    def train(saver: Saver) -> None:
        model = Odd()
        optimizer = torch.optim.AdamW(model.parameters())
        saver.save(path, model, optimizer, train_state(), {}, checkpoint_manifest())
        raise ZeroDivisionError

    runtime = load_params(TrainRuntime, "runtime", REPO / "params.yaml")
    runtime = dataclasses.replace(runtime, async_checkpoint=True)
    reported: list[str] = []
    with pytest.raises(ZeroDivisionError), Saver(runtime, timeout_minutes=30, report=reported.append) as saver:
        train(saver)
    assert reported == [f"{path}.tmp: Not a directory"]


def test_a_checkpoint_of_another_format_is_refused_and_not_taken_for_damaged(tmp_path: Path) -> None:
    make(tmp_path, 1)
    make(tmp_path, 2)
    dataclasses.replace(CheckpointManifest.read(tmp_path / step_name(2)), format=99).write(tmp_path / step_name(2))
    with pytest.raises(
        UnsupportedFormat, match=r"has the format 99, this version reads format 2: continue the run with"
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
    retention.prune(tmp_path, 2, print)
    assert list(tmp_path.glob("step-*")) == []


def test_a_step_may_be_damaged_twice(tmp_path: Path) -> None:
    for _ in range(2):
        retention.quarantine(make(tmp_path, 1))
    assert [path.name for path in retention.list_leftovers(tmp_path)] == ["step-00000001.damaged"]


@pytest.mark.parametrize("lock", [writer_lock, rank_lock, try_writer_lock])
def test_files_are_opened_as_locks_on_nfs_need_it(lock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a shared lock needs a file that is open for reading, an exclusive one a file that is open for writing."""
    kinds = []

    def flock(file: IO[str], operation: int) -> None:
        kinds.append(operation & ~fcntl.LOCK_NB)
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        needed = os.O_RDONLY if operation & fcntl.LOCK_SH else os.O_WRONLY
        if mode not in (needed, os.O_RDWR):
            raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", flock)
    others = {writer_lock: (tmp_path, print), try_writer_lock: (tmp_path, "pruning")}
    arguments = others.get(lock, (tmp_path,))
    with lock(*arguments):
        assert kinds


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_clear_error(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StageError, match=r"writer.lock cannot be locked .* set CHECKPOINT_ROOT"):
        writer_lock(tmp_path, print).__enter__()


def test_a_launcher_shows_who_holds_the_directory(tmp_path: Path) -> None:
    with try_writer_lock(tmp_path, "pruning"), pytest.raises(StageError, match=rf"pruning, process {os.getpid()} on"):
        writer_lock(tmp_path, print).__enter__()


def test_a_checkpoint_that_was_copied_to_another_clone_is_the_result_there(
    finished: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, _ = finished
    last = project.checkpoints() / step_name(12)
    RunPointer.to(last).write(project / "outputs/test/run.json")
    clone = project.copy(tmp_path / "clone")
    copied = clone.checkpoints() / last.name
    shutil.rmtree(clone / "outputs/test/checkpoints")
    monkeypatch.chdir(clone.path)
    with pytest.raises(StageError, match="does not exist: copy it from where it was trained, set CHECKPOINT_ROOT"):
        resolve("test")
    shutil.copytree(last, copied)
    assert resolve("test")[1].resolve() == copied
    assert f"{last.name} is valid" in clone.run(*COMMAND, "verify")
    identity = dataclasses.replace(CheckpointManifest.read(copied).identity, code="other")
    dataclasses.replace(CheckpointManifest.read(copied), identity=identity).write(copied)
    with pytest.raises(StageError, match=r"is not the one that .*run\.json names"):  # valid, but another result
        resolve("test")


def test_checkpoints_are_listed_verified_and_pruned(training: Project, ranks: Ranks) -> None:
    assert "contains no checkpoints" in training.run(*COMMAND, "list", status=2)
    training.set(runtime={"async_checkpoint": False})
    ranks.run(training, "kill rank 0 at step 9", -9)
    unfinished = training.checkpoints()
    training.set(seed=1, eval_freq=2)
    ranks.run(training)
    (finished,) = (path for path in unfinished.parent.iterdir() if path != unfinished)
    pointer = training / "outputs/test/run.json"
    RunPointer.to(finished / "step-00000012").write(pointer)
    for path in (unfinished / "step-00000009.damaged", unfinished / "step-00000010.tmp"):
        path.mkdir()
    before = [steps(path) for path in (unfinished, finished)]
    assert [found[-2:] for found in before] == [[6, 8], [10, 12]]
    losses = {step: CheckpointManifest.read(finished / f"step-{step:08d}").validation_loss for step in before[1]}
    last_and_best = sorted({12, min(losses, key=losses.__getitem__)})

    (training / "data/model.json").rename(training / "model.json")
    assert "current run" not in training.run(*COMMAND, "list"), "which it is depends on the model"
    (training / "model.json").rename(training / "data/model.json")
    tomorrow = time.time() + 86_400  # where the clock of a file server is ahead
    os.utime(finished / "step-00000012", (tomorrow, tomorrow))
    output = training.run(*COMMAND, "list")
    assert "-1 day" not in output
    assert len(output.splitlines()) == 1 + len(before[0]) + len(before[1]) + 2
    assert "damaged, in quarantine" in output and "left by a crash" in output
    best = min(losses, key=losses.__getitem__)
    assert re.search(rf"{best:08d} .*  complete, best, current run(, in run.json)?\n", output)
    assert re.search(rf"{losses[12]:.4f}  complete(, best)?, current run, in run.json\n", output)
    assert output.count("current run") == len(before[1]) and output.count("in run.json") == 1
    assert training.run(*COMMAND, "verify").count("is valid") == len(before[0]) + len(before[1])

    with writer_lock(unfinished, print):
        output = training.run(*COMMAND, "prune", "--other-runs", "--yes")
    assert f"{unfinished.name} is being trained: skipped" in output
    assert [steps(path) for path in (unfinished, finished)] == [before[0], last_and_best]
    assert len(retention.list_leftovers(unfinished)) == 2

    assert output.endswith("freed\n")
    output = training.run(*COMMAND, "prune", "--other-runs")
    assert "would delete" in output and "checkpoints prune --other-runs --yes`" in output
    output = training.run(*COMMAND, "prune")
    assert "would delete" in output and "checkpoints prune --yes`" in output
    assert len(retention.list_leftovers(unfinished)) == 2
    training.run(*COMMAND, "prune", "--yes")
    assert retention.list_leftovers(unfinished) == []
    assert 8 in steps(unfinished)

    shard = next((unfinished / "step-00000008").rglob("*.distcp"))
    flip_bit(shard, 100)
    assert "is damaged" in training.run(*COMMAND, "verify", status=2)
    training.run(*COMMAND, "prune", "--yes")
    assert 6 in steps(unfinished)
    # A link to a run leads to what may be of another experiment.
    elsewhere = unfinished.rename(training / "elsewhere")
    unfinished.symlink_to(elsewhere)
    output = training.run(*COMMAND, "prune", "--other-runs", "--yes")
    assert f"{unfinished.name} is a link: skipped" in output and 6 in steps(elsewhere)
    unfinished.unlink()
    elsewhere.rename(unfinished)
    training.run(*COMMAND, "prune", "--other-runs", "--yes")
    assert [steps(path) for path in (unfinished, finished)] == [[], last_and_best]


def test_16_a_signal_after_the_lock_was_released_is_no_error(tmp_path: Path) -> None:
    with writer_lock(tmp_path, print) as set_status:
        set_status("running")
    set_status("stopping")


def test_the_size_of_a_directory_is_without_what_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_bytes(b"12345")
    (tmp_path / "deleted").symlink_to("nowhere")
    monkeypatch.setattr(Path, "is_file", lambda path: True)  # when it was listed
    assert size_of(tmp_path) == 5
