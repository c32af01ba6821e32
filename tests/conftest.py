"""Fixtures that tests of several stages share."""

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from stages.base import file_lock
from tests.network import CAN_UNSHARE, IN_A_NAMESPACE
from tests.project import REPO, SMALL, Project, make_nano, make_pipeline, read_once
from tests.ranks import Ranks
from tests.trainings import Given, result, weights

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from stages.training.params import TrainParams


# Its assertions show what differs, as those of a test do.
pytest.register_assert_rewrite("tests.corpus")

# A shell without job control starts commands in the background with SIGINT ignored, which all processes would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    gc.disable()  # until all is imported


def pytest_collection_finish() -> None:
    """What is there by now stays: the collector need not look at all of torch again and again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    """A test leaves the default dtype of torch as it was: the next one may compare with it.

    It has one thread: with more, the operations of a tiny model wait for each other.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    yield
    if torch := sys.modules.get("torch"):
        found = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        assert found == torch.float32, f"the default dtype is {found} after this test"


@pytest.fixture(scope="session", autouse=True)
def _read_once() -> Iterator[None]:
    with read_once():
        yield


@pytest.fixture
def empty_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory as the current one, with no store of another project."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return tmp_path


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that any user can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.fixture
def refuse_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that has no hard links, or from one disk to another."""

    def link(source: object, target: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)


@pytest.fixture(scope="session")
def params() -> "TrainParams":
    """Those of params.yaml."""
    from stages.base.params_file import load_params
    from stages.training.params import TrainParams

    return load_params(TrainParams, path=REPO / "params.yaml")


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Project], None]) -> Project:
    """A project that all workers of pytest-xdist share: the first one that needs it makes it."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent  # of the directories of the workers
    project, made = Project(directory / name), directory / f"{name}.made"
    with file_lock.open_lock(directory / f"{name}.lock") as lock:
        file_lock.exclusive(lock)
        if not made.exists():
            shutil.rmtree(project.path, ignore_errors=True)  # of a worker that failed
            project.path.mkdir()
            make(project)
            made.touch()
    return project


@pytest.fixture(scope="session")
def _training(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return made_once(tmp_path_factory, "training", make_training)


def make_training(project: Project) -> None:
    from stages.base.dataset import Dataset
    from stages.work import arrow

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
        Dataset(features, [writer.close()]).write(directory)
    project.run_here("download")


def make_adapted(project: Project, **config: Any) -> None:
    """A training of adapters beside the stored weights of a small model."""
    import torch
    import transformers

    make_training(project)
    path = project / "models/nano/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path.parent))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.2)  # so large that bits of a gradient show
    model.save_pretrained(path.parent)
    project.set(lora_r=4, lora_alpha=8, lora_dropout=0.1, precision="bf16")
    project.set(runtime={"async_checkpoint": False, "num_workers": 1})
    project.run_here("download")


@pytest.fixture
def training(_training: Project, tmp_path: Path) -> Project:
    """A project with tokens and a model manifest, so that training can start: 96 rows, 12 steps."""
    return _training.copy(tmp_path / "project")


@pytest.fixture
def here(training: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The same, as the current directory."""
    monkeypatch.chdir(training.path)
    return training


@pytest.fixture(scope="session")
def _reproduced(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A git and DVC project with a small corpus, after one `dvc repro`."""
    return made_once(tmp_path_factory, "reproduced", make_reproduced)


def make_reproduced(project: Project) -> None:
    make_pipeline(project)
    repro = (*(IN_A_NAMESPACE if CAN_UNSHARE else ()), "dvc", "repro")
    for command in (
        ("git", "init", "-q"),
        ("git", "config", "user.name", "test"),
        ("git", "config", "user.email", "test@example.com"),
        ("git", "add", "."),
        ("git", "commit", "-qm", "start"),
        repro,
        ("git", "add", "."),
        ("git", "commit", "-qm", "reproduced"),
    ):
        output = project.run(*command)
        if command is repro:
            project.path.with_suffix(".log").write_text(output)


@pytest.fixture
def repro_log(_reproduced: Project) -> str:
    """What that `dvc repro` printed, and where it was possible, what `tests.network` observed."""
    return _reproduced.path.with_suffix(".log").read_text()


@pytest.fixture
def reproduced(_reproduced: Project, tmp_path: Path) -> Iterator[Project]:
    """A copy of that project, which a test may change."""
    project = _reproduced.copy(tmp_path / "project")
    yield project
    shutil.rmtree(project.path)


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator["DeviceMesh"]:
    """One process, as a mesh."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # torch.empty then gives NaN instead of old memory, so that no uninitialized value looks plausible.
    torch.use_deterministic_algorithms(True)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    torch.use_deterministic_algorithms(False)
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def undisturbed(_training: Project, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Given]:
    """A function that gives, for a precision, a project after a run without faults; to be copied."""

    def make(precision: str) -> Given:
        def train(project: Project) -> None:
            shutil.copytree(_training.path, project.path, symlinks=True, dirs_exist_ok=True)
            config = project / "models/nano/config.json"
            config.write_text(json.dumps({**project.json("models/nano/config.json"), "attention_dropout": 0.2}))
            project.run_here("download")
            # Without validations in between, the best checkpoint is one of the newest, so their number is known.
            project.set(precision=precision, eval_freq=100, runtime={"async_checkpoint": False, "timeout_minutes": 0.5})
            ranks.run(project)

        project = made_once(tmp_path_factory, f"undisturbed-{precision}", train)
        return project, result(project)

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


@pytest.fixture(scope="session")
def uninterrupted(_reproduced: Project, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The weights that a run of the reproduced project with `seed: 1` ends with."""
    project = _reproduced.copy(tmp_path_factory.mktemp("uninterrupted") / "project")
    project.set(seed=1)
    ranks.run(project)
    result = weights(project)
    shutil.rmtree(project.path)
    return result
