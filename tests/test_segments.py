"""Parts of a run are trained again and compared; a forged checkpoint is found."""

import json
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from stages.base import publish
from stages.base.errors import StageError
from stages.base.files import FileEntry
from stages.base.identity import Adoption
from stages.base.params_file import load_params
from stages.checkpointing.layout import CheckpointManifest, step_name, verify
from stages.checkpointing.run import packages
from stages.checkpointing.state import Place
from stages.launching import segments as segments_module
from stages.launching.place import device, differences
from stages.launching.runtime import TrainRuntime
from stages.launching.segments import Segment, find
from tests.project import REPO, Project, flip_bit
from tests.ranks import Ranks
from tests.trainings import write_checkpoint

SEGMENTS = ("python", "-m", "stages.lineage", "segments")
CHECKPOINTS = ("python", "-m", "stages.checkpoints")


def segments(project: Project, *arguments: str, status: int = 0) -> list[str]:
    output = project.run(*SEGMENTS, *arguments, status=status)
    return [line for line in output.splitlines() if re.match("equal|different|unknown|error", line)]


@contextmanager
def forging(checkpoint: Path) -> Iterator[None]:
    """Have the manifest fit again after a file was changed: what somebody could do who can write there."""
    before = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    yield
    manifest = CheckpointManifest.read(checkpoint)
    files = {name: FileEntry.of(checkpoint / name) for name in manifest.files}
    replace(manifest, files=files).write(checkpoint)
    verify(checkpoint)
    assert any(path.read_bytes() != content for path, content in before.items())


def change_weight(checkpoint: Path) -> None:
    path = next((checkpoint / "model").glob("*.distcp"))
    flip_bit(path, path.stat().st_size // 2)


def swap_tensors(checkpoint: Path) -> None:
    """The bytes of all tensors stay; two of them have changed places in the list of tensors."""
    path = checkpoint / "model/.metadata"
    metadata = pickle.loads(path.read_bytes())
    one, other = (
        [index for index in metadata.storage_data if index.fqn == f"model.layers.{layer}.self_attn.q_proj.weight"]
        for layer in (0, 1)
    )
    assert len(one) == len(other) > 0
    for mine, theirs in zip(one, other, strict=True):
        data = metadata.storage_data
        data[mine], data[theirs] = data[theirs], data[mine]
    path.write_bytes(pickle.dumps(metadata))


def name_other_hardware(checkpoint: Path) -> None:
    path = checkpoint / "state.json"
    content = json.loads(path.read_text())
    content["place"]["device"] = "NVIDIA H100"
    path.write_text(json.dumps(content))


@pytest.mark.slow
def test_each_part_of_a_run_gives_the_same_bits_again_and_a_forged_one_does_not(
    training: Project, ranks: Ranks
) -> None:
    training.set(max_steps=8, runtime={"ckpt_freq": 3, "keep_checkpoints": 9})
    ranks.run(training, "kill rank 1 at step 5", status=-9)
    ranks.run(training)
    root = training.checkpoints()
    before = {path: path.read_bytes() for path in root.rglob("manifest.json")}
    assert segments(training) == [
        f"equal      {start} to {step_name(end)}, trained again"
        for start, end in (("start", 3), (step_name(3), 6), (step_name(6), 8))
    ]
    assert {path: path.read_bytes() for path in root.rglob("manifest.json")} == before
    assert not (root.parent / ".again").exists()
    assert not (training / "outputs/history.tsv").exists(), "outs of DVC stay as they are"

    shutil.copytree(root, training / "kept")
    for change, name in {
        change_weight: "result",
        swap_tensors: "places of the model's tensors",
    }.items():
        with forging(root / step_name(3)):
            change(root / step_name(3))
        found, error = segments(training, "--step", "3", status=2)
        assert re.fullmatch(
            rf"different  start to step-00000003, trained again: {name} \S+ in the checkpoint, \S+ here", found
        )
        assert error == "error: 1 of these differ from the checkpoints"
        (found, _) = segments(training, "--step", "6", status=2)  # it was not trained from these weights
        assert found.startswith("different  step-00000003 to step-00000006, trained again: result ")
        shutil.rmtree(root)
        shutil.copytree(training / "kept", root)

    with forging(root / step_name(8)):
        change_weight(root / step_name(8))
        name_other_hardware(root / step_name(8))
    assert segments(training, "--step", "8") == [
        "unknown    step-00000006 to step-00000008, trained again: other bits here, but device: 'NVIDIA H100' there, "
        f"'{device()}' here"
    ]
    (root / step_name(9)).mkdir()
    assert "9/manifest.json is missing: copy all" in training.run(*CHECKPOINTS, "verify", status=2)
    (root / step_name(9)).rmdir()
    (root / step_name(8) / "state.json").write_text("{}")
    found, _ = segments(training, "--step", "8", status=2)
    assert found.startswith("different  step-00000006 to step-00000008: ") and "state.json is damaged" in found

    assert "no part ends at step 7; the checkpoints that are kept end parts at 3, 6, 8" in str(
        segments(training, "--step", "7", status=2)
    )
    assert "0 is not a positive number" in training.run(*SEGMENTS, "--step", "0", status=2)
    (root.parent / ".again").mkdir()
    with publish.lock(root.parent / ".again"):
        assert ".again" not in training.run(*CHECKPOINTS, "prune")
    assert "deleting outputs/test/checkpoints/.again" in training.run(*CHECKPOINTS, "prune", "--yes")
    assert not (root.parent / ".again").exists()
    training.set(seed=5)
    (error,) = segments(training, status=2)
    assert "has no checkpoints to compare: params.yaml, data, model or code are not those of a run" in error


PLACE = Place("CPU", ranks=2, nodes=1, commit="abc", threads=1, attention="varlen")


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        ({}, None),
        ({"place": PLACE}, None),
        ({"place": replace(PLACE, device="NVIDIA H100")}, "device: 'NVIDIA H100' there"),
        ({"place": replace(PLACE, nodes=2)}, "nodes: 2 there, 1 here"),
        ({"place": replace(PLACE, attention="varlen FA3")}, "attention: 'varlen FA3' there, 'varlen' here"),
        ({"place": replace(PLACE, threads=None)}, "threads: null there, 1 here"),
        ({"place": replace(PLACE, variables={"MKL_CBWR": "AVX2"})}, "variables.MKL_CBWR: 'AVX2' there, nothing here"),
        ({"place": PLACE, "packages": {"torch": "2.0"}}, "packages.torch: '2.0' there"),
        ({"place": replace(PLACE, since=3)}, None),  # it went on at the checkpoint where the part begins
        ({"place": replace(PLACE, since=4)}, "it was interrupted, and the checkpoint between"),
        ({"place": replace(PLACE, since=1), "start": None}, "it was interrupted, and the checkpoint between"),
        ({"place": PLACE, "start": None}, None),
    ],
)
def test_what_may_give_other_bits_is_named(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], obstacle: str | None
) -> None:
    given = {"place": None, "packages": packages({}), "start": 3, **change}
    states = {6: mock.Mock(place=given["place"])}
    manifests = {3: mock.Mock(step=3), 6: mock.Mock(packages=given["packages"])}
    monkeypatch.setattr(segments_module.TrainState, "of", lambda path: states[int(path.name[5:])])
    monkeypatch.setattr(segments_module.CheckpointManifest, "read", lambda path: manifests[int(path.name[5:])])
    segment = Segment(given["start"] and Path(step_name(3)), Path(step_name(6)))
    found = segments_module.find_obstacle(mock.Mock(), segment, PLACE)
    assert found is None if obstacle is None else re.search(obstacle, found or "")


