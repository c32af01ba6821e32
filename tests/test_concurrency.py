"""Two runs of one stage at once, in one working copy: one waits, and the results are those of a single run."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import yaml

from stages.base import publish
from tests.pipeline import STAGES
from tests.project import REPO, Project, run_python

PIPELINE = yaml.safe_load((REPO / "dvc.yaml").read_text())["stages"]


def outputs_of(project: Project, stage: str) -> dict[str, bytes]:
    """The bytes of all that a stage writes, by path, without what contains times by the clock."""
    declared = [*PIPELINE[stage].get("outs", []), *PIPELINE[stage].get("metrics", [])]
    paths = [project / path.replace("${experiment_name}", "test") for path in declared]
    files = [path for root in paths for path in (root.rglob("*") if root.is_dir() else [root]) if path.is_file()]
    files = [path for path in files if path.name not in ("speed.tsv", "train_metrics.json", "cost.json")]
    assert files
    return {str(path.relative_to(project.path)): path.read_bytes() for path in files}


def forget(project: Project) -> None:
    """Remove what a run could reuse."""
    project.run("rm", "-rf", "data/.reuse", "outputs/test/checkpoints")


def run_two(project: Project, module: str, *arguments: str) -> list[tuple[int, str]]:
    """Run a stage twice at once; return exit status and output of each."""
    processes = [project.popen("python", "-m", f"stages.{module}", *arguments) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def test_a_second_run_waits_and_names_the_first(empty_project: Path) -> None:
    target = Path("data/corpus")
    for _ in range(2):
        (target.parent / "corpus.0123abcd.tmp").mkdir(parents=True)  # of a killed run
        (target.parent / "corpus.my-own.tmp").mkdir(exist_ok=True)
        with publish.lock(target):
            assert [path.name for path in target.parent.glob("corpus*")] == ["corpus.my-own.tmp"]
            code = "from pathlib import Path; from stages.base import publish\n"
            code += "with publish.lock(Path('data/corpus')): print('it is mine')"
            environment = {**os.environ, "PYTHONPATH": str(REPO)}
            second = subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE)
            assert second.stdout
            name = f"running, process {os.getpid()} on {os.uname().nodename}"
            assert second.stdout.readline() == f"waiting for another run that writes data/corpus ({name})\n"
        assert second.communicate()[0] == "it is mine\n"


@pytest.mark.parametrize(
    ("stage", "output"),
    [("organize", "splits"), ("extract", "corpus"), ("deduplicate", "duplicates"), ("pack", "tokens")],
)
def test_trap_28_a_data_stage_waits_before_it_reads_or_writes(
    stage: str, output: str, empty_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(target: Path) -> NoReturn:
        raise InterruptedError(target)

    shutil.copy(REPO / "params.yaml", empty_project)
    monkeypatch.setattr(publish, "lock", wait)
    monkeypatch.setattr(sys, "argv", [stage])
    with pytest.raises(InterruptedError, match=f"^data/{output}$"):
        importlib.import_module(f"stages.{stage}").main()
    assert [path.name for path in empty_project.iterdir()] == ["params.yaml"]


def test_a_scratch_directory_begins_empty_after_a_kill(empty_project: Path) -> None:
    code = "import os, signal; from pathlib import Path; from stages.base import publish\n"
    code += "with publish.scratch(Path('outputs/.again')) as root:\n"
    code += "    (root / 'half').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    run_python(code)
    assert Path("outputs/.again/half").exists()
    with publish.scratch(Path("outputs/.again")) as root:
        assert not [*root.iterdir()]
    assert [path.name for path in Path("outputs").iterdir()] == [".again.lock"]


def test_the_old_output_is_removed_after_the_new_one_is_there(
    empty_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Path("target")
    seen: list[str] = []
    rmtree, rename = shutil.rmtree, Path.rename

    def observed_rmtree(path: Path, ignore_errors: bool) -> None:
        seen.append((target / "file").read_text())
        rmtree(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", observed_rmtree)
    for content in ("old", "new"):
        with publish.directory(target) as directory:
            (directory / "file").write_text(content)
    assert seen == ["old", "new"]

    failures = [OSError(28, "No space left on device")]

    def failing_rename(path: Path, other: Path) -> Path:
        if other == target and failures:
            raise failures.pop()
        return rename(path, other)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(OSError, match="No space"), publish.directory(target):
        pass
    assert (target / "file").read_text() == "new"
    assert list(Path().iterdir()) == [target]


def test_an_output_may_be_a_link_to_another_disk(empty_project: Path) -> None:
    Path("disk").mkdir()
    target = Path("target")
    target.symlink_to("disk/target")
    for content in ("old", "new"):
        with publish.lock(target), publish.directory(target) as directory:
            (directory / "file").write_text(content)
    assert target.is_symlink()
    assert sorted(path.name for path in Path("disk").iterdir()) == [".target.lock", "target"]
    assert (target / "file").read_text() == "new"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", STAGES)
def test_trap_28_two_runs_of_each_stage_give_the_results_of_one(reproduced: Project, stage: str) -> None:
    """The second run waits and names the first, and nothing else enters the store."""
    reproduced.set(runtime={"num_workers": 2})
    command = ["launch"] if stage == "train" else [stage]
    expected = outputs_of(reproduced, stage)
    for _ in range(5):
        if stage != "consolidate":
            forget(reproduced)
        results = run_two(reproduced, *command)
        statuses = sorted(status for status, _ in results)
        refused = stage == "train" and any("another training writes into" in output for _, output in results)
        assert statuses == ([0, 2] if refused else [0, 0]), results
        assert outputs_of(reproduced, stage) == expected
        assert not list(reproduced.path.glob("*/*.tmp"))
