"""Files that somebody else has made, with digests that fit: they run nothing, and lead to no file elsewhere."""

import dataclasses
import functools
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import DeviceMesh

from stages.base.dataset import Dataset, Shard
from stages.base.errors import StageError
from stages.base.files import DamagedFile, FileEntry
from stages.base.history import HISTORY, SPEED
from stages.base.names import is_utf8, printable
from stages.base.params_file import load_params
from stages.checkpointing import metadata, retention, saver
from stages.checkpointing.layout import CheckpointManifest, verify
from stages.checkpointing.pointer import RunPointer
from stages.checkpointing.state import TrainState
from stages.export.mapped import ShardedTensors
from stages.launching.runtime import TrainRuntime
from stages.model.license import ModelLicense
from stages.splits import manifests as splits
from stages.work import arrow
from tests.project import REPO
from tests.trainings import checkpoint_manifest, train_state

ENTRY = FileEntry(1, "0" * 64)


def write_split(path: Path, name: str) -> None:
    splits.write_manifest(path / "split_00.jsonl", [splits.RawFile(f"{name}/a.txt", 1, "0" * 64)])


def read_split(path: Path) -> None:
    splits.read_manifest(path / "split_00.jsonl", FileEntry.of(path / "split_00.jsonl").sha256)


MANIFESTS: dict[str, tuple[Callable[[Path, str], None], Callable[[Path], Any]]] = {
    "checkpoint": (lambda path, name: checkpoint_manifest(files={name: ENTRY}).write(path), CheckpointManifest.read),
    "license": (
        lambda path, name: ModelLicense({}, None, {name: ENTRY}).write(path / "license.json"),
        lambda path: ModelLicense.read(path / "license.json"),
    ),
    "dataset": (
        lambda path, name: Dataset({}, [Shard(name, 1, "0" * 64)]).write(path),
        lambda path: Dataset.read(path, "extract"),
    ),
    "split": (write_split, read_split),
}
"""What writes each of them with a name in it, and what reads it."""


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_names_no_file_elsewhere(kind: str, tmp_path: Path) -> None:
    write, read = MANIFESTS[kind]
    for name in ("../a", "a/../../a", "/a", "a\0b", "", "."):
        write(tmp_path, name)
        with pytest.raises(StageError, match=r"relative path|the name of a file|names no raw file|not the keys"):
            read(tmp_path)


def test_a_line_of_a_split_that_is_none_is_said(tmp_path: Path) -> None:
    path = tmp_path / "split_00.jsonl"
    more = '{"path": "a.txt", "size": 1, "digest": "", "more": 1}'
    for line in ("{}", "[]", "{", '{"path": 1}', more, '{"path": "a.exe", "size": 1, "digest": ""}'):
        path.write_text(line)
        with pytest.raises(DamagedFile, match="a line of it names no raw file: run `dvc repro -f -s organize`"):
            splits.read_manifest(path, FileEntry.of(path).sha256)


def test_a_name_is_one_line() -> None:
    assert printable("café 日本.txt") == "café 日本.txt"
    assert printable("a\nerror: b\r\x1b[2J\u202e\udce9\ud800") == r"a\nerror: b\r\x1b[2J\u202e\xe9\ud800"
    assert is_utf8("a\n") and not is_utf8("\udce9")


class Command:
    """What unpickles to the result of a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


class Trained:
    """A tiny model, and its optimizer."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def load(self, checkpoint: Path) -> None:
        saver.load(checkpoint, self.model, self.optimizer)


@pytest.fixture
def checkpoint(mesh: DeviceMesh, tmp_path: Path) -> Path:
    """A checkpoint of a tiny model at step 1."""
    trained = Trained()
    trained.model(torch.ones(1, 2)).sum().backward()
    trained.optimizer.step()
    runtime = load_params(TrainRuntime, "runtime", REPO / "params.yaml")
    path = tmp_path / "0123456789abcdef" / "step-00000001"
    with saver.Saver(dataclasses.replace(runtime, async_checkpoint=False), timeout_minutes=30) as one:
        one.save(
            path, trained.model, trained.optimizer, train_state(), {HISTORY: "", SPEED: ""},
            checkpoint_manifest(),
        )  # fmt: skip
    return path


def reseal(checkpoint: Path) -> None:
    """Let the manifest have the digests of the files as they are now."""
    files = {name: FileEntry.of(checkpoint / name) for name in CheckpointManifest.read(checkpoint).files}
    dataclasses.replace(CheckpointManifest.read(checkpoint), files=files).write(checkpoint)
    verify(checkpoint)


def with_an_object(listed: Any, directory: Path) -> Any:
    """Which torch itself unpickles, whatever it is."""
    buffer = io.BytesIO()
    torch.save(Command(directory / "executed"), buffer)
    (directory / "__9_0.distcp").write_bytes(buffer.getvalue())
    listed.state_dict_metadata["bias"] = BytesStorageMetadata()
    listed.storage_data[MetadataIndex("bias")] = _StorageInfo("__9_0.distcp", 0, len(buffer.getvalue()))
    return listed


def with_places(**values: Any) -> Callable[[Any, Path], Any]:
    """What changes the places of all tensors."""

    def change(listed: Any, directory: Path) -> Any:
        for index, place in listed.storage_data.items():
            listed.storage_data[index] = dataclasses.replace(place, **values)
        return listed

    return change


