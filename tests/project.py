"""Small projects that tests run the real stages in."""

import copy
import functools
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from stages.base import code, command, params_file

REPO = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
LAUNCH = ("python", "-m", "stages.launch")

_NODES = len(list(Path("/dev").glob("nvidia[0-9]*")))  # their numbers are those of the machine, not of this container
GPUS = os.environ.setdefault("TEST_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(_NODES)))))
"""Those of this machine, for tests/gpu; all other tests train on CPUs, wherever they run. In a variable, so that the
workers of pytest-xdist know them too: they are started when the next line has hidden them."""
os.environ["CUDA_VISIBLE_DEVICES"] = ""

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and what tests start would inherit that


def peak_memory(code: str) -> float:
    """MiB that a new process holds at most, the interpreter included, while it runs some Python code.

    Its `ru_maxrss` would not do: it is at least that of this process.
    """
    code += "\nwith open('/proc/self/status') as file: print(file.read())"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    output = subprocess.run([sys.executable, "-c", code], env=environment, stdout=-1, text=True, check=True).stdout
    return int(output.split("VmHWM:")[1].split()[0]) / 1024


def run_python(code: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run Python code in a new process, which can import the stages; its output is text."""
    env = {**os.environ, "PYTHONPATH": str(REPO), **environment}
    return subprocess.run([sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, timeout=60)


def start_stage(name: str, *options: str) -> psutil.Popen:
    """Start a stage in a process, as DVC does; its output can be read as text."""
    command = [sys.executable, *options, "-m", f"stages.{name}"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    return psutil.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Be a user whom permissions concern, as root may read everything."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def flip_bit(path: Path, index: int) -> None:
    """Change one bit of the byte at `index` of a file."""
    content = bytearray(path.read_bytes())
    content[index] ^= 1
    path.write_bytes(content)


@contextmanager
def read_once() -> Iterator[None]:
    """What takes most of the time of a tiny stage: its imports, their packages, and the files of parameters."""

    def once(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        of_here = functools.cache(lambda path, *entries: function(*entries))

        def find(*entries: str, project: Path = REPO) -> dict[str, Any]:
            return of_here((*sys.path,), *entries) if project == REPO else function(*entries, project=project)

        return find

    parse = functools.cache(params_file._parse)
    with pytest.MonkeyPatch.context() as patch:
        for function in (code.reached, code.packages):
            patch.setattr(code, function.__name__, once(function))
        patch.setattr(params_file, "_parse", lambda text, what: copy.deepcopy(parse(text, what)))
        yield


def run_in_process(name: str, *options: str) -> tuple[int, str, str]:
    """Exit status, output and errors of the command of a stage, in this process and the current directory."""
    output, errors, arguments = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = [name, *options]
    status: Any = 0
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            command.run(importlib.import_module(f"stages.{name}").main)
    except SystemExit as end:
        status = end.code or 0
    finally:
        sys.argv = arguments
    return status, output.getvalue(), errors.getvalue()


def run_here(name: str, *options: str, status: int = 0) -> str:
    """Run a command as `run_in_process` does, check its exit status, and return what it printed."""
    found, output, errors = run_in_process(name, *options)
    assert found == status, output + errors
    return output + errors


class Project:
    """A directory with params.yaml, dvc.yaml, stages and models, in which commands run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __truediv__(self, other: str) -> Path:
        return self.path / other

    def set(self, **values: Any) -> None:
        """Change params.yaml; `runtime={...}` and others that are sections are merged into them."""
        file = self / "params.yaml"
        params = yaml.safe_load(file.read_text())
        for name, value in values.items():
            if isinstance(value, dict) and isinstance(params.get(name), dict):
                params[name] |= value
            else:
                params[name] = value
        file.write_text(yaml.safe_dump(params))

    def popen(self, *command: str, **environment: str) -> "subprocess.Popen[str]":
        """Start a command; `python` and `dvc` are those of this environment."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "COVERAGE"))}
        env = {**inherited, "PATH": f"{BIN}:{inherited['PATH']}", "PYTHONUNBUFFERED": "1"}
        env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
        return subprocess.Popen(
            command, cwd=self.path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, *command: str, status: int = 0, timeout: float = 280, **environment: str) -> str:
        """Run a command, check its exit status, and return what it printed."""
        process = self.popen(*command, **environment)
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
        assert process.returncode == status, output
        return output

    def run_here(self, name: str, *options: str) -> str:
        """Run a stage in this process, with this directory as the current one."""
        before = Path.cwd()
        os.chdir(self.path)
        try:
            return run_here(name, *options)
        finally:
            os.chdir(before)

    def json(self, path: str) -> Any:
        return json.loads((self / path).read_text())

    def checkpoints(self) -> Path:
        """The directory of the only run."""
        (directory,) = (path for path in (self / "outputs/test/checkpoints").iterdir() if path.is_dir())
        return directory

    def copy(self, path: Path) -> "Project":
        shutil.copytree(self.path, path, symlinks=True)
        return Project(path)


def commands(document: str) -> list[str]:
    """The lines of the `sh` blocks of a document, without their comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (REPO / document).read_text(), re.MULTILINE | re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until `condition` is true; fail if it is not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.02)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that has ended stays a zombie until its parent waits for it."""
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
                if is_alive(child) and child.cmdline()[-2:] == ["-m", "stages.train"] and "RANK" in child.environ():
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


def save_weights(directory: Path) -> None:
    """Store random weights of a model beside its config."""
    from transformers import AutoConfig

    from tests.artifacts import write_model

    write_model(directory, AutoConfig.from_pretrained(directory))


def make_pipeline(project: Project) -> None:
    """All files of this repository, with a small corpus and model, and without git."""
    files = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=REPO, text=True)
    for name in filter(None, files.split("\0")):
        if (REPO / name).is_file():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, project / name)
    make_nano(project / "models/nano")
    with (project / ".gitignore").open("a") as file:
        file.write("!/models/nano/*\n")  # small enough for git, from which clones have it
    project.set(**SMALL, num_splits=4, runtime={"ckpt_freq": 2, "log_freq": 4})
    raw = project / "data/raw"
    for number in range(12):
        directory = raw / f"folder{number % 3}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{number}.txt").write_text(f"The file of number {number} says it {number * 3} times. " * 20)
        (directory / f"{number}.json").write_text(json.dumps({"title": f"number {number}", "list": ["a b c"] * number}))
        (directory / f"{number}.yaml").write_text(
            yaml.safe_dump({"text": f"it is {number} o'clock\n" * 10, "n": number})
        )
