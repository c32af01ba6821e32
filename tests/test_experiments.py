"""Experiments of DVC: in copies of the project, in a queue, resumed; and the table that compares them."""

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from stages.base.params_file import load_params
from stages.checkpointing import decision, run
from stages.checkpointing.layout import checkpoint_root, step_name
from stages.training.params import TrainParams
from tests.pipeline import ran
from tests.project import REPO, Project, commands, wait_for
from tests.trainings import checkpoint_manifest

pytestmark = pytest.mark.slow  # each runs DVC experiments

GUIDE = "docs/experiments.md"

COLUMNS = ["steps", "tokens_per_s", "memory_peak_gib", "validation_loss"]


def table(project: Project, *arguments: str) -> list[list[str]]:
    """The table that README and guide recommend, by rows of cells."""
    assert all("make show" in commands(file) for file in ("README.md", GUIDE))
    # Not as a part of `make test`, which would say where it is.
    lines = project.run("make", "show", *arguments, COLUMNS="120", MAKEFLAGS="", MAKELEVEL="0").splitlines()
    assert max(map(len, lines)) <= 120
    return [line.split() for line in lines if line.strip(" ─")]


def test_the_table_has_the_columns_that_matter_and_those_that_vary(reproduced: Project) -> None:
    reproduced.set(lr=0.001, batch_size=1)
    values = {"steps": 12, "tokens_per_s": 100.0, "memory_peak_gib": 0.5}
    (reproduced / "outputs/cost.json").write_text(json.dumps(values))
    (reproduced / "outputs/metrics.json").write_text(json.dumps({"validation_loss": 7.0}))
    (reproduced / "requirements-score.lock").write_text("# newer\n")  # is no column
    reproduced.run("dvc", "exp", "save", "--name", "lr-1")
    (reproduced / ".venv").symlink_to(Path(sys.prefix))
    header, *_, experiment = table(reproduced)
    assert header == ["Experiment", *COLUMNS, "batch_size", "lr"]
    assert experiment[2:] == ["[lr-1]", "12", "100", "0.5", "7", "1", "0.001"]
    assert table(reproduced, "KEEP=tokens|memory")[0] == ["Experiment", *COLUMNS[1:3], "batch_size", "lr"]


