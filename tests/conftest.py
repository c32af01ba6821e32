"""Small projects that tests run the real stages in, and what tests of several stages share."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import yaml

from stages.artifacts import checkpoint

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPO = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
LAUNCH = ("python", "-m", "stages.launch")

_NODES = len(list(Path("/dev").glob("nvidia[0-9]*")))  # their numbers are those of the machine, not of this container
_VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(_NODES))))
GPUS = os.environ.setdefault("TEST_GPUS", _VISIBLE)  # this module is imported twice
"""Those of this machine, for tests/gpu; all other tests train on CPUs, wherever they run."""
os.environ["CUDA_VISIBLE_DEVICES"] = ""

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what tests start would ignore it, too, where they run under nohup


def peak_memory(code: str) -> float:
    """MiB that a new process holds at most, the interpreter included, while it runs some Python code.

    Its `ru_maxrss` would not do: it is at least that of this process.
    """
    code += "\nwith open('/proc/self/status') as file: print(file.read())"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    output = subprocess.run([sys.executable, "-c", code], env=environment, stdout=-1, text=True, check=True).stdout
    return int(output.split("VmHWM:")[1].split()[0]) / 1024


class Project:
    """A directory with params.yaml, dvc.yaml, stages and models, to run commands in."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __truediv__(self, other: str) -> Path:
        return self.path / other

    def set(self, **values: Any) -> None:
        """Change params.yaml; `runtime={...}` and `fsdp={...}` are merged into their sections."""
        file = self / "params.yaml"
        params = yaml.safe_load(file.read_text())
        for name, value in values.items():
            if isinstance(value, dict):
                params[name] |= value
            else:
                params[name] = value
        file.write_text(yaml.safe_dump(params))

    def popen(self, *command: str, **environment: str) -> "subprocess.Popen[str]":
        """Start a command; `python` and `dvc` are those of this environment."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "COVERAGE"))}
        env = {**inherited, "PATH": f"{BIN}:{inherited['PATH']}", "PYTHONPATH": "", "PYTHONUNBUFFERED": "1"}
        env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
        return subprocess.Popen(
            command, cwd=self.path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, *command: str, status: int = 0, timeout: float = 200, **environment: str) -> str:
        """Run a command, hold its exit status against `status`, and return what it printed."""
        process = self.popen(*command, **environment)
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
        assert process.returncode == status, output
        return output

    def json(self, path: str) -> Any:
        return json.loads((self / path).read_text())

    def checkpoints(self) -> Path:
        """The directory of the only run there is."""
        (directory,) = (self / "outputs/test/checkpoints").iterdir()
        return directory

    def copy(self, path: Path) -> "Project":
        shutil.copytree(self.path, path, symlinks=True)
        return Project(path)


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until `condition` holds; fail where it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that has ended may stay as a zombie, where nobody reaps it."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def ranks_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The ranks of a training that `process` has started, itself or through DVC and the launcher."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if is_alive(child) and "stages.train" in child.cmdline():
                    found.append(child)
    return found


SMALL = {
    "experiment_name": "test", "model_name": "models/nano", "seq_length": 32, "batch_size": 2, "total_batch_size": 8,
    "num_epochs": 1, "warmup_steps": 2, "eval_freq": 4,
}  # fmt: skip


def make_nano(directory: Path, **config: Any) -> None:
    """A Llama of 70 000 parameters with the tokenizer of models/tiny-llama."""
    shutil.copytree(REPO / "models/tiny-llama", directory)
    values = json.loads((directory / "config.json").read_text())
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
    (directory / "config.json").write_text(json.dumps({**values, **small, **config}))


@pytest.fixture(scope="session")
def _training(tmp_path_factory: pytest.TempPathFactory) -> Project:
    from stages.corpus import arrow

    project = Project(tmp_path_factory.mktemp("session") / "training")
    project.path.mkdir()
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(REPO / name, project.path)
    (project / "stages").symlink_to(REPO / "stages")
    make_nano(project / "models/nano")
    project.set(**SMALL, runtime={"ckpt_freq": 2, "log_freq": 4, "keep_checkpoints": 2})
    tokens = np.random.default_rng(0).integers(1, 4096, size=(110, 32), dtype=np.int32)
    tokens[:, 20] = 0  # the end of a document
    features = arrow.token_features(32)
    import pyarrow as pa

    for name, rows in (("train", tokens[:96]), ("validation", tokens[96:])):
        directory = project / f"data/tokens/{name}"
        directory.mkdir(parents=True)
        writer = arrow.StreamWriter(directory / arrow.shard_name(0, 1), features)
        for part in np.split(rows, [5, 60]):
            writer.write(pa.FixedSizeListArray.from_arrays(part.ravel(), 32))
        arrow.write_metadata(directory, features, [writer.close()])
    project.run("python", "-m", "stages.download")
    return project


@pytest.fixture
def training(_training: Project, tmp_path: Path) -> Project:
    """A project whose tokens and model manifest are there, so that training can start: 96 rows, 12 steps."""
    return _training.copy(tmp_path / "project")


@pytest.fixture(scope="session")
def _reproduced(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A git and DVC project with a small corpus, after one `dvc repro`."""
    project = Project(tmp_path_factory.mktemp("session") / "project")
    project.path.mkdir()
    files = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=REPO, text=True)
    for name in filter(None, files.split("\0")):
        if (REPO / name).is_file():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, project / name)
    make_nano(project / "models/nano")
    project.set(**SMALL, num_splits=4, runtime={"ckpt_freq": 2, "log_freq": 4})
    raw = project / "data/raw"
    for number in range(12):
        folder = raw / f"folder{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.txt").write_text(f"The file of number {number} says it {number * 3} times. " * 20)
        (folder / f"{number}.json").write_text(json.dumps({"title": f"number {number}", "list": ["a b c"] * number}))
        (folder / f"{number}.yaml").write_text(yaml.safe_dump({"text": f"it is {number} o'clock\n" * 10, "n": number}))
    for command in (
        ("git", "init", "-q"),
        ("git", "config", "user.name", "test"),
        ("git", "config", "user.email", "test@example.com"),
        ("git", "add", "."),
        ("git", "commit", "-qm", "start"),
        ("dvc", "repro"),
        ("git", "add", "."),
        ("git", "commit", "-qm", "reproduced"),
    ):
        project.run(*command)
    return project


