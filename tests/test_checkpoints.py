"""Which checkpoints stay, and the commands that look after them."""

import errno
import fcntl
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor

from stages.base.errors import StageError
from stages.base.history import HISTORY, SPEED
from stages.base.params_file import load_params
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
from stages.checkpointing.run import describe
from stages.checkpointing.saver import Saver, load
from stages.export.mapped import ShardedTensors, write_safetensors
from stages.launching.runtime import TrainRuntime
from stages.ranks.watchdog import Heartbeat
from stages.training.optimizer import make_optimizer
from stages.training.params import TrainParams
from tests.project import REPO, Project, run_here
from tests.trainings import checkpoint_manifest, train_state, write_checkpoint


def open_saver(asynchronous: bool, **options: Any) -> Saver:
    runtime = load_params(TrainRuntime, "runtime", REPO / "params.yaml")
    return Saver(replace(runtime, async_checkpoint=asynchronous), timeout_minutes=30, **options)


def trained(model: torch.nn.Module, inputs: int) -> torch.optim.Optimizer:
    """An optimizer that has updated a model of so many inputs once."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, inputs)).sum().backward()
    optimizer.step()
    return optimizer


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in list_checkpoints(run))


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path: Path) -> None:
    for step, loss in enumerate([None, 3.0, 2.0, 2.5, None, 2.75], 1):
        write_checkpoint(tmp_path, step, validation_loss=loss)
    retention.prune(tmp_path, 2, print)
    assert steps(tmp_path) == [3, 5, 6]
    write_checkpoint(tmp_path, 7, validation_loss=1.5)
    retention.prune(tmp_path, 2, print)
    assert steps(tmp_path) == [6, 7]


def test_27_other_and_incomplete_directories_neither_count_nor_are_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    (write_checkpoint(tmp_path, 4) / "state.json").unlink()
    (write_checkpoint(tmp_path, 5) / "manifest.json").write_text('{"step": 5}')
    write_checkpoint(tmp_path, 6, validation_loss=0.1).joinpath("state.json").write_text("{} ")
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
    optimizer = trained(model, 2)
    with open_saver(asynchronous=False) as saver:
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
    with open_saver(asynchronous) as saver:
        for step in (1, 2, 3):
            path = directory / step_name(step)
            saver.save(path, model, optimizer, train_state(), {}, checkpoint_manifest(step=step))
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
    for one, other in zip(expected.state_dict().values(), found.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(*(optimizer.state.values() for optimizer in optimizers), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    # The export reads it by the order of its elements.
    parts = {"transposed": {"transposed": (3, 2)}}
    write_safetensors(ShardedTensors(path).load, parts, path, 1, {"transposed": torch.float32})
    assert torch.equal(load_file(path / "model.safetensors")["transposed"], expected.get_buffer("transposed"))


def test_moments_in_8_bits_are_saved_asynchronously(params: TrainParams, mesh: DeviceMesh, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    layer = fully_shard(torch.nn.Linear(64, 64), mesh=mesh)
    optimizer = make_optimizer(layer, replace(params, optimizer="adamw_8bit"))
    layer(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    written = []
    for asynchronous in (False, True):
        path = tmp_path / str(asynchronous) / step_name(1)
        with open_saver(asynchronous) as saver:
            saver.save(path, layer, optimizer, train_state(), {}, checkpoint_manifest())
        written.append([file.read_bytes() for file in sorted(path.rglob("*.distcp"))])
    assert len(written[0]) == 2 and written[0] == written[1]


def test_27_what_is_no_checkpoint_makes_room_for_one(mesh: DeviceMesh, tmp_path: Path) -> None:
    """A part of a checkpoint that somebody has copied; before, the step was never saved, without a word."""
    left = tmp_path / step_name(2)
    left.mkdir()
    (left / "part").touch()
    save_thrice(tmp_path, asynchronous=False)
    assert verify(left).step == 2
    assert [path.name for path in (tmp_path / f"{step_name(2)}.damaged").iterdir()] == ["part"]


def test_a_save_and_a_load_go_on_with_each_tensor_and_each_part_of_a_file(mesh: DeviceMesh, tmp_path: Path) -> None:
    """So the watchdog does not take a slow disk for a rank that hangs."""
    model = torch.nn.Sequential(*(torch.nn.Linear(700, 700, bias=False) for _ in range(3)))  # 2 MB each
    optimizer, heartbeat = trained(model, 700), Heartbeat()
    for asynchronous in (False, True):
        heartbeat.pieces, path = 0, tmp_path / str(asynchronous) / step_name(1)
        with open_saver(asynchronous, goes_on=heartbeat.goes_on) as saver:
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
    problem = rf"rank 0: .* {type(error).__name__}.* set runtime\.async_checkpoint to false"
    with pytest.raises(StageError, match=problem):
        save_thrice(tmp_path, asynchronous=True)


@pytest.mark.parametrize(
    ("error", "is_kept"), [(StageError("the lock is lost"), True), (OSError(errno.ENOSPC, "No space left"), False)]
)
def test_a_save_that_fails_deletes_what_it_wrote_unless_its_lock_is_lost(
    mesh: DeviceMesh, tmp_path: Path, error: Exception, is_kept: bool
) -> None:
    """Another training may write there then. A full disk, which may be full of it, also refuses to confirm the lock."""
    model, written = torch.nn.Linear(3, 2), tmp_path / "step-00000001.tmp"
    written.mkdir()
    one = open_saver(False, confirm_lock=mock.Mock(side_effect=error))
    with pytest.raises(StageError, match=r"the lock is lost|No space left"):
        one.save(tmp_path / written.stem, model, trained(model, 3), train_state(), {}, checkpoint_manifest())
    assert written.is_dir() == is_kept


def test_a_save_that_fails_while_the_training_fails_is_reported(mesh: DeviceMesh, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / step_name(1)

    def train(saver: Saver) -> None:
        model = Odd()
        optimizer = torch.optim.AdamW(model.parameters())
        saver.save(path, model, optimizer, train_state(), {}, checkpoint_manifest())
        raise ZeroDivisionError

    reported: list[str] = []
    with pytest.raises(ZeroDivisionError), open_saver(asynchronous=True, report=reported.append) as saver:
        train(saver)
    assert reported == [f"{path}.tmp: Not a directory"]


def test_a_checkpoint_of_another_format_is_refused_and_not_taken_for_damaged(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    write_checkpoint(tmp_path, 2)
    replace(CheckpointManifest.read(tmp_path / step_name(2)), format=99).write(tmp_path / step_name(2))
    with pytest.raises(UnsupportedFormat, match="has the format 99, this version reads format 2: continue the run"):
        latest_valid(list_checkpoints(tmp_path), pytest.fail)


def test_an_interrupted_deletion_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    path = write_checkpoint(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            retention.delete([path])
    assert steps(tmp_path) == []
    retention.prune(tmp_path, 2, print)
    assert list(tmp_path.glob("step-*")) == []


def test_a_step_may_be_damaged_twice(tmp_path: Path) -> None:
    for _ in range(2):
        retention.quarantine(write_checkpoint(tmp_path, 1))
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


def test_a_checkpoint_that_was_copied_to_another_clone_is_the_result_there(here: Project) -> None:
    assert "contains no checkpoints" in run_here("checkpoints", "list", status=2)
    directory = describe(load_params(TrainParams)).directory
    last = write_checkpoint(directory, 12, run_id=directory.name)
    pointer = Path("outputs/test/run.json")
    RunPointer.to(last).write(pointer)
    copied = last.rename(here / "elsewhere")
    with pytest.raises(StageError, match="does not exist: copy it from where it was trained, set CHECKPOINT_ROOT"):
        resolve("test")
    shutil.copytree(copied, last)
    assert resolve("test")[1].resolve() == last.resolve()
    identity = replace(CheckpointManifest.read(last).identity, code="other")
    replace(CheckpointManifest.read(last), identity=identity).write(last)
    assert f"{last.name} is valid" in run_here("checkpoints", "verify")
    with pytest.raises(StageError, match=r"is not the one that .*run\.json names"):  # valid, but another result
        resolve("test")


@pytest.fixture
def two_runs(here: Project) -> tuple[Path, Path]:
    """An unfinished run with leftovers of a crash, and the current one, which has finished."""
    other = describe(load_params(TrainParams)).directory
    here.set(seed=1)
    current = describe(load_params(TrainParams)).directory
    for run, losses in ((other, dict.fromkeys((2, 4, 6, 8))), (current, {8: 2.0, 10: 2.5, 12: 2.25})):
        for step, loss in losses.items():
            write_checkpoint(run, step, validation_loss=loss, run_id=run.name, total_steps=12)
    RunPointer.to(current / step_name(12)).write(Path("outputs/test/run.json"))
    for name in ("step-00000009.damaged", "step-00000010.tmp"):
        (other / name).mkdir()
    return other, current


def test_checkpoints_are_listed_and_verified(two_runs: tuple[Path, Path]) -> None:
    other, current = two_runs
    tomorrow = time.time() + 86_400  # where the clock of a file server is ahead
    os.utime(current / step_name(12), (tomorrow, tomorrow))

    output = run_here("checkpoints", "list")
    assert "-1 day" not in output
    assert len(output.splitlines()) == 1 + 4 + 3 + 2
    assert "damaged, in quarantine" in output and "left by a crash" in output
    assert re.search(r"00008 .* 2.0000  complete, best, current run\n", output)
    assert re.search(r"00012 .* 2.2500  complete, current run, in run.json\n", output)
    assert output.count("current run") == 3 and output.count("in run.json") == 1
    Path("data/model.json").unlink()
    assert "current run" not in run_here("checkpoints", "list"), "which it is depends on the model"
    assert "would be freed" in run_here("checkpoints", "prune"), "as where the disk is too full to make the data again"
    assert "data/model.json" in run_here("checkpoints", "prune", "--other-runs", status=2)

    assert run_here("checkpoints", "verify").count("is valid") == 7
    (other / step_name(8) / "state.json").write_text("[]")
    assert "is damaged" in run_here("checkpoints", "verify", status=2)
    replace(CheckpointManifest.read(other / step_name(6)), format=1).write(other / step_name(6))
    assert re.search(r"00006 .*  of another version\n", run_here("checkpoints", "list")), "it is not incomplete"


def test_checkpoints_are_pruned_where_nothing_needs_them(here: Project, two_runs: tuple[Path, Path]) -> None:
    other, current = two_runs
    output = ""

    def pruned(*options: str) -> list[list[int]]:
        nonlocal output
        output = run_here("checkpoints", "prune", *options)
        return [steps(other), steps(current)]

    with writer_lock(other, print):
        assert pruned("--other-runs", "--yes") == [[2, 4, 6, 8], [8, 12]], "the last one, and the best"
    assert f"{other.name} is being trained: skipped" in output and output.endswith("freed\n")
    assert len(retention.list_leftovers(other)) == 2
    for options in (["--other-runs"], []):
        assert pruned(*options) == [[2, 4, 6, 8], [8, 12]]
        assert "would delete" in output and f"checkpoints {' '.join(['prune', *options, '--yes'])}`" in output
    assert len(retention.list_leftovers(other)) == 2
    assert pruned("--yes") == [[6, 8], [8, 12]]
    assert retention.list_leftovers(other) == []

    (other / step_name(8) / "state.json").write_text("[]")  # of the same size
    assert pruned("--yes") == [[6, 8], [8, 12]]
    # A link to a run leads to what may be of another experiment.
    elsewhere = other.rename(here / "elsewhere")
    other.symlink_to(elsewhere)
    pruned("--other-runs", "--yes")
    assert f"{other.name} is a link: skipped" in output and 6 in steps(elsewhere)
    other.unlink()
    elsewhere.rename(other)
    assert pruned("--other-runs", "--yes") == [[], [8, 12]]


def test_16_a_signal_after_the_lock_was_released_is_no_error(tmp_path: Path) -> None:
    with writer_lock(tmp_path, print) as set_status:
        set_status("running")
    set_status("stopping")


def test_the_size_of_a_directory_is_without_what_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_bytes(b"12345")
    (tmp_path / "deleted").symlink_to("nowhere")  # as a file that was there when it was listed
    (tmp_path / "step").mkdir()

    def scandir(path: Any, before: Any = os.scandir) -> Any:
        if Path(path).name == "step":
            Path(path).rmdir()
        return before(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert size_of(tmp_path) == 5
