"""The tests of faults can fail: what they compare differs where one byte does."""

import dataclasses
import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stages.base.errors import StageError
from stages.base.files import FileEntry
from stages.checkpointing.layout import CheckpointManifest, TensorEntry, step_name
from tests.project import Project, flip_bit, wait_for
from tests.random_faults import began_again, delete_empty, digests, find_lost, find_processes, role, table
from tests.trainings import checkpoint_manifest, published, result

pytestmark = pytest.mark.slow  # of a tool that CI does not run


RUN = "outputs/test/checkpoints/0123456789abcdef"
SHARDS = ("model/__0_0.distcp", "optimizer/__1_0.distcp", "history.tsv")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project with results, among them a checkpoint."""
    project = Project(tmp_path / "project")
    for name in ("data/splits", "data/corpus", "data/tokens", "outputs/test/model"):
        (project / name).mkdir(parents=True)
        (project / name / "file").write_text(name)
    for name in ("data/model.json", "outputs/history.tsv"):
        (project / name).write_text(name)
    checkpoint = project / RUN / step_name(12)
    for name in SHARDS:
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(bytes(100))
    entries = {name: FileEntry.of(checkpoint / name) for name in SHARDS}
    checkpoint_manifest(files=entries, step=12).write(checkpoint)
    return project


def flip(name: str) -> Callable[[Project], None]:
    return lambda project: flip_bit(project / name, 3)


def other_tensors(project: Project) -> None:
    tensors = {"weight": TensorEntry([2], "float32")}
    manifest = CheckpointManifest.read(project / RUN / step_name(12))
    dataclasses.replace(manifest, tensors=tensors).write(project / RUN / step_name(12))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (flip("outputs/test/model/file"), "outputs/test/model/file"),
        (lambda project: (project / "outputs/test/model/more").touch(), "outputs/test/model/more"),
        (lambda project: (project / "outputs/test/model/file").unlink(), "outputs/test/model/file"),
        (flip(f"{RUN}/{step_name(12)}/{SHARDS[0]}"), "is damaged"),
        (other_tensors, "the last checkpoint"),
        (lambda project: (project / RUN / step_name(13)).mkdir(), f"{step_name(13)} is left"),
        (lambda project: (project / RUN / f"{step_name(2)}.damaged").mkdir(), f"{step_name(2)}.damaged is left"),
    ],
    ids=["changed", "added", "removed", "damaged checkpoint", "other checkpoint", "incomplete save", "damaged save"],
)
def test_a_result_that_differs_is_lost(project: Project, change: Callable[[Project], None], expected: str) -> None:
    reference = digests(project)
    assert find_lost(project, reference) == []
    change(project)
    (lost,) = find_lost(project, reference)
    assert expected in lost


@pytest.mark.parametrize("name", SHARDS)
def test_the_result_of_a_training_differs_with_any_of_its_bits(project: Project, name: str) -> None:
    reference = result(project)
    assert published(project) == [step_name(12)]
    flip_bit(project / RUN / step_name(12) / name, 50)
    assert result(project) != reference
    with pytest.raises(StageError, match="is damaged"):
        published(project)


def test_only_what_is_empty_is_deleted_of_dvc(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (tmp_path / ".dvc/tmp").mkdir(parents=True)
    (project / "dvc.lock").write_text("stages: {}")
    (project / ".dvc/tmp/rwlock").touch()
    assert delete_empty(project) == [".dvc/tmp/rwlock"]
    assert delete_empty(project) == []


@pytest.mark.parametrize(
    ("step", "launches", "is_lost"), [(5, 1, True), (5, 2, False), (9, 1, False), (None, 1, False)]
)
def test_a_training_that_begins_again_is_lost(tmp_path: Path, step: int | None, launches: int, is_lost: bool) -> None:
    project = Project(tmp_path)
    (project / "outputs").mkdir()
    (project / "outputs/train_metrics.json").write_text(json.dumps({"cost": {"launches": launches}}))
    assert bool(began_again(project, step and checkpoint_manifest(step=step))) == is_lost


@pytest.mark.parametrize(("name", "environment"), [("pack", {}), ("rank", {"RANK": "1"})])
def test_a_process_that_is_left_is_found_and_named_by_what_it_does(
    tmp_path: Path, name: str, environment: dict[str, str]
) -> None:
    project, module = Project(tmp_path), f"stages.{'train' if environment else name}"
    process = project.popen("python", "-c", "import time; time.sleep(60)", "-m", module, **environment)
    try:
        wait_for(lambda: role(psutil.Process(process.pid)) == name)
        (left,) = find_processes(project)
        assert left.endswith(f"'-m', '{module}'] is left")
    finally:
        process.kill()
        process.communicate()
    assert find_processes(project) == []


def test_the_table_counts_each_signal() -> None:
    injected = Counter({("rank", signal.SIGKILL.name): 3, ("dvc", signal.SIGTERM.name): 1})
    shown = table(injected, Counter({("rank", "SIGKILL"): 1}))
    assert "| rank | SIGKILL | 3 | 2 | 1 |" in shown
    assert shown.endswith("| all | | 4 | 3 | 1 |")
