"""Parts of a run are trained again and compared; a forged checkpoint is found."""

import dataclasses
import re
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

from stages.base.errors import StageError
from stages.base.params_file import load_params
from stages.base.record import FileEntry
from stages.checkpointing.layout import CheckpointManifest, step_name
from stages.checkpointing.state import Place
from stages.launching import segments as segments_module
from stages.launching.runtime import TrainRuntime
from stages.launching.segments import Segment, choose
from tests.project import REPO, Project
from tests.ranks import Ranks


def segments(project: Project, *arguments: str, status: int = 0) -> list[str]:
    output = project.run("python", "-m", "stages.lineage", "segments", *arguments, status=status)
    return [line for line in output.splitlines() if re.match("equal|different|missing|error", line)]


def forge(checkpoint: Path) -> None:
    """Change one weight, and have the manifest fit again: what somebody could do who can write there."""
    path = next((checkpoint / "model").glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    manifest = CheckpointManifest.read(checkpoint)
    name = str(path.relative_to(checkpoint))
    dataclasses.replace(manifest, files={**manifest.files, name: FileEntry.of(path)}).write(checkpoint)


@pytest.mark.slow
def test_each_part_of_a_run_gives_the_same_bits_again_and_a_forged_one_does_not(
    training: Project, ranks: Ranks
) -> None:
    training.set(max_steps=8, runtime={"ckpt_freq": 3, "keep_checkpoints": 9})
    ranks.run(training, "kill rank 1 at step 5", status=-9)
    ranks.run(training)
    root = training.checkpoints()
    before = {path: path.read_bytes() for path in root.rglob("manifest.json")}
    manifests = [CheckpointManifest.read(root / step_name(step)) for step in (3, 6, 8)]
    assert manifests[0].previous is None
    for first, second in pairwise(manifests):  # also across the kill
        assert second.previous
        assert (second.previous.step, second.previous.result_sha256) == (first.step, first.result_sha256)
    assert segments(training) == [
        f"equal      {start} to {step_name(end)}, trained again"
        for start, end in (("start", 3), (step_name(3), 6), (step_name(6), 8))
    ]
    assert {path: path.read_bytes() for path in root.rglob("manifest.json")} == before
    assert not (root.parent / ".again").exists()
    assert not (training / "outputs/history.tsv").exists(), "outs of DVC stay as they are"

    forge(root / step_name(6))
    first, second, third, error = segments(training, status=2)
    assert first.startswith("equal      start to step-00000003")
    assert second.startswith("different  step-00000003 to step-00000006, trained again: result")
    assert third == "different  step-00000006 to step-00000008: step-00000008 was trained from another one"
    assert error == "error: 2 of these differ from the checkpoints"
    training.set(seed=5)
    (error,) = segments(training, status=2)
    assert "has no checkpoints to compare: params.yaml, data, model or code are not those of a run" in error


def test_parts_are_chosen_by_a_seed_and_stay_in_order() -> None:
    found = [Segment(None, Path(step_name(step))) for step in range(20)]
    chosen = choose(found, 5, seed=1)
    assert len({*chosen}) == 5
    assert chosen == sorted(chosen, key=lambda segment: segment.end)
    assert chosen == choose(found, 5, seed=1) != choose(found, 5, seed=2)
    assert choose(found, 50, seed=1) == found


@pytest.mark.parametrize(("place", "asked"), [(Place("cpu", 4, 1, None), 4), (Place("cpu", 16, 2, None), 3), (None, 3)])
def test_a_part_has_the_ranks_of_its_training_unless_these_were_on_several_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Place | None, asked: int
) -> None:
    runtime = dataclasses.replace(load_params(TrainRuntime, "runtime", REPO / "params.yaml"), nproc_per_node=3)
    monkeypatch.setattr(segments_module, "trained_at", lambda checkpoint: place)
    monkeypatch.setattr(segments_module.layout, "verify", lambda checkpoint: mock.Mock(step=3))
    monkeypatch.setattr(segments_module, "begin", mock.Mock())
    counted = mock.Mock(side_effect=StageError("of the test"))
    monkeypatch.setattr(segments_module.torchrun, "count_local_ranks", counted)
    with pytest.raises(StageError, match="of the test"):
        segments_module.train_again(mock.Mock(directory=tmp_path / "run"), runtime, Segment(None, Path(step_name(3))))
    counted.assert_called_once_with(asked)