LISTS: dict[str, Callable[[Any, Path], Any]] = {
    "a command": lambda listed, directory: Command(directory / "executed"),
    "an object": with_an_object,
    "a file elsewhere": with_places(relative_path="../model/__0_0.distcp"),
    "a negative offset": with_places(offset=-1),
    "nothing": lambda listed, directory: None,
}


@pytest.mark.parametrize("kind", LISTS)
def test_the_list_of_tensors_runs_nothing(kind: str, checkpoint: Path) -> None:
    path = checkpoint / "model/.metadata"
    path.write_bytes(pickle.dumps(LISTS[kind](pickle.loads(path.read_bytes()), path.parent)))
    reseal(checkpoint)
    for read in (ShardedTensors, Trained().load):  # as `consolidate`, and as a resume
        with pytest.raises(StageError, match=r"\.metadata is damaged or was changed: torch .* does not write it so"):
            read(checkpoint)
    assert not (path.parent / "executed").exists()


def test_what_the_list_of_tensors_has_too_much_is_not_printed(checkpoint: Path) -> None:
    path = checkpoint / "model/.metadata"
    listed = pickle.loads(path.read_bytes())
    listed.state_dict_metadata["bias"] = functools.reduce(lambda part, _: (part,) * 10, range(7), "lol")
    path.write_bytes(pickle.dumps(listed))
    with pytest.raises(DamagedFile, match=r"torch .* does not write it so \(TypeError: tuple is no tensor\)"):
        metadata.read(path.parent)


def test_the_list_of_tensors_is_read_as_torch_writes_it(checkpoint: Path) -> None:
    """Of the classes: the others, of torch 2.15, differ in their state only. Python 3.13 has another name of a path."""
    for directory in (checkpoint / "model", checkpoint / "optimizer"):
        found, expected = metadata.read(directory), dcp.FileSystemReader(directory).read_metadata()
        assert found.state_dict_metadata == expected.state_dict_metadata
        assert found.storage_data == expected.storage_data
        assert found.planner_data == expected.planner_data
        content = (directory / ".metadata").read_bytes()
        old, new = (b"\x8c" + bytes([len(name)]) + name for name in (b"pathlib", b"pathlib._local"))
        assert old in content or new in content
        (directory / ".metadata").write_bytes(content.replace(old, new))
    Trained().load(checkpoint)


def test_a_manifest_lists_what_is_read(checkpoint: Path) -> None:
    dataclasses.replace(CheckpointManifest.read(checkpoint), files={}).write(checkpoint)
    with pytest.raises(DamagedFile, match=r"manifest\.json is damaged or was changed: it does not list state\.json"):
        verify(checkpoint, names=["state.json"])


def test_a_file_without_end_is_not_read(checkpoint: Path) -> None:
    for name in ("state.json", "manifest.json"):
        os.truncate(checkpoint / name, 2 << 30)
    with pytest.raises(DamagedFile, match=r"manifest\.json has 2,147,483,648 bytes, and at most 134,217,728 "):
        verify(checkpoint)
    with pytest.raises(StageError, match=r"state\.json has 2,147,483,648 bytes, and at most 134,217,728 are read"):
        TrainState.of(checkpoint)


def test_a_pipe_in_place_of_a_file_is_no_wait(checkpoint: Path) -> None:
    for name, problem in (("state.json", "is missing"), ("manifest.json", "is no regular file: put a good copy")):
        (checkpoint / name).unlink()
        os.mkfifo(checkpoint / name)
        with pytest.raises(DamagedFile, match=f"{name} {problem}"):
            verify(checkpoint)


def test_a_shard_that_is_no_arrow_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(b"no stream of Arrow" * 100)
    with pytest.raises(DamagedFile, match=r"shard is damaged or was changed: it is no stream of Arrow"):
        arrow.batch_offsets(tmp_path / "shard")


def test_a_checkpoint_under_the_name_of_another_step_is_refused(checkpoint: Path) -> None:
    with pytest.raises(DamagedFile, match=r"manifest\.json is damaged or was changed: it is of step 1"):
        verify(checkpoint.rename(checkpoint.with_name("step-00000002")))
    verify(checkpoint.with_name("step-00000002").rename(checkpoint.with_name("a copy")))


@pytest.mark.parametrize(("key", "value"), [("run_id", "../../../elsewhere"), ("checkpoint", "../step-00000001")])
def test_the_pointer_leads_into_the_directory_of_the_checkpoints(
    key: str, value: str, checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    RunPointer.to(checkpoint).write(path)
    assert RunPointer.read(path) == RunPointer.to(checkpoint)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(StageError, match=rf"run\.json is not valid \({key}: "):
        RunPointer.read(path)


def test_a_link_is_deleted_and_not_what_it_leads_to(checkpoint: Path, tmp_path: Path) -> None:
    run = checkpoint.parent
    checkpoint.rename(tmp_path / "elsewhere")
    for name in ("step-00000001", "step-00000002.damaged"):
        (run / name).symlink_to(tmp_path / "elsewhere")
    (run / "step-00000003.tmp").write_text("a file")
    retention.delete([run / "step-00000001", *retention.list_leftovers(run)])
    assert not list(run.glob("step-*"))
    assert (tmp_path / "elsewhere/manifest.json").is_file()
