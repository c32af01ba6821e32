"""Each error that the doctor knows is planted, and seen."""

import ast
import dataclasses
import fcntl
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.numpy

from stages import doctor, plan
from stages.artifacts.errors import StageError
from stages.artifacts.file_lock import flock, open_lock
from stages.artifacts.record import FileEntry
from stages.checks import (
    accelerators,
    disks,
    dvc_settings,
    findings,
    inputs,
    installation,
    nodes,
    offline,
    operating_system,
)
from stages.checks.findings import Finding
from stages.checks.nodes import Node
from stages.model import hub
from stages.model.manifest import ModelManifest
from stages.plan import Plan
from stages.training.memory import memory_limit
from stages.training.memory_plan import PeakMemory
from tests.project import REPO, Project, flip_bit

ALONE = Node("n1", 0, 1, "")
OFFLINE = {"HF_HUB_OFFLINE": "1"}
PEAK = PeakMemory(2**20, False, 0, 0, 0, 0, 0, 0, 2**20)


def of(level: str, found: Iterable[Finding]) -> str:
    """The lines of a level."""
    return "\n".join(str(finding) for finding in found if finding.level == level)


def errors(check: findings.Check) -> str:
    return of("error", findings.collect(check))


def warnings(check: findings.Check) -> str:
    return of("warning", findings.collect(check))


# What the doctor itself is asked to do.


def start(project: Path, **environment: str) -> "subprocess.Popen[str]":
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "SLURM_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "stages.doctor", "--wait", "60"], cwd=project, text=True, stdout=-1, stderr=-2,
        env={**inherited, "PYTHONPATH": str(REPO), **environment},
    )  # fmt: skip


def test_two_nodes_of_a_broken_project_report_everything_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("seed: [")
    (tmp_path / "dvc.yaml").write_text("<<<<<<< HEAD\nstages: {}\n=======\n")
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_LOCALID": "0",
            "GLOO_SOCKET_IFNAME": "none0"}  # fmt: skip
    processes = [
        start(tmp_path, **step, SLURM_NODEID=str(index), SLURM_PROCID=str(index), SLURMD_NODENAME=f"n{index + 1}")
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    for number, output in enumerate(outputs, start=1):
        assert processes[number - 1].returncode == 1, output
        assert "Traceback" not in output
        assert all(line.startswith(f"n{number}: ") for line in output.splitlines())
        for expected in (
            "error    params.yaml is not valid YAML",
            "error    dvc.yaml is not valid YAML",
            "error    .dvc is missing",
            "error    pyproject.toml is missing",
            "error    GLOO_SOCKET_IFNAME names 'none0', which does not exist",
            "warning  outputs/plan.json is missing",
        ):
            assert expected in output, output
    assert "ok       all 2 nodes see the same outputs" in outputs[0]
    assert "ok       the clock agrees with that of n1" in outputs[1]
    assert list((tmp_path / "outputs").iterdir()) == []
    assert not list(tmp_path.glob("**/.doctor*"))


def test_only_one_task_of_a_node_checks_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["doctor"])
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    doctor.main()
    assert capsys.readouterr().out == ""


def test_a_batch_script_is_one_node() -> None:
    in_script = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "4", "SLURM_NODEID": "0"}
    assert Node.of(in_script).num_nodes == 1


def test_a_project_that_can_train_has_no_errors(training: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(training.path)
    for name in ("pyproject.toml", "requirements-cpu.lock", "requirements-cuda.lock"):
        (training / name).symlink_to(REPO / name)
    (training / ".dvc").mkdir()
    shutil.copy(REPO / ".dvc/config", training / ".dvc")
    (training / ".git").mkdir()
    params = plan.load_params(plan.TrainParams)
    model, tokens = plan.ModelManifest.read(), plan.PackedTokens.read(plan.TRAIN)
    estimated = plan.estimate(params, model, tokens, tokens)
    estimated = plan.dataclasses.replace(estimated, inputs=plan.inputs_digest(params), num_ranks=2, peak=PEAK)
    estimated.write(plan.outputs.PLAN)
    monkeypatch.setattr(installation, "check_packages", list)  # of the environment of the tests, which may differ
    found = list(doctor.find(ALONE, True, 0, {}))
    assert of("error", found) == ""
    text = of("ok", found)
    for expected in (
        "96 rows, with their SHA-256",
        "have the size and SHA-256 of data/model.json",
        "checkpoints and model of the plan fit",
        "the ranks of this machine need 0.00",
        "rename and fsync",
    ):
        assert expected in text, text
    settings = inputs.load()
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "checkpoints and the model need" in errors(lambda: doctor._space_of_checkpoints(settings, estimated))


def test_packages_that_are_missing_are_lines_and_not_the_end(tmp_path: Path) -> None:
    """-S: none is found."""
    command = [sys.executable, "-S", "-m", "stages.doctor"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPO)}, text=True, stdout=-1, stderr=-2
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    for package in ("packaging", "pydantic", "psutil"):
        assert done.stdout.count(f"error    {package} cannot be imported") == 1
    assert "ok       data, outputs, TMPDIR" in done.stdout


