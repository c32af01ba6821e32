"""The tests of faults can fail: what they compare differs where one byte does."""

import json
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

from stages.base.errors import StageError
from stages.base.record import FileEntry
from stages.checkpointing.layout import TensorEntry, step_name
from tests.project import Project, flip_bit, wait_for
from tests.random_faults import began_again, delete_empty, digests, find_lost, find_processes, role, table
from tests.trainings import checkpoint_manifest, published, result

pytestmark = pytest.mark.slow  # of a tool that CI does not run


def make_results(project: Project) -> None:
    for name in ("data/splits", "data/corpus", "data/tokens", "outputs/test/model"):
        (project / name).mkdir(parents=True, exist_ok=True)
        (project / name / "file").write_text(name)
    for name in ("data/model.json", "outputs/history.tsv"):
        (project / name).write_text(name)


@pytest.mark.parametrize("change", ["flip", "add", "remove"])
def test_a_result_that_differs_is_lost(tmp_path: Path, change: str) -> None:
    project = Project(tmp_path)
    make_results(project)
    reference = digests(project)
    assert find_lost(project, reference) == []
    file = project / "outputs/test/model/file"
    if change == "flip":
        flip_bit(file, 3)
    elif change == "add":
        (file.parent / "more").touch()
    else:
        file.unlink()
    (lost,) = find_lost(project, reference)
    assert lost.startswith("outputs/test/model/")


def test_a_checkpoint_that_is_damaged_is_lost(tmp_path: Path) -> None:
    project = Project(tmp_path)
    make_results(project)
    checkpoint = project / "outputs/test/checkpoints/0123456789abcdef" / step_name(1)
    checkpoint.mkdir(parents=True)
    weights = checkpoint / "weights"
    weights.write_bytes(bytes(100))
    checkpoint_manifest(files={weights.name: FileEntry.of(weights)}).write(checkpoint)
    reference = digests(project)
    assert find_lost(project, reference) == []
    flip_bit(weights, 50)
    (lost,) = find_lost(project, reference)
    assert "is damaged" in lost


@pytest.mark.parametrize("name", [step_name(2), f"{step_name(2)}.damaged"])
def test_what_an_interrupted_save_leaves_is_lost(tmp_path: Path, name: str) -> None:
    project = Project(tmp_path)
    make_results(project)
    (project / "outputs/test/checkpoints/0123456789abcdef" / name).mkdir(parents=True)
    (lost,) = find_lost(project, digests(project))
    assert lost.endswith(f"{name} is left")


def test_the_last_checkpoint_is_a_result(tmp_path: Path) -> None:
    project = Project(tmp_path)
    checkpoint = project / "outputs/test/checkpoints/0123456789abcdef" / step_name(9)
    checkpoint.mkdir(parents=True)
    checkpoint_manifest(step=9).write(checkpoint)
    reference = digests(project)
    checkpoint_manifest(step=9, tensors={"weight": TensorEntry([2], "float32")}).write(checkpoint)
    assert find_lost(project, reference) == ["the last checkpoint"]


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


def test_a_process_that_is_left_is_found(tmp_path: Path) -> None:
    project = Project(tmp_path)
    process = project.popen("sleep", "60")
    try:
        assert find_processes(project) == ["['sleep', '60'] is left"]
    finally:
        process.kill()
        process.communicate()
    assert find_processes(project) == []


@pytest.mark.parametrize("name", ["model/__0_0.distcp", "optimizer/__1_0.distcp", "history.tsv"])
def test_the_result_of_a_training_differs_with_any_of_its_bits(tmp_path: Path, name: str) -> None:
    project = Project(tmp_path)
    checkpoint = project / "outputs/test/checkpoints/0123456789abcdef" / step_name(12)
    files = [checkpoint / each for each in ("model/__0_0.distcp", "optimizer/__1_0.distcp", "history.tsv")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(100))
    entries = {str(file.relative_to(checkpoint)): FileEntry.of(file) for file in files}
    checkpoint_manifest(files=entries, step=12).write(checkpoint)
    reference = result(project)
    assert published(project) == [step_name(12)]
    flip_bit(checkpoint / name, 50)
    assert result(project) != reference
    with pytest.raises(StageError, match="is damaged"):
        published(project)


@pytest.mark.parametrize(("name", "environment"), [("pack", {}), ("rank", {"RANK": "1"})])
def test_a_process_is_named_by_what_it_does(tmp_path: Path, name: str, environment: dict[str, str]) -> None:
    module = "train" if environment else name
    process = Project(tmp_path).popen(
        "python", "-c", "import time; time.sleep(60)", "-m", f"stages.{module}", **environment
    )
    try:
        wait_for(lambda: role(psutil.Process(process.pid)) == name)
    finally:
        process.kill()
        process.communicate()


def test_the_table_counts_each_signal() -> None:
    injected = Counter({("rank", signal.SIGKILL.name): 3, ("dvc", signal.SIGTERM.name): 1})
    shown = table(injected, Counter({("rank", "SIGKILL"): 1}))
    assert "| rank | SIGKILL | 3 | 2 | 1 |" in shown
    assert shown.endswith("| all | | 4 | 3 | 1 |")