def test_an_experiment_in_a_copy_adopts_no_checkpoint_of_another(
    training: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = training.copy(tmp_path / "copy")
    monkeypatch.setenv("DVC_ROOT", str(training.path))
    monkeypatch.chdir(training.path)
    other = run.describe(load_params(TrainParams))
    path = other.directory / step_name(4)
    path.mkdir(parents=True)
    checkpoint_manifest(identity=other.identity, step=4, total_steps=12).write(path)
    for project, adopted in ((training, [path]), (copy, [])):
        project.set(batch_size=4)
        monkeypatch.chdir(project.path)
        own = run.describe(load_params(TrainParams))
        assert decision.decide(own, "auto", decision.find(own)).checkpoints == adopted
    copy.set(batch_size=2)
    assert decision.begin(other, "auto").checkpoints == [path]  # its own


def test_a_relative_checkpoint_root_is_not_in_the_copy_that_dvc_deletes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_ROOT", "/project")
    for given, expected in (("checkpoints", "/project/checkpoints/exp"), ("/scratch", "/scratch/exp")):
        monkeypatch.setenv("CHECKPOINT_ROOT", given)
        assert checkpoint_root("exp") == Path(expected)


def begin(project: Project, stages: dict[str, Any], params: str, command: str, **environment: str) -> None:
    """Make the first commit of a small pipeline, after a command has run it."""
    (project / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    (project / "params.yaml").write_text(params)
    (project / ".gitignore").write_text("/outputs\n/.venv\n")
    (project / ".dvc").mkdir()
    (project / ".dvc/config").write_text("[core]\n    analytics = false\n")
    (project / ".dvc/.gitignore").write_text("/tmp\n/cache\n")
    for each in ("git init -q", "git config user.name test", "git config user.email test@example.com", command,
                 "git add .", "git commit -qm first"):  # fmt: skip
        project.run(*each.split(" "), **environment)


def test_before_the_first_evaluation_there_is_a_table_without_losses(empty_project: Path) -> None:
    project = Project(empty_project)
    stages = {
        "train": {
            "cmd": """mkdir -p outputs && echo '{"steps": ${lr}}' > outputs/cost.json""",
            "metrics": ["outputs/cost.json"],
        },
        "evaluate": {"cmd": "false", "deps": ["outputs/cost.json"], "metrics": ["outputs/metrics.json"]},
    }
    shutil.copy(REPO / "Makefile", project.path)
    (project / "scripts").mkdir()
    (project / "scripts/setup.sh").symlink_to("/bin/true")  # .venv is there
    (project / ".venv").symlink_to(Path(sys.prefix))
    begin(project, stages, "lr: 1\n", "dvc repro train")
    assert [row[0] for row in table(project)][:2] == ["Experiment", "workspace"]
    project.run("dvc", "exp", "run", "-n", "high", "-S", "lr=2", "train")
    header, *_, experiment = table(project)
    assert (header, experiment[2:]) == (["Experiment", "steps", "lr"], ["[high]", "2", "2"])


def test_a_model_stays_when_another_experiment_has_its_turn(empty_project: Path) -> None:
    """A pipeline with the outs of ours; `exp run` begins with `dvc checkout`, which would delete what no stage has."""
    project = Project(empty_project)
    directory = "outputs/${experiment_name}"
    paths = ("model/README.md", "adapter/README.md", "run.json")
    written = "&&".join(f"echo {directory} > {directory}/{name}" for name in paths)
    keep = f"from pathlib import Path; from stages.evaluate import keep_from_dvc as keep; keep(Path('{directory}'))"
    stages = {
        "consolidate": {
            "cmd": f"mkdir -p {directory}/model {directory}/adapter && {written}",
            "params": ["experiment_name"],
            "outs": [f"{directory}/model", f"{directory}/adapter", f"{directory}/run.json"],
        },
        "evaluate": {
            "cmd": f'python -c "{keep}" && echo > outputs/metrics.json',
            "deps": [f"{directory}/model"],
            "outs": ["outputs/metrics.json"],
        },
    }
    environment = {"PYTHONPATH": str(REPO)}
    begin(project, stages, "experiment_name: first\n", "dvc repro", **environment)
    assert "up to date" in project.run("dvc", "status")
    project.run("dvc", "exp", "run", "-S", "experiment_name=second", **environment)
    for name in ("first", "second"):
        for path in paths:
            assert (project / f"outputs/{name}/{path}").read_text() == f"outputs/{name}\n"


def git_bytes(project: Project) -> int:
    return sum(path.stat().st_size for path in (project / ".git").rglob("*") if path.is_file())


def experiments(project: Project) -> dict[str, dict[str, Any]]:
    """All experiments by name, each with its parameters, metrics and run."""
    (baseline,) = json.loads(project.run("dvc", "exp", "show", "--json", "--hide-workspace"))
    found = {}
    for each in baseline["experiments"] or []:
        (revision,) = each["revs"]
        data = revision["data"]
        code = f"import dvc.api; print(dvc.api.read('outputs/test/run.json', rev='{revision['rev']}'))"
        found[each["name"]] = {
            "params": data["params"]["params.yaml"]["data"],
            "metrics": {name: value for file in data["metrics"].values() for name, value in file["data"].items()},
            "run": json.loads(project.run("python", "-c", code)),
        }
    return found


def end_all(project: Project) -> None:
    """Kill what still runs in the project or in a copy of it."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd().startswith(str(project.path)):
                process.kill()


@pytest.fixture
def sweep(reproduced: Project) -> Iterator[Project]:
    """A project with a queue of four experiments of 24 steps."""
    (reproduced / ".venv").symlink_to(Path(sys.prefix))
    reproduced.set(num_epochs=2)
    reproduced.run("git", "commit", "-qam", "longer")
    grid = ("-S", "lr=5e-4,2e-3", "-S", "batch_size=1,2")
    reproduced.run("dvc", "exp", "run", "--queue", "--allow-missing", *grid)
    yield reproduced
    end_all(reproduced)


def status(project: Project) -> dict[str, str]:
    """What `dvc queue status` shows, by name."""
    twice = "dvc queue status || dvc queue status"  # it fails where a worker is writing a record that it reads
    return dict(re.findall(r"^[0-9a-f]{7} +(\S+) .* (\w+)$", project.run("bash", "-c", twice), re.MULTILINE))


def wait_for_success(project: Project) -> None:
    """Wait until all experiments of the queue have a result."""
    end = time.monotonic() + 600
    while set(found := status(project).values()) != {"Success"}:
        assert time.monotonic() < end, found
        time.sleep(5)  # the command needs seconds of a core


def start_workers(project: Project, command: str = "dvc queue start -j 2") -> None:
    project.run("bash", "-c", f"{command} > /dev/null 2>&1")  # they inherit its output, and would keep a pipe open


def workers(project: Project) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):
            if "queue-worker" in (process.info["cmdline"] or []) and process.cwd() == str(project.path):
                found.append(process)
    return found


@pytest.mark.timeout(900)
def test_a_queue_of_four_with_two_workers_of_which_one_is_killed(sweep: Project) -> None:
    before = git_bytes(sweep)
    start_workers(sweep)
    logs = sweep / ".dvc/tmp/exps/run"

    def in_training() -> list[Path]:
        return [path for path in logs.glob("*/*.out") if re.search(r"step (8|12)/24", path.read_text())]

    wait_for(in_training, 300)
    log = in_training()[0]
    info = sweep.json(str(log.with_suffix(".json").relative_to(sweep.path)))
    experiment = psutil.Process(info["pid"])
    executor = json.loads(next(log.parent.glob("*.run")).read_text())
    name = executor["name"]
    worker = experiment.parent()
    assert worker
    assert len(workers(sweep)) == 2
    text = sweep.run("git", "show", f"{log.parent.name}:params.yaml")
    params = [part for key in ("lr", "batch_size") for part in ("-S", f"{key}={yaml.safe_load(text)[key]}")]
    for process in (worker, experiment):
        process.kill()

    # As the guide says.
    wait_for(lambda: not experiment.is_running())
    sweep.run("dvc", "queue", "kill", "--force", name)
    sweep.run("dvc", "queue", "remove", name)
    sweep.run("dvc", "exp", "run", "--queue", "--allow-missing", "-n", name, *params)
    start_workers(sweep)
    wait_for_success(sweep)
    again = next(path.read_text() for path in logs.glob("*/*.out") if "resuming from step" in path.read_text())
    # Each step was done once.
    printed = re.findall(r"step (\d+)/24 ", log.read_text() + again)
    assert sorted(map(int, printed)) == list(range(4, 25, 4))
    found = experiments(sweep)
    assert len(found) == 4
    assert {(each["params"]["lr"], each["params"]["batch_size"]) for each in found.values()} == {
        (lr, size) for lr in (5e-4, 2e-3) for size in (1, 2)
    }
    for each in found.values():
        params, metrics, run = each["params"], each["metrics"], each["run"]
        assert set(metrics) == {*COLUMNS, "perplexity", "bits_per_byte"}
        assert metrics["steps"] == run["step"] == 24
        assert {name: params[name] for name in ("lr", "batch_size")}.items() <= run["identity"]["params"].items()
        assert run["adopted"] is None
    # By `lr`, whatever the `batch_size`: the same rows in each step, and rounding.
    first, second = (
        [each["metrics"]["validation_loss"] for each in found.values() if each["params"]["lr"] == lr]
        for lr in (5e-4, 2e-3)
    )
    assert first[0] == pytest.approx(first[1], abs=1e-4)
    assert second[0] == pytest.approx(second[1], abs=1e-4)
    assert abs(first[0] - second[0]) > 0.01
    assert table(sweep)[0] == ["Experiment", "State", *COLUMNS, "batch_size", "lr"]
    assert git_bytes(sweep) - before < 1_000_000
    wait_for(lambda: not workers(sweep))
    assert [*(sweep / ".dvc/tmp/exps").glob("tmp*")] == [Path(executor["root_dir"])]  # as the guide says


@pytest.mark.timeout(900)
def test_the_commands_of_the_guide_run(reproduced: Project, tmp_path: Path) -> None:
    (reproduced / ".venv").symlink_to(Path(sys.prefix))
    reproduced.run("git", "clone", "-q", "--bare", ".", str(tmp_path / "project.git"))
    reproduced.run("git", "remote", "add", "origin", str(tmp_path / "project.git"))
    reproduced.run("dvc", "remote", "add", "--default", "store", str(tmp_path / "store"))
    reproduced.run("git", "commit", "-qam", "remote")
    reproduced.run("git", "push", "-q", "origin", "HEAD")
    try:
        for command in commands(GUIDE):
            if command.startswith("dvc queue start"):
                start_workers(reproduced, command)
                wait_for_success(reproduced)
                continue
            if command == "dvc exp apply high":
                take_to_another_clone(reproduced, tmp_path)
            output = reproduced.run("bash", "-c", command.replace("batch_size=1,2", "batch_size=1"))
            if command == "make show":
                assert output.count("├──") + output.count("└──") == 3
    finally:
        end_all(reproduced)
    assert reproduced.run("dvc", "exp", "list", "--all-commits", "--name-only").split() == []
    assert reproduced.json("outputs/test/run.json")["identity"]["params"]["lr"] == 4e-3
    assert len({path.parent for path in (reproduced / "outputs/test/checkpoints").glob("*/step-*")}) == 1
    assert ran(reproduced.run("dvc", "repro")) == []


def take_to_another_clone(project: Project, directory: Path) -> None:
    """The commands of "Keep one, remove the others" that need remotes."""
    section = (REPO / GUIDE).read_text().split("## Keep one, remove the others")[1].split("\n## ")[0]
    push, pull = [line.split("  #")[0].split() for line in re.findall(r"^\$ (.*)", section, re.MULTILINE)]
    project.run("dvc", "push")
    project.run(*push)
    clone = Project(directory / "clone")
    project.run("git", "clone", "-q", str(directory / "project.git"), str(clone.path))
    clone.run(*pull)
    clone.run("dvc", "exp", "apply", "high")
    assert clone.json("outputs/test/run.json")["identity"]["params"]["lr"] == 4e-3
    assert ran(clone.run("dvc", "repro", "--allow-missing")) == []