def test_what_no_check_expects_is_a_line_too() -> None:
    def check() -> Iterable[Finding]:
        yield findings.ok("first")
        raise ZeroDivisionError("of\nnothing")

    assert [finding.level for finding in findings.collect(check)] == ["ok", "error"]
    assert "a check failed with ZeroDivisionError (of nothing)" in errors(check)


# Installation.


@pytest.mark.parametrize("version", [(3, 6), (3, 9), (3, 15)])
def test_a_python_that_is_not_supported_is_a_line(version: tuple[int, int]) -> None:
    """The doctor starts as in an older Python: without the packages, and without what other modules need of it."""
    code = f"""
import runpy, sys
sys.version_info = {version}
sys.modules["stages.artifacts"] = sys.modules["stages.checks"] = None
runpy.run_module("stages.doctor", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, text=True, stdout=-1, stderr=-2)
    assert done.returncode == 1
    assert done.stdout.startswith(f"error    Python {version[0]}.{version[1]} in {sys.prefix} is not supported: ")
    ast.parse((REPO / "stages/doctor.py").read_text(), feature_version=(3, 7))  # the oldest that it knows


def test_another_python_than_that_of_the_environment(tmp_path: Path) -> None:
    assert not warnings(lambda: installation.check_python(tmp_path))
    (tmp_path / ".venv").mkdir()
    assert "is not that of .venv" in warnings(lambda: installation.check_python(tmp_path))
    assert not warnings(lambda: installation.check_python(tmp_path, tmp_path / ".venv"))


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('dependencies = [\n    "torch>=2.11,<2.14",\n    "numpy>=2.1",\n]\n')
    pins = "numpy==2.2.0 \\\n    --hash=sha256:0\nold==1 ; python_full_version < '3.0' \\\n    --hash=sha256:0\n"
    for build, local in (("cpu", "+cpu"), ("cuda", "")):
        (tmp_path / f"requirements-{build}.lock").write_text(f"{pins}pytest==8.4\ntorch==2.13.0{local} \\\n")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "level", "message"),
    [
        ({}, "ok", "3 packages are those of requirements-cpu.lock"),
        ({"torch": "2.13.0"}, "ok", "3 packages are those of requirements-cuda.lock"),
        ({"torch": "2.12.0+cu128"}, "warning", "requirements-cuda.lock: torch 2.12.0+cu128: "),
        ({"pytest": None}, "warning", "pytest is missing"),
        ({"numpy": "2.0"}, "error", "the pipeline needs numpy>=2.1 (2.0): install the lock with `make setup`"),
        ({"torch": None}, "error", "(not installed)"),
    ],
)
def test_packages_are_compared_with_the_lock_that_fits(
    locked: Path, changed: Mapping[str, str | None], level: str, message: str
) -> None:
    installed = {"torch": "2.13.0+cpu", "numpy": "2.2.0", "pytest": "8.4", **changed}
    [finding] = installation.check_packages(locked, installed.get)
    assert finding.level == level
    assert message in str(finding)


def test_a_missing_lock(locked: Path) -> None:
    (locked / "requirements-cuda.lock").unlink()
    assert "requirements-cuda.lock is missing" in errors(lambda: installation.check_packages(locked, lambda name: None))


# GPUs and what connects them.


def test_gpus_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = lambda: accelerators.check_gpus(None, tmp_path)  # noqa: E731
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "is the CPU build, and this machine has no GPU" in of("ok", findings.collect(check))
    (tmp_path / "nvidia0").touch()
    assert "install the CUDA build with `make setup`" in errors(check)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert "check the driver with `nvidia-smi`" in errors(check)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides 1 GPUs" in warnings(check)
    (tmp_path / "nvidia0").unlink()
    assert "is a CUDA build, and this machine has no GPU" in warnings(check)


def test_fewer_gpus_than_ranks_and_one_that_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "H100")
    assert "2 ranks need 2 GPUs, but torch can use 1" in errors(lambda: accelerators.check_gpus(2))

    def fail(index: int) -> None:
        raise StageError(f"GPU {index} does not work")

    monkeypatch.setattr(accelerators, "use_gpu", fail)
    assert "GPU 0 does not work" in errors(lambda: accelerators.check_gpus(1))
    monkeypatch.setattr(accelerators, "use_gpu", lambda index: None)
    assert "computes on 1 GPUs (H100)" in of("ok", accelerators.check_gpus(1))


@pytest.mark.parametrize(("driver", "level"), [(None, "error"), (12080, "error"), (13000, "ok"), (13020, "ok")])
def test_the_driver_must_know_the_cuda_of_torch(tmp_path: Path, driver: int | None, level: str) -> None:
    assert list(accelerators.check_driver(tmp_path, "13.1", lambda: driver)) == []
    (tmp_path / "nvidia0").touch()
    assert [finding.level for finding in accelerators.check_driver(tmp_path, "13.1", lambda: driver)] == [level]


@pytest.mark.parametrize(
    ("total", "is_upper_bound", "level"),
    [(90, False, "ok"), (96, False, "warning"), (101, False, "error"), (101, True, "warning")],
)
def test_the_memory_of_gpus(total: int, is_upper_bound: bool, level: str) -> None:
    peak = PeakMemory(total, is_upper_bound, 0, 0, 0, 0, 0, 0, 0)
    assert [finding.level for finding in accelerators.check_memory(peak, 100)] == [level]


def test_a_torch_without_backends() -> None:
    available = {"gloo": lambda: True, "nccl": lambda: False}
    assert "has no nccl" in errors(lambda: accelerators.check_backends(True, available))
    assert not errors(lambda: accelerators.check_backends(False, available))


@pytest.mark.parametrize(
    ("num_nodes", "environment", "message"),
    [
        (1, {"GLOO_SOCKET_IFNAME": "none0"}, ""),  # the training replaces it
        (2, {"GLOO_SOCKET_IFNAME": "none0"}, "'none0', which does not exist: the interfaces here are "),
        (2, {"GLOO_SOCKET_IFNAME": "lo"}, "GLOO_SOCKET_IFNAME names lo, which other nodes do not reach"),
        (2, {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}, "towards the launcher is lo, which other nodes"),
        (2, {}, "no interface towards the node of the launcher was found"),
        (2, {"NCCL_SOCKET_IFNAME": "=lo1"}, "NCCL_SOCKET_IFNAME is '=lo1', which matches no interface"),
        (2, {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "^lo"}, "the interface eth0 is down"),
        (2, {"GLOO_SOCKET_IFNAME": "eth1,eth2", "NCCL_SOCKET_IFNAME": "^=lo"}, ""),
        (2, {"GLOO_SOCKET_IFNAME": "eth1,none0"}, "names 'none0', which does not exist"),
        (2, {"GLOO_SOCKET_IFNAME": "eth1,eth0"}, "the interface eth0 is down"),
        (2, {"GLOO_SOCKET_IFNAME": "eth1,lo"}, "lo, which other nodes do not reach"),
        (2, {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "^=l,e"}, ""),
        (2, {"NCCL_SOCKET_IFNAME": "^l,e"}, "which matches no interface"),
    ],
)
def test_the_interface(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int, environment: dict[str, str], message: str
) -> None:
    up, down = SimpleNamespace(isup=True), SimpleNamespace(isup=False)
    monkeypatch.setattr(accelerators.psutil, "net_if_stats", lambda: {"lo": up, "eth0": down, "eth1": up, "eth2": up})
    monkeypatch.setattr(accelerators, "_open_gloo", lambda name: None)
    found = errors(lambda: accelerators.check_interface(num_nodes, True, environment))
    assert message in found if message else not found


def test_an_interface_that_gloo_cannot_bind() -> None:
    with pytest.raises(StageError, match="gloo cannot use the interface none0"):
        accelerators._open_gloo("none0")


# The operating system.


def test_shared_memory(tmp_path: Path) -> None:
    assert "shm is missing" in errors(lambda: operating_system.check_shared_memory(tmp_path / "shm"))
    assert "--shm-size" in warnings(lambda: operating_system.check_shared_memory(tmp_path, 2**60))


@pytest.mark.parametrize(
    ("number", "value", "level", "message"),
    [
        (resource.RLIMIT_NOFILE, 256, "error", "256 open files: `ulimit -n 4096`"),
        (resource.RLIMIT_NOFILE, 1024, "warning", "1,024 open files"),
        (resource.RLIMIT_NPROC, 100, "error", "100 processes and threads of the user"),
        (resource.RLIMIT_FSIZE, 999, "error", "999 bytes of a file"),
        (resource.RLIMIT_FSIZE, 1001, "ok", "bytes of a file"),
        (resource.RLIMIT_MEMLOCK, 65536, "error", "65,536 bytes of locked memory, which InfiniBand needs"),
        (resource.RLIMIT_AS, 2**40, "warning", "bytes of addresses"),
    ],
)
def test_limits(tmp_path: Path, number: int, value: int, level: str, message: str) -> None:
    (tmp_path / "mlx5_0").mkdir()

    def limits(asked: int) -> tuple[int, int]:
        return (value, value) if asked == number else (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    found = of(level, operating_system.check_limits(1000, limits, tmp_path))
    assert message in found
    if level != "ok":
        assert "by the administrator" in found


@pytest.mark.parametrize(("needed", "level"), [(80, "ok"), (95, "warning"), (101, "error")])
def test_memory(needed: int, level: str) -> None:
    assert [finding.level for finding in operating_system.check_memory(needed, 100)] == [level]


@pytest.mark.parametrize(("own", "file"), [
    ("0::/slurm/job_1/step_0\n", "slurm/job_1/memory.max"),
    ("3:cpu:/x\n4:memory:/slurm/job_1\n", "memory/slurm/job_1/memory.limit_in_bytes"),
])  # fmt: skip
def test_the_memory_of_a_job_is_its_limit(tmp_path: Path, own: str, file: str) -> None:
    (tmp_path / "own").write_text(own)
    assert memory_limit(tmp_path / "own", tmp_path) == psutil.virtual_memory().total
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("12345\n")
    assert memory_limit(tmp_path / "own", tmp_path) == 12345


# Disks.


def test_directories_of_one_disk_are_one_line(tmp_path: Path) -> None:
    directories = {"data": tmp_path / "data/of/it", "outputs": tmp_path, "shm": Path("/dev/shm")}
    assert disks.by_file_system(directories) == {"data, outputs": tmp_path, "shm": Path("/dev/shm")}


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
    found = list(doctor._disks(ALONE, None, None, None))
    assert of("error", found).startswith(f"error    outputs: cannot write into {empty_project}/outputs (Permission")
    assert "data: rename and fsync work" in of("ok", found)
    monkeypatch.setattr(tempfile, "tempdir", str(empty_project / "tmp"))
    shutil.rmtree(empty_project / "data")
    (empty_project / "outputs").rmdir()
    assert "data, outputs, TMPDIR: rename and fsync work" in of("ok", doctor._disks(ALONE, None, None, None))


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 2**30 - 1
    monkeypatch.setattr(disks.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert "free some space" in warnings(lambda: disks.check_space("data", tmp_path))
    free = 2**20
    assert "free some space" in errors(lambda: disks.check_space("data", tmp_path))
    monkeypatch.setattr(disks.os, "statvfs", lambda path: SimpleNamespace(f_files=10**6, f_favail=3))
    assert "only 3 more files fit" in errors(lambda: disks.check_space("data", tmp_path, 1))


def test_a_file_system_that_works(tmp_path: Path) -> None:
    assert [finding.level for finding in disks.check_file_system("data", tmp_path)] == ["ok", "ok"]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "cannot write into" in errors(lambda: disks.check_file_system("data", file))


def test_locks_that_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = lambda: disks.check_file_system("data", tmp_path)  # noqa: E731
    monkeypatch.setattr(disks, "local_locks", lambda path: "nfs mounted with nolock")
    assert "only processes of this node (nfs mounted with nolock)" in warnings(check)
    assert "nolock" in errors(lambda: disks.check_file_system("data", tmp_path, num_nodes=2))
    monkeypatch.setattr(disks, "flock", lambda lock, operation: True)
    assert "a lock does not exclude another process" in errors(check)

    def fail(lock: Any, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.undo()
    monkeypatch.setattr(fcntl, "flock", fail)
    assert "cannot be locked (Function not implemented)" in errors(check)


def test_renames_and_fsyncs_that_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = lambda: disks.check_file_system("data", tmp_path)  # noqa: E731
    assert "an fsync takes" in warnings(lambda: disks.check_file_system("data", tmp_path, slow_seconds=0))

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        assert "Input/output error" in errors(check)
    monkeypatch.setattr(disks.publish, "write_text", lambda path, text: path.write_text("old"))
    assert "does not replace a file by a rename" in errors(check)


# Inputs.


def test_a_model_that_was_changed(training: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(training.path)
    params = inputs.load().inputs
    config = training / "models/nano/config.json"
    flip_bit(config, 30)
    assert not errors(lambda: inputs.check_model(params, False, OFFLINE))
    assert "config.json was changed since the download" in errors(lambda: inputs.check_model(params, True, OFFLINE))
    config.write_text("{}")
    assert "config.json was changed since the download" in errors(lambda: inputs.check_model(params, False, OFFLINE))
    config.unlink()
    assert "has no config.json" in errors(lambda: inputs.check_model(params, False, OFFLINE))
    (training / "data/model.json").unlink()
    assert "has no config.json" in errors(lambda: inputs.check_model(params, False, OFFLINE))


def test_another_model_than_the_one_of_the_manifest(training: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(training.path)
    shutil.copytree(training / "models/nano", training / "models/other")
    (training / "models/other/model.safetensors").write_bytes(b"not whole")
    check = lambda: inputs.check_model(inputs.load().inputs, False, OFFLINE)  # noqa: E731
    training.set(model_name="models/other")
    assert "model.safetensors is incomplete or damaged" in errors(check)
    (training / "models/other/model.safetensors").unlink()
    assert "data/model.json is of other parameters; models/other is in models/other" in warnings(check)
    training.set(model_name="models/missing")
    assert "there is no such directory" in errors(check)


HUB_ID, COMMIT = "someone/nano", "fedcba9876543210fedcba9876543210fedcba98"


@pytest.fixture
def cached(training: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a model of the Hub in its HF_HOME, but no manifest; returns the directory of its files."""
    monkeypatch.chdir(training.path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(training / "hub"))
    monkeypatch.setenv("HF_HOME", str(training.path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    training.set(model_name=HUB_ID)
    (training / "data/model.json").rename(training / "nano.json")
    repository = training / f"hub/models--{HUB_ID.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for directory in (repository / "blobs", repository / "refs", snapshot):
        directory.mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    files = {path.name: path.read_bytes() for path in (training / "models/nano").iterdir()}
    files["model.safetensors"] = safetensors.numpy.save({"weight": np.zeros(1000, np.float32)})
    for name, content in files.items():
        digest = hashlib.sha256(content).hexdigest()
        (repository / "blobs" / digest).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{digest}")
    return snapshot


def test_a_cached_model_that_no_manifest_describes(cached: Path) -> None:
    params = inputs.load().inputs
    weights = cached / "model.safetensors"
    assert "data/model.json is missing; someone/nano is in" in warnings(
        lambda: inputs.check_model(params, True, OFFLINE)
    )
    assert not errors(lambda: inputs.check_model(params, True, OFFLINE))
    flip_bit(weights, -1)
    assert not errors(lambda: inputs.check_model(params, False, OFFLINE))
    assert "is damaged: it is model.safetensors" in errors(lambda: inputs.check_model(params, True, OFFLINE))
    weights.write_bytes(weights.read_bytes()[:100])
    assert "is incomplete or damaged" in errors(lambda: inputs.check_model(params, False, OFFLINE))


def test_a_manifest_of_other_initial_weights(cached: Path, training: Project) -> None:
    """It was written for random weights, which need none, and the parameters have changed since."""
    check = lambda: inputs.check_model(inputs.load().inputs, False, OFFLINE)  # noqa: E731
    training.set(initial_weights="random")
    names = hub.model_files(hub.resolve(HUB_ID, "main", want_weights=False))
    described = {"model_name": HUB_ID, "commit": COMMIT, "files": {name: FileEntry.of(cached / name) for name in names}}
    dataclasses.replace(ModelManifest.read(training / "nano.json"), **described).write()
    assert "have the size of data/model.json" in of("ok", check())
    training.set(initial_weights="pretrained")
    assert "is of other parameters" in warnings(check)
    (cached / "model.safetensors").unlink()
    assert "lacks model.safetensors" in errors(check)


def test_data_of_other_parameters(training: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(training.path)
    check = lambda: inputs.check_data(inputs.load().inputs)  # noqa: E731
    Path("data/pack.json").write_text('{"origin": {"params": {"seq_length": 32}, "packages": {}}}')
    assert not errors(check)
    assert "other parameters" not in warnings(check)
    training.set(seq_length=64, raw_dir="nowhere")
    found = warnings(check)
    assert "raw_dir nowhere is not a directory" in found
    assert "data/pack.json is of other parameters: seq_length was 32 and is 64" in found
    assert "`dvc repro pack`" in found


def test_tokens_that_are_damaged(training: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(training.path)
    [shard] = (training / "data/tokens/train").glob("*.arrow")
    content = shard.read_bytes()
    flip_bit(shard, len(content) // 2)
    assert not errors(lambda: inputs.check_tokens(False))
    assert "is damaged" in errors(lambda: inputs.check_tokens(True))
    shard.write_bytes(content[: len(content) // 2])
    assert "is not a complete Arrow file" in errors(lambda: inputs.check_tokens(False))
    shard.unlink()
    assert "is missing" in errors(lambda: inputs.check_tokens(False))
    shutil.rmtree(training / "data/tokens")
    assert warnings(lambda: inputs.check_tokens(False)).count("`dvc repro pack`") == 2


def test_parameters_and_packages_that_they_need(training: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(training.path)
    check = lambda: inputs.check_extras(inputs.load())  # noqa: E731
    monkeypatch.setattr(inputs.fast_tokenizer, "DIRECTORY", training / "missing")
    assert "`python -m scripts.install_encoder` installs it" in errors(check)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    training.set(fast_encoder=False, runtime={"tracker": "wandb"})
    assert "the package wandb is not installed" in errors(check)
    training.set(runtime={"tracker": "none"}, optimizer="adamw_8bit")
    assert "needs torchao, which is not installed" in errors(check)
    training.set(optimizer="adam", seed=-1)
    assert {"optimizer", "seed"} <= set(errors(lambda: doctor._read_params([])).split())


def test_a_plan_that_cannot_be_read(empty_project: Path) -> None:
    (empty_project / "outputs").mkdir()
    (empty_project / "outputs/plan.json").write_text("{}")
    assert "plan.json is not valid" in errors(lambda: doctor._read_plan(None, []))


@pytest.fixture
def planned(training: Project, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The plan of 32 ranks, in a project of which it is."""
    monkeypatch.chdir(training.path)
    params = inputs.load().params
    model, tokens = ModelManifest.read(), plan.PackedTokens.read(plan.TRAIN)
    estimated = plan.estimate(params, model, tokens, tokens)
    estimated = dataclasses.replace(estimated, inputs=plan.inputs_digest(params), num_ranks=32, peak=PEAK)
    estimated.write(plan.outputs.PLAN)
    return estimated


@pytest.mark.parametrize("changed", ["params", "tokens", "model"])
def test_a_plan_of_something_else(training: Project, planned: Plan, changed: str) -> None:
    plans: list[Plan] = []
    check = lambda: doctor._read_plan(inputs.load(), plans)  # noqa: E731
    assert not warnings(check) and plans == [planned]
    plans.clear()
    if changed == "params":
        training.set(batch_size=3)
    elif changed == "tokens":
        shutil.rmtree(training / "data/tokens/train")
        shutil.copytree(training / "data/tokens/validation", training / "data/tokens/train")
    else:
        (training / "data/model.json").write_text((training / "data/model.json").read_text() + " ")
    assert "plan.json is of other parameters, tokens or another model: disk and memory are not" in warnings(check)
    assert plans == []


def test_a_login_node_is_not_where_the_ranks_are(training: Project, planned: Plan) -> None:
    training.set(runtime={"launcher": "sbatch", "num_nodes": 4, "nproc_per_node": 8})
    find = lambda: doctor._accelerators(ALONE, inputs.load(), planned, {})  # noqa: E731
    found = of("ok", find())
    assert "plan.json is for 32 ranks, as many as a launch here starts on other nodes" in found
    assert "of memory" not in found
    assert not of("error", find())
    training.set(runtime={"num_nodes": 2})
    assert "a launch here starts 16, of which the memory is not known: set plan.num_ranks to 16" in warnings(find)
    training.set(runtime={"nproc_per_node": None})  # one for each GPU, of nodes that are not known here
    assert "plan.num_ranks" not in warnings(find)


def test_ranks_of_an_allocation(training: Project, planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    allocation = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4"}
    for name, value in allocation.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{REPO}/tests/fake_slurm:{os.environ['PATH']}")
    training.set(runtime={"nproc_per_node": 8})
    find = lambda: doctor._accelerators(ALONE, inputs.load(), planned, allocation)  # noqa: E731
    assert "the ranks of this machine need 0.016 GiB of its" in of("ok", find())  # of 8 ranks
    training.set(runtime={"num_nodes": 5})
    assert "but this is in an allocation of 4" in errors(find)


# DVC.


@pytest.fixture
def dvc(tmp_path: Path) -> Callable[..., Mapping[str, Any]]:
    """A project of DVC, and a function that writes its settings and reads them."""
    (tmp_path / ".dvc/tmp").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")

    def read(text: str = "[core]\n    analytics = false\n    check_update = false\n") -> Mapping[str, Any]:
        (tmp_path / ".dvc/config").write_text(text)
        return dvc_settings.read_config(tmp_path)

    return read


def test_a_project_that_dvc_does_not_find(tmp_path: Path, dvc: Callable[..., Mapping[str, Any]]) -> None:
    config = dvc()
    check = lambda: dvc_settings.check_project(config, tmp_path)  # noqa: E731
    assert not errors(check)
    (tmp_path / "dvc.lock").write_text("<<<<<<< HEAD\n- a: [\n")
    assert "dvc.lock is not valid YAML" in errors(check)
    (tmp_path / "dvc.yaml").unlink()
    assert "dvc.yaml is missing" in errors(check)
    (tmp_path / ".git").rmdir()
    assert ".git is missing" in errors(check)
    config = dvc("[core]\n    no_scm = true\n")
    assert ".git is missing" not in errors(check)
    shutil.rmtree(tmp_path / ".dvc")
    assert ".dvc is missing" in errors(check)


def test_settings_of_dvc_that_cannot_be_read(dvc: Callable[..., Mapping[str, Any]]) -> None:
    for text in ("[[[", "[cache]\n    type = telepathy\n"):
        assert "DVC: config file error" in errors(lambda text=text: dvc(text) and [])  # type: ignore[misc]


def test_the_cache_of_dvc(
    tmp_path: Path, dvc: Callable[..., Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()

    def check(settings: str) -> Callable[[], Iterable[Finding]]:
        return lambda: dvc_settings.check_cache(dvc(f"[cache]\n    dir = {cache}\n{settings}"), tmp_path)

    assert "belong to its group: `chmod g+s " in warnings(check("    shared = group\n"))
    cache.chmod(0o2775)
    assert not warnings(check("    shared = group\n"))
    monkeypatch.setattr(dvc_settings.os, "access", lambda path, mode: False)
    assert "cannot write into DVC's cache" in errors(check(""))
    cache = Path("/dev/shm")
    assert "on another file system: no such links" in errors(check("    type = hardlink\n"))
    assert "so DVC copies everything" in warnings(check("    type = reflink,copy\n"))
    assert not warnings(check("    type = reflink,hardlink,symlink\n"))


def test_the_site_cache_of_dvc(
    tmp_path: Path, dvc: Callable[..., Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DVC_SITE_CACHE_DIR", raising=False)
    config = dvc(f"[core]\n    site_cache_dir = {tmp_path}/site\n")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 0:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / {tmp_path} rw - nfs4 server:/a rw\n")
    assert "is on nfs4" in warnings(lambda: dvc_settings.check_site_cache(config, mounts))
    monkeypatch.setattr(dvc_settings.os, "access", lambda path, mode: False)
    assert "cannot write into DVC's site cache" in errors(lambda: dvc_settings.check_site_cache(config))


def test_locks_that_dvc_has_left(tmp_path: Path, dvc: Callable[..., Mapping[str, Any]]) -> None:
    config = dvc()
    check = lambda: dvc_settings.check_locks(config, tmp_path)  # noqa: E731
    rwlock = tmp_path / ".dvc/tmp/rwlock"
    info = {"pid": os.getpid(), "cmd": "dvc repro"}  # of this process, which is another program
    rwlock.write_text(json.dumps({"write": {"data": info}, "read": {}}))
    assert f"names process {os.getpid()}, which is not dvc here" in errors(check)
    command = ["sh", "-c", "echo; read dvc", "dvc"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()  # before, the kernel may not know its command line yet
        rwlock.write_text(json.dumps({"read": {"data": [{"pid": running.pid, "cmd": "dvc repro"}]}}))
        assert f"process {running.pid} holds it (dvc repro)" in warnings(check)
        running.kill()
    assert not errors(check) and not warnings(check)  # it has ended: DVC removes its lock
    for text in ("{", "[]", '{"write": {"data": 1}}'):
        rwlock.write_text(text)
        assert "rwlock is damaged" in errors(check)
    rwlock.unlink()
    with open_lock(tmp_path / ".dvc/tmp/lock") as lock:
        assert not warnings(check)
        flock(lock, fcntl.LOCK_EX)
        assert "a dvc runs in this clone" in warnings(check)
    config = dvc("[core]\n    hardlink_lock = true\n")
    assert "a dvc runs, or was killed" in warnings(check)


# What would open a connection.


@pytest.mark.parametrize(
    ("model", "environment", "level", "message"),
    [
        ("models/tiny-llama", {}, "ok", "is a directory"),
        ("a/b", {"HF_HUB_OFFLINE": "1"}, "ok", "HF_HUB_OFFLINE is set"),
        ("a/b", {"HF_HUB_OFFLINE": "0"}, "error", "lacks files of a/b, and HF_HUB_OFFLINE is not set"),
    ],
)
def test_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, environment: dict[str, str], level: str, message: str
) -> None:
    monkeypatch.chdir(REPO)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    params = inputs.InputParams("data/raw", model, "main", "auto", False)
    assert message in of(level, offline.check_hub(params, environment))
    monkeypatch.setattr(inputs, "MANIFEST", tmp_path / "missing")
    # Of what is missing one line is enough, and that the user forbids fetching it must be true.
    found = errors(lambda: inputs.check_model(params, False, environment))
    assert ("HF_HUB_OFFLINE forbids fetching it" in found) == (environment.get("HF_HUB_OFFLINE") == "1"), found
    assert bool(found) == (environment.get("HF_HUB_OFFLINE") == "1"), found


def test_a_cached_model_that_is_refused_would_not_be_fetched(cached: Path) -> None:
    config = json.loads((cached / "config.json").read_text())
    (cached / "config.json").unlink()
    (cached / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "m.M"}}))
    found = errors(lambda: offline.check_hub(inputs.load().inputs, {}))
    assert "asks for code of its own (auto_map)" in found
    assert "would connect" not in found


def test_proxies_are_named_without_their_passwords() -> None:
    found = warnings(lambda: offline.check_proxies({"HTTPS_PROXY": "http://me:secret@proxy", "no_proxy": "*"}))
    assert "HTTPS_PROXY is set: unset it where no model is downloaded" in found
    assert "secret" not in found
    assert not warnings(lambda: offline.check_proxies({"http_proxy": ""}))


def test_services() -> None:
    dask = inputs.ExecutorRuntime("dask", "tcp://head:8786")
    assert "the data stages connect to tcp://head:8786" in warnings(lambda: offline.check_services(dask, "none"))
    local = inputs.ExecutorRuntime("processes", None)
    assert "tracker wandb writes files only" in of("ok", offline.check_services(local, "wandb"))


def test_connections_of_dvc(dvc: Callable[..., Mapping[str, Any]]) -> None:
    assert not warnings(lambda: offline.check_dvc(dvc(), {}))
    config = dvc("['remote \"store\"']\n    url = s3://bucket/a\n['remote \"here\"']\n    url = /shared/dvc\n")
    found = warnings(lambda: offline.check_dvc(config, {}))
    assert "core.analytics false" in found and "core.check_update false" in found
    assert "connect to the remote store (s3)" in found and "remote here" not in found
    assert "core.analytics" not in warnings(lambda: offline.check_dvc(config, {"DVC_NO_ANALYTICS": "1"}))


# Several nodes.

FACTS = {"packages": "a", "data/model.json": "b"}


def two_nodes(
    shared: Path, other: Path | None = None, facts: Mapping[str, str] = FACTS, ahead: float = 0, seconds: float = 20
) -> tuple[list[Finding], list[Finding]]:
    """What both find, the second with another directory, other facts, or a clock that is ahead by some seconds."""
    answers: list[Finding] = []
    first = threading.Thread(
        target=lambda: answers.extend(nodes.check_nodes(Node("n1", 0, 2, "7.0.0"), FACTS, shared, seconds=seconds))
    )
    first.start()
    clock = lambda: time.time() + ahead  # noqa: E731
    asked = list(nodes.check_nodes(Node("n2", 1, 2, "7.0.0"), facts, other or shared, seconds=seconds / 2, clock=clock))
    first.join()
    return answers, asked


def test_two_nodes_that_agree(tmp_path: Path) -> None:
    answers, asked = two_nodes(tmp_path)
    assert {finding.level for finding in (*answers, *asked)} == {"ok"}
    assert list(tmp_path.iterdir()) == []


def test_nodes_without_a_shared_disk(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    answers, asked = two_nodes(tmp_path / "a", tmp_path / "b", seconds=0.4)
    assert "1 of 2 nodes (SLURM_NODEID 1) were not seen in" in of("error", answers)
    assert "this node does not see what the node of SLURM_NODEID 0 writes into" in of("error", asked)


def test_a_node_that_is_late_leaves_nothing(tmp_path: Path) -> None:
    """It has seen the first node, which then waits no longer and removes the directory."""
    directory = tmp_path / ".doctor-7.0.0"

    def gone() -> float:  # the clock is asked just before the question is written
        shutil.rmtree(directory)
        return 0

    directory.mkdir()
    (directory / "facts.json").write_text(json.dumps({"node": "n1", "facts": FACTS}))
    (directory / "lock").touch()
    late = Node("n2", 1, 2, "7.0.0")
    assert "this node is late: the check of the node of SLURM_NODEID 0 has ended: raise --wait" in errors(
        lambda: nodes.check_nodes(late, FACTS, tmp_path, 0.1, gone)
    )
    assert list(tmp_path.iterdir()) == []


def test_nodes_with_different_files_or_packages(tmp_path: Path) -> None:
    _, asked = two_nodes(tmp_path, facts={"packages": "other", "dvc.lock": "c", "data/model.json": "b"})
    assert "not the same as on n1: dvc.lock, packages: " in of("error", asked)


@pytest.mark.parametrize(("ahead", "message"), [(5, "ahead of that of n1"), (-5, "behind that of n1"), (0.5, "")])
def test_clocks_that_differ(tmp_path: Path, ahead: float, message: str) -> None:
    _, asked = two_nodes(tmp_path, ahead=ahead)
    assert message in of("warning", asked)
    assert bool(message) == bool(of("warning", asked))


def test_nodes_that_do_not_see_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "flock", lambda lock, operation: True)
    assert "this node does not see a lock that n1 holds" in of("error", two_nodes(tmp_path)[1])


def test_what_nodes_compare(tmp_path: Path) -> None:
    before = nodes.facts(tmp_path)
    (tmp_path / "dvc.lock").write_text("a")
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/a.py").write_text("b")
    after = nodes.facts(tmp_path)
    assert {name for name in after if before.get(name) != after[name]} == {"dvc.lock", "stages/"}
