"""Each error that the doctor knows is planted, and seen."""

import ast
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.numpy
from dvc.config import Config

from stages import doctor, plan
from stages.base.errors import StageError
from stages.base.record import FileEntry
from stages.checks import accelerators, dvc_settings, findings, installation, machine, settings
from stages.checks.findings import Found
from stages.model import hub
from stages.model.manifest import ModelManifest
from stages.plan import Plan
from stages.planning.memory_plan import PeakMemory
from stages.ranks.memory import memory_limit
from tests.project import REPO, Project, flip_bit

pytestmark = pytest.mark.filterwarnings("ignore:_NoneStep:DeprecationWarning")  # of what DVC uses

OFFLINE = {"HF_HUB_OFFLINE": "1"}
PEAK = PeakMemory(2**20, False, 0, 0, 0, 0, 0, 0, 2**20)


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


def start(project: Path, **environment: str) -> "subprocess.Popen[str]":
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "SLURM_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "stages.doctor"], cwd=project, text=True, stdout=-1, stderr=-2,
        env={**inherited, "PYTHONPATH": str(REPO), **environment},
    )  # fmt: skip


def test_a_node_of_a_broken_project_reports_everything_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("seed: [")
    process = start(tmp_path, SLURM_STEP_NUM_NODES="2", SLURM_STEP_ID="0", SLURM_LOCALID="0", SLURMD_NODENAME="n2")
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    assert all(line.startswith("n2: ") for line in output.splitlines())
    for expected in (
        "error    params.yaml is not valid YAML",
        "error    dvc: you are not inside of a DVC repository",
        ".lock is missing: run the doctor in the root of the project",
        "warning  data/tokens/train is missing",
    ):
        assert expected in output, output
    assert not list(tmp_path.glob("**/.doctor*"))


def test_only_one_task_of_a_node_checks_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["doctor"])
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    doctor.main()
    assert capsys.readouterr().out == ""


