"""Experiments of DVC: in copies of the project, in a queue, resumed; and the table that compares them."""

import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from dvc.repo import Repo
from dvc.repo.experiments.queue.base import QueueEntry
from dvc.repo.experiments.queue.celery import LocalCeleryQueue

from scripts import experiment_worker, resume_experiments
from stages.artifacts.errors import StageError
from stages.artifacts.file_lock import flock, open_lock, set_status
from stages.artifacts.params_file import load_params
from stages.checkpointing.layout import checkpoint_root, step_name
from stages.training import run
from stages.training.params import TrainParams, TrainRuntime
from tests.pipeline import ran
from tests.project import BIN, REPO, Project, commands, wait_for
from tests.trainings import checkpoint_manifest

GUIDE = "docs/experiments.md"

COLUMNS = ["steps", "tokens_per_s", "memory_peak_gib", "validation_loss"]


def table(project: Project) -> list[list[str]]:
    """The table that README and guide recommend, by rows of cells."""
    (command,) = {line for file in ("README.md", GUIDE) for line in commands(file) if line.startswith("dvc exp show")}
    lines = project.run("bash", "-c", command, COLUMNS="120").splitlines()
    assert max(map(len, lines)) <= 120
    return [line.split() for line in lines if line.strip(" ─")]


def test_the_table_has_the_columns_that_matter_and_those_that_vary(reproduced: Project) -> None:
    reproduced.set(lr=0.001, batch_size=1)
    values = {"steps": 12, "tokens_per_s": 100.0, "memory_peak_gib": 0.5}
    (reproduced / "outputs/cost.json").write_text(json.dumps(values))
    (reproduced / "outputs/metrics.json").write_text(json.dumps({"validation_loss": 7.0}))
    reproduced.run("dvc", "exp", "save", "--name", "lr-1")
    header, *_, experiment = table(reproduced)
    assert header == ["Experiment", *COLUMNS, "batch_size", "lr"]
    assert experiment[2:] == ["[lr-1]", "12", "100", "0.5", "7", "1", "0.001"]


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
    runtime = load_params(TrainRuntime, "runtime")
    for project, adopted in ((training, [path]), (copy, [])):
        project.set(batch_size=4)
        monkeypatch.chdir(project.path)
        assert run.resume_candidates(run.describe(load_params(TrainParams)), runtime, print) == adopted
    copy.set(batch_size=2)
    assert run.resume_candidates(other, runtime, print) == [path]  # its own


def test_a_relative_checkpoint_root_is_not_in_the_copy_that_dvc_deletes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_ROOT", "/project")
    for given, expected in (("checkpoints", "/project/checkpoints/exp"), ("/scratch", "/scratch/exp")):
        monkeypatch.setenv("CHECKPOINT_ROOT", given)
        assert checkpoint_root("exp") == Path(expected)


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCeleryQueue]:
    """The queue of a small project with two experiments, `first` and `second`."""
    project = Project(tmp_path)
    (project / "params.yaml").write_text("lr: 1\n")
    stage = {"cmd": "exit $(cat $DVC_ROOT/status)", "params": ["lr"]}
    (project / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"train": stage}}))
    for line in ("git init -q", "git config user.name test", "git config user.email test@example.com",
                 "dvc init -q", "git add .", "git commit -qm start"):  # fmt: skip
        project.run(*line.split())
    monkeypatch.chdir(tmp_path)
    with Repo() as repo:
        for lr, name in enumerate(("first", "second"), 2):
            repo.experiments.queue_one(repo.experiments.celery_queue, params={"params.yaml": [f"lr={lr}"]}, name=name)
        yield repo.experiments.celery_queue


def take(queue: LocalCeleryQueue, name: str) -> QueueEntry:
    """What a worker does first."""
    with queue.celery.connection_for_read() as connection, connection.channel() as channel:
        ((message, entry),) = [(message, entry) for message, entry in queue._iter_queued() if entry.name == name]
        path = Path(queue.celery._queued_msg_path_cache[message.delivery_tag])
        shutil.move(path, channel.processed_folder)
    queue.get_stash_entry(queue.repo.experiments, entry)
    return entry


def names(entries: Any) -> list[str]:
    return sorted(entry.name for entry in entries)


def states(queue: LocalCeleryQueue) -> dict[str, str]:
    return {task["name"]: task["status"] for task in queue.status()}