def test_another_torchao_gives_other_bits_where_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("stages.checkpointing.run.version", lambda name: "2")
    for params in ({"optimizer": "adamw_8bit"}, {"precision": "fp8"}):
        manifest = mock.Mock(identity=mock.Mock(params=params), packages={**packages(params), "torchao": "1"})
        assert differences(manifest, PLACE, PLACE) == ["packages.torchao: '1' there, '2' here"]
    assert "torchao" not in packages({"optimizer": "adamw", "precision": "bf16"})


def test_what_another_run_has_trained_is_not_trained_again(tmp_path: Path) -> None:
    for step, origin in ((2, 2), (4, 4), (6, 4), (8, 4)):
        write_checkpoint(tmp_path, step, adopted=Adoption("0123456789abcdef", origin, [], None))
    run = mock.Mock(directory=tmp_path)
    expected = [f"{step_name(4)} to {step_name(6)}", f"{step_name(6)} to {step_name(8)}"]
    assert [segment.name for segment in find(run, None)] == expected
    for step in (2, 4):
        shutil.rmtree(tmp_path / step_name(step))
    assert [segment.name for segment in find(run, None)] == expected[1:]


@pytest.mark.parametrize(("place", "asked"), [(Place("cpu", 4, 1, None), 4), (Place("cpu", 16, 2, None), 3), (None, 3)])
def test_a_part_has_the_ranks_of_its_training_unless_these_were_on_several_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place | None, asked: int
) -> None:
    runtime = replace(load_params(TrainRuntime, "runtime", REPO / "params.yaml"), nproc_per_node=3)
    monkeypatch.setattr(segments_module.TrainState, "of", lambda path: mock.Mock(place=place))
    monkeypatch.setattr(segments_module.CheckpointManifest, "read", lambda path: mock.Mock(step=3))
    monkeypatch.setattr(segments_module, "begin", mock.Mock())
    counted = mock.Mock(side_effect=StageError("of the test"))
    monkeypatch.setattr(segments_module.torchrun, "count_local_ranks", counted)
    with pytest.raises(StageError, match="of the test"):
        segments_module.train_again(mock.Mock(directory=tmp_path / "run"), runtime, Segment(None, Path(step_name(3))))
    counted.assert_called_once_with(asked)