@pytest.fixture
def ready(training: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project that can train, with the plan of two ranks."""
    monkeypatch.chdir(training.path)
    for name in ("pyproject.toml", "requirements-cpu.lock", "requirements-cuda.lock"):
        (training / name).symlink_to(REPO / name)
    training.run("git", "init", "-q")
    (training / ".dvc").mkdir()
    shutil.copy(REPO / ".dvc/config", training / ".dvc")
    (training / "data/raw").mkdir(exist_ok=True)
    write_plan()
    monkeypatch.setattr(installation, "check_packages", lambda: iter(()))  # those of the tests may differ
    return training


def write_plan(num_ranks: int = 2) -> Plan:
    """The plan of the project here, for some ranks."""
    params, runtime = plan.load_params(plan.TrainParams), plan.load_params(plan.TrainRuntime, "runtime")
    estimated = plan.check(params, runtime, None)
    estimated = dataclasses.replace(estimated, inputs=plan.inputs_digest(params), num_ranks=num_ranks, peak=PEAK)
    estimated.write(plan.outputs.PLAN)
    return estimated


def diagnose(level: str = "error", full: bool = False, **environment: str) -> str:
    return lines(level, lambda: doctor._find(1, full, environment))


def test_a_project_that_can_train_has_no_errors(ready: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(doctor.find(1, True, {}))
    assert [str(finding) for finding in found if finding.level == "error"] == []
    text = "\n".join(map(str, found))
    for expected in (
        "96 rows, with their SHA-256",
        "have the size and SHA-256 of data/model.json",
        "their checkpoints and the model fit on the disk",
        "the ranks of this machine need 0.00",
        "precision fp32, attention auto and loss auto work here",
    ):
        assert expected in text, text
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "checkpoints and the model need" in diagnose()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 3}, "total_batch_size 8 is not a multiple of batch_size 3 x 2 ranks"),
        ({"num_splits": 1}, "validation_splits is 1 of num_splits = 1 splits, which leaves none to train on"),
        ({"attention": "flash_attention_2"}, "there is no such value any more: use varlen, the same kernel in torch,"),
        ({"activation_checkpointing": "selective"}, "there is no such value any more: use selective_op"),
        ({"attention": "flex"}, "attention flex does not work with"),
        ({"precision": "fp8"}, "precision fp8 needs GPUs"),
        ({"optimizer": "adamw_8bit"}, "needs torchao, which is not installed"),
        ({"runtime": {"tracker": "wandb"}}, "the package wandb is not installed"),
        ({"fast_encoder": True}, "`python -m scripts.install_encoder` installs it"),
        ({"raw_dir": "data"}, "raw_dir is 'data', which contains"),
        ({"extend_from": "0" * 16}, "cannot be extended"),
        ({"max_shard_size": "5 potatoes"}, "max_shard_size is '5 potatoes'"),
        ({"optimizer": "adam", "seed": -1}, "optimizer is 'adam'"),
        ({"num_epochs": 1, "total_batch_size": 200}, "are less than one step of total_batch_size 200"),
        ({"fsdp": {"strategy": "none"}}, "fsdp.strategy none trains on one rank, but there are 2"),
    ],
)
def test_what_a_stage_refuses_is_an_error(
    ready: Project, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], message: str
) -> None:
    found = {name: importlib.util.find_spec(name) for name in ("wandb", "torchao", "distributed")}
    found.update(wandb=None, torchao=None)
    monkeypatch.setattr("importlib.util.find_spec", found.__getitem__)
    monkeypatch.setattr("stages.tokenizing.fast_tokenizer.DIRECTORY", ready / "missing")
    ready.set(**values)
    assert message in diagnose()


@pytest.mark.parametrize("name", ["data", "outputs", "outputs/test"])
def test_a_file_in_the_place_of_a_directory_is_an_error(ready: Project, name: str) -> None:
    if (ready / name).exists():
        shutil.rmtree(ready / name)
    (ready / name).write_text("")
    assert f"{ready / name} is not a directory, and stages make one there: move it away" in diagnose()


def test_packages_that_are_missing_are_lines_and_not_the_end(tmp_path: Path) -> None:
    """-S: none is found."""
    command = [sys.executable, "-S", "-m", "stages.doctor"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPO)}, text=True, stdout=-1, stderr=-2
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    assert done.stdout.count("(No module named 'pydantic'): install the lock") == 1


def test_what_no_check_expects_is_a_line_too() -> None:
    def check() -> Found[None]:
        yield findings.ok("first")
        raise ZeroDivisionError("of\nnothing")

    assert [finding.level for finding in findings.collect(check())] == ["ok", "error"]
    assert "a check failed with ZeroDivisionError (of nothing)" in errors(check)


# Installation.


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


@pytest.mark.parametrize(("build", "local"), [("cpu", "+cpu"), ("cuda", "")])
def test_packages_are_compared_with_the_lock_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str, local: str
) -> None:
    monkeypatch.setattr(installation, "version", lambda name: f"2.13.0{local}")
    pins = [f"{name}=={importlib.metadata.version(name)}" for name in ("numpy", "pytest")]
    other = "old==1 ; python_full_version < '3.0'"
    lock = tmp_path / f"requirements-{build}.lock"
    for missing, level, message in (
        ("", "ok", f"the packages are those of {lock.name}"),
        (
            "pytest==0.1",
            "warning",
            "No matching distribution found for pytest==0.1: install the lock",
        ),
    ):
        lock.write_text("\n".join([*pins[: 1 if missing else 2], other, missing]))
        [finding] = installation.check_packages(tmp_path)
        assert finding.level == level
        assert message in str(finding)


# GPUs.


def test_gpus_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = partial(accelerators.check_gpus, None, tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "is the CPU build, and this machine has no GPU" in oks(check)
    (tmp_path / "nvidia0").touch()
    assert "install the CUDA build with `make setup`" in errors(check)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert "check the driver with `nvidia-smi`" in errors(check)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "finds no GPU, of 1 (CUDA_VISIBLE_DEVICES is '')" in warnings(check)


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
    assert "computes on 1 GPUs (H100)" in oks(lambda: accelerators.check_gpus(1))


def test_fp32_on_a_gpu_is_named(ready: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "made for bf16" not in diagnose("warning")
    monkeypatch.setattr(accelerators, "device_type", lambda: "cuda")
    assert "precision fp32 uses a small part of a GPU, which is made for bf16" in diagnose("warning")
    ready.set(precision="bf16")
    assert "made for bf16" not in diagnose("warning")


def test_a_missing_compiler_is_named_where_layers_are_compiled(tmp_path: Path) -> None:
    code = "from stages.checks import accelerators, findings\nprint(*findings.collect(accelerators.check_compiler()))"
    (tmp_path / "cache").mkdir()  # in which nothing may be found that needs no compiler
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO,
        env={**os.environ, "CXX": "/missing/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    expected = "error    compile: torch finds no compiler of C++ that works: install g++"
    assert found.stdout.startswith(expected), (found.stdout, found.stderr)
    assert "/missing/g++" in found.stdout
    assert not list((tmp_path / "cache").iterdir())


def test_the_compiler_is_tried_where_layers_are_compiled(ready: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "check_compiler", lambda: iter([findings.ok("the compiler works")]))
    assert "the compiler works" not in diagnose("ok")
    ready.set(compile=True)
    assert "the compiler works" in diagnose("ok")


@pytest.mark.parametrize(
    ("total", "is_upper_bound", "level"),
    [(90, False, "ok"), (96, False, "warning"), (101, False, "error"), (101, True, "warning")],
)
def test_the_memory_of_gpus(
    ready: Project, monkeypatch: pytest.MonkeyPatch, total: int, is_upper_bound: bool, level: str
) -> None:
    monkeypatch.setattr(accelerators, "num_gpus", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(total_memory=100))
    found, memory = value(settings.load()), PeakMemory(total, is_upper_bound, *[0] * 7)
    planned = dataclasses.replace(write_plan(), peak=memory)
    found = lines(level, lambda: accelerators.check_memory(planned, found.train, found.runtime, 2, 1))
    assert ("a GPU has" if level == "error" else "of a GPU") in found


def test_a_plan_of_one_node_says_nothing_of_shards_within_several(ready: Project) -> None:
    found, memory = value(settings.load()), PeakMemory(1, False, *[0] * 7)
    planned = dataclasses.replace(write_plan(), peak=memory)
    hybrid = dataclasses.replace(found.train.fsdp, preset="multi_node_fsdp")
    for fsdp, expected in ((hybrid, True), (found.train.fsdp, False)):
        train = dataclasses.replace(found.train, fsdp=fsdp)
        text = warnings(partial(accelerators.check_memory, planned, train, found.runtime, 2, 2))
        assert ("set fsdp.size to 1" in text) == expected


@pytest.mark.parametrize(("limit", "level"), [(10 * 2**20, "ok"), (2**22 + 2, "warning"), (2**22 - 1, "error")])
def test_the_memory_of_cpus(ready: Project, monkeypatch: pytest.MonkeyPatch, limit: int, level: str) -> None:
    monkeypatch.setattr(accelerators, "memory_limit", lambda: limit)
    assert "the ranks of this machine need 0.004 GiB" in diagnose(level)


@pytest.mark.parametrize("changed", ["params", "tokens", "model"])
def test_a_plan_of_something_else(ready: Project, changed: str) -> None:
    planned = Plan.read(plan.outputs.PLAN)
    check = partial(settings.check_plan, value(settings.load()), 2, True)
    assert not warnings(check) and value(check()) == planned
    if changed == "params":
        ready.set(batch_size=1)
    elif changed == "tokens":
        shutil.rmtree(ready / "data/tokens/train")
        shutil.copytree(ready / "data/tokens/validation", ready / "data/tokens/train")
        ready.set(num_epochs=20)
    else:
        (ready / "data/model.json").write_text((ready / "data/model.json").read_text() + " ")
    check = partial(settings.check_plan, value(settings.load()), 2, True)
    assert "plan.json is of other parameters, tokens or another model: memory is not compared" in warnings(check)
    assert value(check()) is None
    plan.outputs.PLAN.write_text("{}")
    assert "plan.json is not valid" in errors(check)


def test_a_login_node_is_not_where_the_ranks_are(ready: Project) -> None:
    ready.set(batch_size=1, runtime={"launcher": "sbatch", "num_nodes": 4, "nproc_per_node": 2})
    assert not diagnose()
    assert "of memory" not in diagnose("ok")
    ready.set(runtime={"nproc_per_node": 8})
    assert "is not a multiple of batch_size 1 x 32 ranks" in diagnose()
    ready.set(runtime={"nproc_per_node": None})  # one for each GPU, of nodes that are not known here
    assert not diagnose()


def test_ranks_of_an_allocation(ready: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    allocation = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}
    for name, of_name in allocation.items():
        monkeypatch.setenv(name, of_name)
    monkeypatch.setenv("PATH", f"{REPO}/tests/fake_slurm:{os.environ['PATH']}")
    ready.set(runtime={"nproc_per_node": 2})
    assert "has the memory of 2 ranks, and a launch here starts 4: set plan.num_ranks to 4" in diagnose(
        "warning", **allocation
    )
    write_plan(num_ranks=4)
    assert "the ranks of this machine need 0.004 GiB of its" in diagnose("ok", **allocation)  # of 2 ranks
    ready.set(runtime={"num_nodes": 5})
    assert "but this is in an allocation of 2" in diagnose(**allocation)


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


# The machine.


@pytest.mark.parametrize(
    ("home", "user", "expected"),
    [
        ("", "", "HOME and USER are not set, and the system knows no user"),
        ("/tmp", "", "USER is not set"),
        ("", "me", "HOME is not set"),
    ],
)
def test_a_user_that_the_system_does_not_know(
    ready: Project, monkeypatch: pytest.MonkeyPatch, home: str, user: str, expected: str
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": home, "USER": user}.items():
        if value:
            monkeypatch.setenv(name, value)
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


# The model and the tokens.


def check_model(full: bool = False, environment: Mapping[str, str] = OFFLINE) -> Callable[[], Found[Any]]:
    return lambda: settings.check_model(plan.load_params(settings.DownloadParams), full, environment)


def test_a_model_that_was_changed(training: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(training.path)
    config = training / "models/nano/config.json"
    flip_bit(config, 30)
    assert not errors(check_model())
    assert "config.json is damaged or was changed" in errors(check_model(full=True))
    config.write_text("{}")
    assert "config.json is damaged or was changed" in errors(check_model())
    config.unlink()
    assert "has no config.json" in errors(check_model())
    training.set(model_name="models/missing")
    assert "there is no such directory" in errors(check_model())


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


def test_a_manifest_of_other_initial_weights(cached: Path, training: Project) -> None:
    """It was written for random weights, which need none, and the parameters have changed since."""
    assert "data/model.json is missing, or of other parameters" in warnings(check_model())
    training.set(initial_weights="random")
    names = hub.model_files(hub.resolve(HUB_ID, "main", want_weights=False))
    described = {"model_name": HUB_ID, "commit": COMMIT, "files": {name: FileEntry.of(cached / name) for name in names}}
    dataclasses.replace(ModelManifest.read(training / "nano.json"), **described).write()
    assert "have the size of data/model.json" in oks(check_model())
    training.set(initial_weights="pretrained")
    assert "of other parameters" in warnings(check_model())
    (cached / "model.safetensors").unlink()
    assert "lacks model.safetensors" in errors(check_model())
    # Of what is missing one line is enough, and that the user forbids fetching it must be true.
    online = errors(check_model(environment={"HF_HUB_OFFLINE": "0"}))
    assert f"`download` would connect to the Hub: {cached.parents[2]} lacks files of" in online
    assert "HF_HUB_OFFLINE forbids" not in online


def test_a_cached_model_that_is_refused_would_not_be_fetched(cached: Path) -> None:
    config = json.loads((cached / "config.json").read_text())
    (cached / "config.json").unlink()
    (cached / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "m.M"}}))
    found = errors(check_model(environment={}))
    assert "asks for code of its own (auto_map)" in found
    assert "would connect" not in found


def test_tokens_that_are_damaged(training: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(training.path)
    [shard] = (training / "data/tokens/train").glob("*.arrow")
    content = shard.read_bytes()
    flip_bit(shard, len(content) // 2)
    assert not errors(lambda: settings.check_tokens(False))
    assert "is damaged" in errors(lambda: settings.check_tokens(True))
    shard.write_bytes(content[: len(content) // 2])
    assert "is not a complete Arrow file" in errors(lambda: settings.check_tokens(False))
    shard.unlink()
    assert "is missing" in errors(lambda: settings.check_tokens(False))
    shutil.rmtree(training / "data/tokens")
    assert "`dvc repro pack`" in warnings(lambda: settings.check_tokens(False))


def test_a_scheduler_that_the_data_stages_connect_to(ready: Project) -> None:
    pytest.importorskip("distributed")
    ready.set(runtime={"dask_scheduler": "tcp://head:8786"})
    assert "the data stages connect to tcp://head:8786" in diagnose("warning")


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
    shutil.rmtree(tmp_path / ".git")
    without_git = errors(check)
    assert "has no .git: run `dvc config --local core.no_scm true`, or `git init`" in without_git
    assert "merge" not in without_git
    shutil.rmtree(tmp_path / ".dvc")
    assert "you are not inside of a DVC repository" in errors(check)


def test_the_cache_of_dvc(tmp_path: Path, dvc: Callable[..., Config]) -> None:
    def check(options: str, cache: Path = Path("/dev/shm")) -> Callable[[], Found[None]]:
        return lambda: dvc_settings.check_cache(dvc(f"[cache]\n    dir = {cache}\n{options}"), tmp_path)

    assert "is on another file system" in errors(check("    type = hardlink\n"))
    assert "so DVC copies everything" in warnings(check("    type = reflink,copy\n"))
    assert "cache.type is" in oks(check("    type = reflink,hardlink,symlink\n"))
    assert "cache.type is" in oks(check("", tmp_path / "cache"))