@pytest.fixture
def reproduced(_reproduced: Project, tmp_path: Path) -> Iterator[Project]:
    """A copy of that project, to change at will."""
    project = _reproduced.copy(tmp_path / "project")
    yield project
    shutil.rmtree(project.path)


@pytest.fixture
def mesh() -> Iterator["DeviceMesh"]:
    """One process, as a mesh."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # torch.empty gives NaN instead of what happens to lie there: nothing that is forgotten looks plausible.
    torch.use_deterministic_algorithms(True)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    torch.use_deterministic_algorithms(False)
    dist.destroy_process_group()


class Ranks:
    """Starts trainings: see tests/ranks.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks"], cwd=REPO, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def start(self, project: Project, faults: str = "", world_size: int = 2, **environment: str) -> list[int]:
        """Start a training; returns the ids of its processes."""
        self.output = self.folder / "output.txt"
        self.output.unlink(missing_ok=True)
        request = {"directory": str(project.path), "world_size": world_size, "faults": faults,
                   "environment": environment, "output": str(self.output)}  # fmt: skip
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        pids: list[int] = json.loads(self._server.stdout.readline())
        return pids

    def wait(self) -> tuple[list[int], str]:
        """The exit statuses of the training, and what it printed."""
        assert self._server.stdout
        statuses = json.loads(self._server.stdout.readline())
        return statuses, self.output.read_text()

    def run(self, project: Project, faults: str = "", status: int | None = 0, **options: Any) -> str:
        """Run a training to its end; `status`: of the rank with the faults, or of all."""
        self.start(project, faults, **options)
        statuses, output = self.wait()
        victim = re.search(r"rank (\d)", faults)
        ended = [statuses[int(victim[1])]] if victim else statuses
        assert set(ended) == {status}, (statuses, output)
        return output

    def close(self) -> None:
        self._server.kill()
        self._server.communicate()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


Given = tuple[Project, dict[str, str]]
"""A project with dropout, and the `result` of its run where nothing happens to it."""


def result(project: Project) -> dict[str, str]:
    """SHA-256 of the shards (weights and optimizer) of the last checkpoint, and of the history."""
    last = project.checkpoints() / checkpoint.step_name(12)
    files = [*sorted(last.glob("*.distcp")), last / "history.tsv"]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def published(project: Project) -> list[str]:
    """The names of the checkpoints that are there, oldest first; all of them are whole."""
    found = checkpoint.find(project.checkpoints())
    for path in found:
        checkpoint.verify(path)
    return [path.name for path in reversed(found)]


def names(*steps: int) -> list[str]:
    return [checkpoint.step_name(step) for step in steps]


@pytest.fixture(scope="session")
def undisturbed(_training: Project, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Given]:
    """Given a precision, a project after a run that nothing happened to; to be copied."""
    made: dict[str, Given] = {}

    def make(precision: str) -> Given:
        if precision not in made:
            project = _training.copy(tmp_path_factory.mktemp("undisturbed") / precision)
            config = project / "models/nano/config.json"
            config.write_text(json.dumps({**project.json("models/nano/config.json"), "attention_dropout": 0.2}))
            project.run("python", "-m", "stages.download")
            # Without validations between, the best checkpoint is one of the newest: their number is known.
            project.set(precision=precision, eval_freq=100, runtime={"async_checkpoint": False, "timeout_minutes": 0.5})
            ranks.run(project)
            made[precision] = project, result(project)
        return made[precision]

    return make


@pytest.fixture
def finished(undisturbed: Callable[[str], Given], tmp_path: Path) -> Given:
    """A copy of the project in bf16, after its run."""
    project, reference = undisturbed("bf16")
    return project.copy(tmp_path / "finished"), reference


@pytest.fixture
def fresh(finished: Given) -> Given:
    """The same before its run."""
    shutil.rmtree(finished[0] / "outputs")
    return finished


def weights(project: Project, step: int = 12) -> dict[str, str]:
    """SHA-256 of the shards, weights and optimizer, of the newest run's last checkpoint."""
    manifests = sorted(project.path.glob(f"outputs/test/checkpoints/*/step-{step:08d}/manifest.json"))
    newest = max(manifests, key=lambda path: path.stat().st_mtime)
    files = json.loads(newest.read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".distcp")}


def steps(project: Project, seed: int) -> list[str]:
    """The checkpoints of the run with this seed."""
    found = []
    for manifest in (project / "outputs").glob("test/checkpoints/*/step-*/manifest.json"):
        try:
            if json.loads(manifest.read_text())["identity"]["params"]["seed"] == seed:
                found.append(manifest.parent.name)
        except FileNotFoundError:  # pruned in between
            continue
    return found


@pytest.fixture(scope="session")
def uninterrupted(_reproduced: Project, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The weights that a run of the reproduced project with `seed: 1` ends with."""
    project = _reproduced.copy(tmp_path_factory.mktemp("uninterrupted") / "project")
    project.set(seed=1)
    ranks.run(project)
    result = weights(project)
    shutil.rmtree(project.path)
    return result