def test_an_experiment_that_failed_or_lost_its_worker_is_queued_again(
    queue: LocalCeleryQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    resume_experiments.resume(queue, [], seconds=0.1)
    assert "no experiment has failed" in capsys.readouterr().out
    failed, lost = take(queue, "first"), take(queue, "second")
    (message,) = [message for message, entry in queue._iter_processed() if entry == failed]
    queue.celery.backend.mark_as_done(message.headers["id"], None)
    queue.stash_failed(failed)
    info = Path(queue.get_infofile_path(failed.stash_rev))
    info.parent.mkdir(parents=True)
    values = {"git_url": "", "baseline_rev": failed.baseline_rev, "location": "", "root_dir": "copy", "dvc_dir": ""}
    info.write_text(json.dumps(values))
    Path("copy").mkdir()
    assert states(queue) == {"first": "Failed", "second": "Running"}

    with pytest.raises(StageError, match=r"third: neither failed nor without a worker .*; those are: first, second"):
        resume_experiments.resume(queue, ["third"], seconds=0.1)
    resume_experiments.resume(queue, ["first"], seconds=0.1)
    assert states(queue) == {"first": "Queued", "second": "Running"}
    assert not Path("copy").exists()
    resume_experiments.resume(queue, [], seconds=0.1)
    assert states(queue) == {"first": "Queued", "second": "Queued"}
    # As they were: the same parameters, and the baseline under which `dvc exp show` lists them.
    for entry in (failed, lost):
        stashed = queue.stash.stash_revs[entry.stash_rev]
        assert (stashed.name, stashed.baseline_rev) == (entry.name, queue.scm.get_rev())
    assert queue.failed_stash is not None
    assert queue.failed_stash.stash_revs == {}
    assert sorted(queue.iter_queued(), key=lambda entry: str(entry.name)) == [failed, lost]
    resume_experiments.resume(queue, [], seconds=0.1)
    assert len(list(queue.iter_queued())) == 2


def test_an_experiment_with_a_worker_is_left_alone(queue: LocalCeleryQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = take(queue, "first"), take(queue, "second")
    tasks = {entry.stash_rev: message.headers["id"] for message, entry in queue._iter_processed()}
    with open_lock(resume_experiments.worker_lock(queue, second)) as lock:
        set_status(lock, "an attempt before")
    with open_lock(resume_experiments.worker_lock(queue, first)) as lock:  # as of a job on another node
        flock(lock, fcntl.LOCK_EX)
        set_status(lock, tasks[first.stash_rev])
        experiment_worker.queue_lost_again(queue)
        with monkeypatch.context() as patched:
            patched.setattr(resume_experiments, "find_process", lambda queue, entry: psutil.Process())
            patched.setattr(resume_experiments, "_has_worker", lambda process: True)
            resume_experiments.resume(queue, [], seconds=0.1)
        assert states(queue) == {"first": "Running", "second": "Running"}
    experiment_worker.queue_lost_again(queue)
    assert states(queue) == {"first": "Queued", "second": "Running"}


@pytest.mark.slow
def test_a_worker_queues_an_interrupted_experiment_again_and_no_failed_one(
    queue: LocalCeleryQueue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    status = Path("status").absolute()
    for text, result, expected in (
        ("75", 75, {"first": "Queued", "second": "Queued"}),
        ("1", 1, {"first": "Failed", "second": "Failed"}),
        ("0", 0, {"first": "Failed", "second": "Failed"}),
    ):
        status.write_text(text)
        assert experiment_worker.work(queue, threading.Event()) == result
        assert states(queue) == expected
    assert "error: failed: second, first" in capsys.readouterr().err
    resume_experiments.resume(queue, [], seconds=0.1)
    assert experiment_worker.work(queue, threading.Event()) == 0
    assert states(queue) == {"first": "Success", "second": "Success"}


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
    reproduced.set(num_epochs=2)
    reproduced.run("git", "commit", "-qam", "longer")
    grid = ("-S", "lr=5e-4,2e-3", "-S", "batch_size=1,2")
    reproduced.run("dvc", "exp", "run", "--queue", "--allow-missing", *grid)
    yield reproduced
    end_all(reproduced)


def status(project: Project) -> dict[str, str]:
    """What `dvc queue status` shows, by name."""
    lines = re.findall(r"^[0-9a-f]{7} +(\S+) .* (\w+)$", project.run("dvc", "queue", "status"), re.MULTILINE)
    return dict(lines)


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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("with_its_experiment", [True, False])
def test_a_queue_of_four_with_two_workers_of_which_one_is_killed(sweep: Project, with_its_experiment: bool) -> None:
    before = git_bytes(sweep)
    start_workers(sweep)
    logs = sweep / ".dvc/tmp/exps/run"

    def in_training() -> list[Path]:
        return [path for path in logs.glob("*/*.out") if re.search(r"step (8|12)/24", path.read_text())]

    wait_for(in_training, 300)
    log = in_training()[0]
    experiment = psutil.Process(sweep.json(str(log.with_suffix(".json").relative_to(sweep.path)))["pid"])
    worker = experiment.parent()
    assert worker
    assert len(workers(sweep)) == 2
    worker.kill()
    if with_its_experiment:
        experiment.kill()

    output = sweep.run("python", "-m", "scripts.resume_experiments", "-j", "2")
    assert "queued again, because its worker is gone" in output
    assert ("outlived its worker" in output) is not with_its_experiment
    wait_for_success(sweep)
    # Each step was done once. (One that outlived its worker may have finished before it could be stopped.)
    assert [int(step) for step in re.findall(r"step (\d+)/24 ", log.read_text())] == list(range(4, 25, 4))
    assert "resuming from step" in log.read_text() or not with_its_experiment
    found = experiments(sweep)
    assert len(found) == 4
    assert {(each["params"]["lr"], each["params"]["batch_size"]) for each in found.values()} == {
        (lr, size) for lr in (5e-4, 2e-3) for size in (1, 2)
    }
    for each in found.values():
        params, metrics, run = each["params"], each["metrics"], each["run"]
        assert set(metrics) == set(COLUMNS)
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
    assert [path.name for path in (sweep / ".dvc/tmp/exps").glob("tmp*")] == []
    wait_for(lambda: not workers(sweep))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_guide_run(reproduced: Project) -> None:
    try:
        for command in commands(GUIDE):
            if command.startswith("dvc queue start"):
                start_workers(reproduced, command)
                wait_for_success(reproduced)
                continue
            output = reproduced.run("bash", "-c", command)
            if command.startswith("dvc exp show"):
                assert output.count("├──") + output.count("└──") == 5
            elif command.startswith("python -m scripts.resume"):
                assert "no experiment has failed" in output
    finally:
        end_all(reproduced)
    assert reproduced.run("dvc", "exp", "list", "--all-commits", "--name-only").split() == []
    assert reproduced.json("outputs/test/run.json")["identity"]["params"]["lr"] == 4e-3
    assert len({path.parent for path in (reproduced / "outputs/test/checkpoints").glob("*/step-*")}) == 1
    assert ran(reproduced.run("dvc", "repro")) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_experiment_goes_to_another_clone(reproduced: Project, tmp_path: Path) -> None:
    """The commands of "Keep one, remove the others" that need remotes."""
    section = (REPO / GUIDE).read_text().split("## Keep one, remove the others")[1].split("\n## ")[0]
    push, pull, checkpoints = [line.split("  #")[0].split() for line in re.findall(r"^\$ (.*)", section, re.MULTILINE)]
    reproduced.run("git", "clone", "-q", "--bare", ".", str(tmp_path / "project.git"))
    reproduced.run("git", "remote", "add", "origin", str(tmp_path / "project.git"))
    reproduced.run("dvc", "remote", "add", "--default", "store", str(tmp_path / "store"))
    reproduced.run("git", "commit", "-qam", "remote")
    reproduced.run("git", "push", "-q", "origin", "HEAD")
    reproduced.run("dvc", "push")
    reproduced.run("dvc", "exp", "run", "--temp", "--allow-missing", "-n", "high", "-S", "lr=4e-3")
    reproduced.run(*push)
    clone = Project(tmp_path / "clone")
    reproduced.run("git", "clone", "-q", str(tmp_path / "project.git"), str(clone.path))
    clone.run(*pull)
    clone.run("dvc", "exp", "apply", "high")
    assert clone.json("outputs/test/run.json")["identity"]["params"]["lr"] == 4e-3
    reproduced.run("dvc", "exp", "apply", "high")
    reproduced.run(*checkpoints)
    clone.run("python", "-m", "stages.checkpoints", "pull")
    assert len(list((clone / "outputs/test/checkpoints").glob("*/step-00000012"))) == 1
    assert ran(clone.run("dvc", "repro", "--allow-missing")) == []
