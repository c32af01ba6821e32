"""Each error that the doctor knows is planted, and seen."""

import ast
import dataclasses
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dvc.config import Config

from stages import doctor
from stages.base.params_file import load_params
from stages.checks import dvc_settings, findings, launch, machine
from stages.checks.findings import Found
from stages.launching.runtime import TrainRuntime
from stages.scoring import packages
from tests.project import REPO, Project, run_here, run_python

pytestmark = pytest.mark.filterwarnings("ignore:_NoneStep:DeprecationWarning")  # of what DVC uses


def lines(level: str, check: Callable[[], Found[Any]]) -> str:
    """The findings of a level."""
    return "\n".join(str(finding) for finding in findings.collect(check()) if finding.level == level)


errors, warnings, oks = (partial(lines, level) for level in ("error", "warning", "ok"))


def value(check: Found[Any]) -> Any:
    """What a check returns."""
    try:
        while True:
            next(check)
    except StopIteration as end:
        return end.value


# What the doctor itself is asked to do.


def test_one_task_of_each_node_reports_all_of_a_broken_project_without_a_traceback(
    empty_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("params.yaml").write_text("seed: [")
    slurm = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n2"}
    for name, text in {**slurm, "HF_HUB_OFFLINE": "1"}.items():  # the last one by `main`
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert run_here("doctor") == ""
    monkeypatch.setenv("SLURM_LOCALID", "0")
    output = run_here("doctor", status=1)
    assert "Traceback" not in output
    assert all(line.startswith("n2: ") for line in output.splitlines())
    for expected in (
        "error    params.yaml is not valid YAML",
        "error    dvc: you are not inside of a DVC repository",
        "data, outputs: a lock excludes other processes",
    ):
        assert expected in output, output
    assert output.index("params.yaml is not valid") < output.index("dvc: "), "DVC reads it, too, and may say less"
    assert not list(empty_project.glob("**/.doctor*"))


@pytest.fixture
def ready(training: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project that can train."""
    monkeypatch.chdir(training.path)
    training.run("git", "init", "-q")
    (training / ".dvc").mkdir()
    shutil.copy(REPO / ".dvc/config", training / ".dvc")
    return training


def diagnose(level: str = "error") -> str:
    return lines(level, lambda: doctor.find(1))


def test_a_project_that_can_train_has_no_errors(ready: Project) -> None:
    assert diagnose() == ""
    found = diagnose("ok")
    for expected in ("params.yaml is valid", "is complete in models/nano", "DVC can read the project", "cache.type is"):
        assert expected in found
    ready.set(tasks=["none"])
    assert "tasks: 'none' is neither in evals/ nor fetched" in diagnose()
    shutil.copytree(REPO / "evals", "evals")
    shutil.copy(REPO / packages.LOCK, ".")
    ready.set(tasks=["evals/sums.yaml"])
    assert "score will install lm-eval" in diagnose("warning")
    packages.directory().mkdir(parents=True)
    assert "lm-eval" not in diagnose("warning")
    ready.set(max_shard_size="5 potatoes", tasks=[])  # which consolidate would refuse, after the training
    assert "max_shard_size is '5 potatoes'" in diagnose()
    ready.set(max_shard_size="5GB", deduplicate="all")
    assert "deduplicate is 'all'" in diagnose()
    ready.set(deduplicate=None, runtime={"num_workers": 0})
    assert "runtime.num_workers is 0" in diagnose()


@pytest.mark.parametrize("names", [("data", "outputs"), ("outputs/test",)])
def test_a_file_in_the_place_of_a_directory_is_an_error(ready: Project, names: tuple[str, ...]) -> None:
    for name in names:
        shutil.rmtree(ready / name, ignore_errors=True)
        (ready / name).parent.mkdir(exist_ok=True)
        (ready / name).write_text("")
    found = diagnose()
    for name in names:
        assert f"{ready / name} is not a directory, and stages make one there: move it away" in found


def test_no_temporary_directory_is_a_line_beside_those_of_other_checks() -> None:
    """As where the disk is full: Python tries to write into each that it knows. torch needs one to be imported."""
    code = """
import runpy, tempfile
tempfile._candidate_tempdir_list = lambda: ["/none"]
runpy.run_module("stages.doctor", run_name="__main__")
"""
    output = run_python(code).stdout
    assert "error    TMPDIR: No usable temporary directory found in ['/none']: free some space there" in output
    assert f"  torch {torch.__version__} " in output, "it goes on"


def test_packages_that_are_missing_are_lines_and_not_the_end(tmp_path: Path) -> None:
    """-S: none is found."""
    output = Project(tmp_path).run("python", "-S", "-m", "stages.doctor", status=1, PYTHONPATH=str(REPO))
    assert "Traceback" not in output
    assert output.count("(No module named 'pydantic'): install the lock") == 1


def test_what_no_check_expects_is_a_line_too() -> None:
    def check() -> Found[None]:
        yield findings.ok("first")
        raise ZeroDivisionError("of\nnothing")

    assert [finding.level for finding in findings.collect(check())] == ["ok", "error"]
    assert "a check failed with ZeroDivisionError (of nothing)" in errors(check)


# Python.


@pytest.mark.parametrize("version", [(3, 6), (3, 9), (3, 15)])
def test_a_python_that_is_not_supported_is_a_line(version: tuple[int, int]) -> None:
    """The doctor starts as in an older Python: without the packages, and without what other modules need of it."""
    code = f"""
import runpy, sys
sys.version_info = {version}
sys.modules["stages.base"] = sys.modules["stages.checks"] = None
runpy.run_module("stages.doctor", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, text=True, stdout=-1, stderr=-2)
    assert done.returncode == 1
    assert done.stdout.startswith(f"error    Python {version[0]}.{version[1]} in {sys.prefix} is not supported: ")
    ast.parse((REPO / "stages/doctor.py").read_text(), feature_version=(3, 7))  # the oldest that it knows


# GPUs, and the nodes of Slurm.


def check_gpus(devices: Path, **changes: Any) -> Callable[[], Found[None]]:
    runtime = load_params(TrainRuntime, "runtime", REPO / "params.yaml")
    return lambda: launch.check_gpus(dataclasses.replace(runtime, **changes), devices)


def test_gpus_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_gpus(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "is the CPU build, and this machine has no GPU" in oks(check)
    (tmp_path / "nvidia0").touch()
    assert "install the CUDA build with `make setup`" in errors(check)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "finds no GPU, of 1 (CUDA_VISIBLE_DEVICES is '')" in warnings(check)


def test_a_launch_here_needs_a_gpu_for_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    gpu = SimpleNamespace(name="H100", total_memory=80 * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: gpu)
    tried = []
    monkeypatch.setattr(launch, "use_gpu", tried.append)
    assert "computes on 1 GPU (H100, 80.000 GiB)" in oks(check_gpus(tmp_path))
    assert tried == [0]
    assert "2 ranks need 2 GPUs, but torch can use 1" in errors(check_gpus(tmp_path, nproc_per_node=2))
    # On a login node the ranks are elsewhere.
    assert errors(check_gpus(tmp_path, nproc_per_node=2, launcher="sbatch")) == ""
    assert errors(check_gpus(tmp_path, nproc_per_node=2, num_nodes=2)) == ""


def test_an_allocation_has_the_nodes_of_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("PATH", f"{REPO}/tests/fake_slurm", prepend=os.pathsep)
    assert errors(check_gpus(tmp_path)) == ""
    assert "but this is in an allocation of 2" in errors(check_gpus(tmp_path, num_nodes=5))


# The machine.


def test_a_user_that_the_system_does_not_know(ready: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    unset = {"HOME and USER are not set, and the system knows no user": {}, "USER is not set": {"HOME": "/tmp"},
             "HOME is not set": {"USER": "me"}}  # fmt: skip
    for expected, environment in unset.items():
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            found = diagnose()
        assert found.startswith(f"error    DVC cannot start: {expected}"), found
        assert "`export HOME=/tmp/home USER=me`" in found
        assert "a check failed" not in found


def test_container_recipes_set_what_dvc_and_matplotlib_need() -> None:
    for path in ("scripts/image/Dockerfile", "scripts/image/apptainer.def"):
        text = (REPO / path).read_text()
        assert [name for name in (" HOME=", " USER=", " MPLCONFIGDIR=") if name not in text] == [], path


def test_shared_memory(tmp_path: Path) -> None:
    assert "--shm-size" in warnings(lambda: machine.check_shared_memory(tmp_path, 2**60))


def test_each_directory_of_a_disk_is_written_into(empty_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root no mode forbids writing, so `mkdir` is replaced."""
    for name in ("data", "outputs"):
        (empty_project / name).mkdir()
    mkdir = Path.mkdir

    def refuse(path: Path, *args: Any, **options: Any) -> None:
        if path.parent == empty_project / "outputs":
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    directories = {"data": Path("data"), "tokens": Path("data/tokens"), "outputs": Path("outputs")}
    check = partial(machine.check_directories, directories, 1)
    assert errors(check).startswith(f"error    outputs: cannot write into {empty_project}/outputs (Permission")
    assert "data, tokens: a lock excludes other processes" in oks(check)
    assert oks(check).count("GiB free") == 1  # of one file system


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 2**30 - 1
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert "free some space" in warnings(lambda: machine.check_space(tmp_path))
    free = 2**20
    assert "free some space" in errors(lambda: machine.check_space(tmp_path))
    monkeypatch.setattr(machine.os, "statvfs", lambda path: SimpleNamespace(f_files=10**6, f_favail=3))
    assert "only 3 more files fit" in errors(lambda: machine.check_space(tmp_path))


def test_locks_that_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = partial(machine.check_writing, "data", tmp_path, 1)
    assert "data: a lock excludes other processes" in oks(check)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(machine, "local_locks", lambda path: "nfs mounted with nolock")
    assert "only processes of this node (nfs mounted with nolock)" in warnings(check)
    assert "nolock" in errors(lambda: machine.check_writing("data", tmp_path, num_nodes=2))
    monkeypatch.setattr(machine, "exclusive", lambda lock: None)
    assert "a lock does not exclude another process" in errors(check)

    def fail(lock: Any, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.undo()
    monkeypatch.setattr(fcntl, "flock", fail)
    assert "cannot be locked (Function not implemented)" in errors(check)


# The model.


def test_a_model_that_the_cache_lacks_would_be_fetched(ready: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as main does
    ready.set(model_name="someone/nano")
    message = r"^error    with HF_HUB_OFFLINE=1 `download` would fail: .*lacks .* run `hf download someone/nano"
    assert re.search(message, diagnose())
    ready.set(model_name="models/missing/at/all")
    assert "there is no such directory" in diagnose()


# DVC.


@pytest.fixture
def dvc(tmp_path: Path) -> Callable[..., Config]:
    """A project of DVC, and a function that writes its settings and reads them."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".dvc/tmp").mkdir(parents=True)
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")

    def read(text: str = "[core]\n    analytics = false\n    check_update = false\n") -> Config:
        (tmp_path / ".dvc/config").write_text(text)
        config = value(dvc_settings.read(tmp_path))
        assert isinstance(config, Config)
        return config

    return read


def test_a_project_that_dvc_cannot_read(tmp_path: Path, dvc: Callable[..., Config]) -> None:
    check = partial(dvc_settings.read, tmp_path)
    dvc()
    assert not errors(check)
    (tmp_path / ".dvc/config").write_text("[[[")
    assert "dvc: config file error" in errors(check)
    dvc()
    (tmp_path / "dvc.lock").write_text("<<<<<<< HEAD\n- a: [\n")
    assert "dvc.lock', YAML file structure is corrupted" in errors(check)
    (tmp_path / "dvc.lock").unlink()
    (tmp_path / ".dvc/tmp/rwlock").touch()
    assert "rwlock is empty, as a DVC that was killed" in errors(check)
    (tmp_path / ".dvc/tmp/rwlock").write_text("{}")
    assert not errors(check)
    (tmp_path / "dvc.yaml").write_text("stages: {a: {cmd: 'true', outs: [outputs/a]}}\n")
    (tmp_path / "outputs").symlink_to("/dev/shm", target_is_directory=True)
    assert "outputs leads to /dev/shm, and DVC refuses" in errors(check)
    dvc("[core]\n    analytics = false\n    no_scm = true\n")
    assert not errors(check)
    (tmp_path / "outputs").unlink()
    (tmp_path / "room/.dvc").mkdir(parents=True)
    (tmp_path / "room/outputs").symlink_to(tmp_path, target_is_directory=True)
    shutil.copy(tmp_path / "dvc.yaml", tmp_path / "room")
    assert not errors(partial(dvc_settings.read, tmp_path / "room"))  # a project that is a directory of git's
    dvc()
    shutil.rmtree(tmp_path / ".git")
    without_git = errors(check)
    assert "has no .git: run `dvc config --local core.no_scm true`, or `git init`" in without_git
    assert "merge" not in without_git.replace(str(tmp_path), "")
    shutil.rmtree(tmp_path / ".dvc")
    assert "you are not inside of a DVC repository" in errors(check)


def test_the_cache_of_dvc(tmp_path: Path, dvc: Callable[..., Config]) -> None:
    def check(options: str, cache: Path = Path("/dev/shm")) -> Callable[[], Found[None]]:
        return lambda: dvc_settings.check_cache(dvc(f"[cache]\n    dir = {cache}\n{options}"), tmp_path)

    assert "is on another file system" in errors(check("    type = hardlink\n"))
    assert "so DVC copies everything" in warnings(check("    type = reflink,copy\n"))
    assert "cache.type is" in oks(check("    type = reflink,hardlink,symlink\n"))
    assert "cache.type is" in oks(check("", tmp_path / "cache"))
