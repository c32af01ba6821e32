"""Whatever happens to a training, it ends with the same weights and losses. The numbers are those of docs/faults.md.

The ranks are started without torchrun, by tests/ranks.py; tests/test_faults.py starts them as users do.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stages.artifacts import checkpoint
from tests.conftest import Project, Ranks

KILLED, REFUSED, STOPPED = -9, 2, 75


def result(project: Project) -> dict[str, str]:
    """SHA-256 of the shards (weights and optimizer) of the last checkpoint, and of the history."""
    last = project.checkpoints() / "step-00000012"
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
def _undisturbed(
    _training: Project, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Project, dict[str, str]]]:
    """Given a precision, a project with dropout after a run that nothing happened to, and its result."""
    made: dict[str, tuple[Project, dict[str, str]]] = {}

    def make(precision: str) -> tuple[Project, dict[str, str]]:
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
def finished(
    _undisturbed: Callable[[str], tuple[Project, dict[str, str]]], tmp_path: Path
) -> tuple[Project, dict[str, str]]:
    """A copy of the project in bf16, after its run, and the result of that run."""
    project, reference = _undisturbed("bf16")
    return project.copy(tmp_path / "finished"), reference


@pytest.fixture(params=["bf16", "fp32"])
def fresh(
    _undisturbed: Callable[[str], tuple[Project, dict[str, str]]], tmp_path: Path, request: pytest.FixtureRequest
) -> tuple[Project, dict[str, str]]:
    """A copy of the project in either precision, before its run, and the result that it must have."""
    project, reference = _undisturbed(request.param)
    copy = project.copy(tmp_path / "fresh")
    shutil.rmtree(copy / "outputs")
    return copy, reference


Given = tuple[Project, dict[str, str]]


def test_10_11_12_killed_again_and_again(finished: Given, ranks: Ranks) -> None:
    """All within one epoch, and with saves of either kind in turn."""
    project, reference = finished
    shutil.rmtree(project / "outputs")
    project.set(runtime={"async_checkpoint": True})
    ranks.run(project, "kill rank 0 at os.mkdir:.*step-00000002.tmp$", KILLED)
    assert published(project) == []
    project.set(runtime={"async_checkpoint": False})
    ranks.run(project, "kill rank 1 at step 3", KILLED)
    assert "resuming from step 2 of 12" in ranks.run(project, "kill rank 0 in update 5", KILLED)
    ranks.run(project, "kill rank 1 in write of step-00000006.tmp/__1_0", -signal.SIGXFSZ)
    assert published(project) == names(2, 4)
    project.set(runtime={"async_checkpoint": True})
    ranks.run(project, "kill rank 0 at open:.*step-00000006.tmp/manifest.json.tmp", KILLED)
    ranks.run(project, "kill rank 0 at os.rename:.*step-00000006.tmp$", KILLED)
    assert published(project) == names(2, 4)
    assert (project.checkpoints() / "step-00000006.tmp").is_dir()
    ranks.run(project, "kill rank 0 at os.rename:.*step-00000002$", KILLED)
    assert published(project) == names(2, 4, 6)
    ranks.run(project, "kill rank 0 at os.remove:state.json", KILLED)
    assert "resuming from step 6 of 12" in ranks.run(project)
    assert result(project) == reference
    assert sorted(path.name for path in project.checkpoints().glob("step-*")) == names(10, 12)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["at step", "in update"])
def test_10_12_killed_at_every_step(fresh: Given, ranks: Ranks, where: str) -> None:
    project, reference = fresh
    for step in range(12):
        for rank in (0, 1):
            project.set(runtime={"async_checkpoint": bool(rank)})
            ranks.run(project, f"kill rank {rank} {where} {step}", KILLED)
    ranks.run(project)
    assert result(project) == reference


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("save", [2, 6])
def test_11_killed_at_every_point_of_a_save(
    finished: Given, ranks: Ranks, save: int, rank: int, asynchronous: bool
) -> None:
    """At each time that a rank touches a file of a checkpoint; with none before it, and with two."""
    project, reference = finished
    shutil.rmtree(project / "outputs")
    project.set(runtime={"async_checkpoint": asynchronous})
    ranks.run(project, f"kill rank 0 at os.mkdir:.*{checkpoint.step_name(save)}.tmp$", KILLED)
    before = published(project)
    assert before == names(*range(2, save, 2))
    start = project.copy(project.path.with_name("start"))
    log = ranks.folder / "touched"
    for number in range(1, 100):
        log.write_text("")
        ranks.run(project, f"kill rank {rank} at file {number}\nlog rank {rank} at {log}", KILLED)
        if checkpoint.step_name(save + 2) in log.read_text():
            break  # that was the next save
        found = published(project)
        assert found[: len(before)] == before or found == names(4, 6)
        if found != before:  # it was published: the run goes on from there, and the next one from before it
            ranks.run(project)
            assert result(project) == reference
            shutil.rmtree(project.path)
            start.copy(project.path)
    assert number > (30 if rank == 0 else 2)
    ranks.run(project)
    assert result(project) == reference


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("__1_0.distcp", 1),
        pytest.param("__0_0.distcp", 0, marks=pytest.mark.slow),
        pytest.param(".metadata", 0, marks=pytest.mark.slow),
        pytest.param("lr_scheduler.pt", 0, marks=pytest.mark.slow),
        pytest.param("state.json", 0, marks=pytest.mark.slow),
        pytest.param("history.tsv", 0, marks=pytest.mark.slow),
        ("manifest.json", 0),
    ],
)
def test_18_19_20_a_save_that_fails_ends_the_training_and_harms_no_checkpoint(
    finished: Given, ranks: Ranks, name: str, rank: int
) -> None:
    project, reference = finished
    run = project.checkpoints()
    shutil.rmtree(run / "step-00000012")
    for asynchronous in (True, False):  # the last save of all: nothing comes after it that could tell
        project.set(runtime={"async_checkpoint": asynchronous})
        ranks.start(project, f"full rank {rank} at step-00000012.tmp/{re.escape(name)}")
        statuses, output = ranks.wait()
        assert statuses == [REFUSED, REFUSED], output
        assert "No space left on device" in output
        assert "Traceback" not in output
        assert published(project) == names(10)
    if "distcp" in name:
        ranks.start(project, f"limit rank {rank} at step-00000012.tmp/{re.escape(name)}")
        statuses, output = ranks.wait()
        assert statuses == [REFUSED, REFUSED], output
        assert "File too large" in output
        assert "Traceback" not in output
    ranks.run(project)
    assert result(project) == reference


def test_20_a_failed_save_is_noticed_at_the_next_step(finished: Given, ranks: Ranks) -> None:
    project, _ = finished
    shutil.rmtree(project / "outputs")
    project.set(num_epochs=20, runtime={"async_checkpoint": True, "ckpt_freq": 2, "log_freq": 1})
    ranks.start(project, "full rank 0 at step-00000002.tmp/state.json")
    statuses, output = ranks.wait()
    assert statuses == [REFUSED, REFUSED], output
    assert int(re.findall(r"step (\d+)/240", output)[-1]) < 30
    assert published(project) == []


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {"flip": flip, "truncate": lambda content: content[:-1]}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("manifest.json", "flip"),
        *(
            pytest.param(name, damage, marks=pytest.mark.slow)
            for name in ("manifest.json", ".metadata", "__1_0.distcp", "lr_scheduler.pt", "state.json", "history.tsv")
            for damage in DAMAGES
            if (name, damage) != ("manifest.json", "flip")
        ),
    ],
)
def test_21_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(
    finished: Given, ranks: Ranks, name: str, damage: str
) -> None:
    project, reference = finished
    file = project.checkpoints() / "step-00000012" / name
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    output = ranks.run(project)
    assert "skipping a damaged checkpoint" in output
    assert "resuming from step 10 of 12" in output
    assert result(project) == reference
    assert (project.checkpoints() / "step-00000012.damaged").is_dir()


def test_23_another_number_of_ranks_takes_the_same_rows(finished: Given, ranks: Ranks) -> None:
    """2 ranks, then 1, then 2; without dropout, whose masks depend on the number of ranks."""
    project, _ = finished
    config = project / "models/nano/config.json"
    config.write_text(json.dumps({**project.json("models/nano/config.json"), "attention_dropout": 0.0}))
    project.run("python", "-m", "stages.download")
    project.set(precision="fp32")
    shutil.rmtree(project / "outputs")
    ranks.run(project)
    history = project.checkpoints() / "step-00000012/history.tsv"
    two = np.genfromtxt(history, delimiter="\t", names=True)
    shutil.rmtree(project / "outputs")
    ranks.run(project, "kill rank 1 at step 4", KILLED)
    assert "resuming from step 2" in ranks.run(project, "kill rank 0 at step 9", KILLED, world_size=1)
    assert "resuming from step 8" in ranks.run(project)
    mixed = np.genfromtxt(history, delimiter="\t", names=True)
    assert np.array_equal(mixed["step"], two["step"])
    np.testing.assert_allclose(mixed["loss"][1:], two["loss"][1:], atol=1e-4)


@pytest.mark.parametrize(
    "values", [{"seed": 1}, *(pytest.param(v, marks=pytest.mark.slow) for v in ({"total_batch_size": 16}, {"lr": 0.1}))]
)
def test_24_other_params_make_another_run(finished: Given, ranks: Ranks, values: dict[str, float]) -> None:
    project, _ = finished
    old = project.checkpoints()
    project.set(**values, max_steps=2)
    assert "resuming" not in ranks.run(project)
    assert len(list(old.parent.iterdir())) == 2
    assert published_in(old) == names(10, 12)


def published_in(run: Path) -> list[str]:
    return [path.name for path in reversed(checkpoint.find(run))]


def test_25_a_loss_that_is_not_finite_on_one_rank_ends_all(finished: Given, ranks: Ranks) -> None:
    project, reference = finished
    shutil.rmtree(project / "outputs")
    project.set(runtime={"async_checkpoint": True})
    ranks.start(project, "nan rank 1 at step 4")
    statuses, output = ranks.wait()
    assert statuses == [REFUSED, REFUSED]
    assert "step 5: the gradient norm is nan" in output
    assert "Traceback" not in output
    assert published(project) == names(2, 4)  # also the one that was being written
    ranks.run(project)
    assert result(project) == reference


def test_checkpoints_come_by_the_clock_of_the_first_rank(finished: Given, ranks: Ranks) -> None:
    project, reference = finished
    shutil.rmtree(project / "outputs")
    project.set(runtime={"ckpt_freq": None, "ckpt_minutes": 1e-6, "keep_checkpoints": 100})
    ranks.run(project)
    assert published(project) == names(*range(1, 13))
    assert result(project) == reference
    project.set(runtime={"ckpt_minutes": 60})
    shutil.rmtree(project / "outputs")
    ranks.run(project)
    assert published(project) == names(12)


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 25))])
def test_16_17_a_signal_to_one_rank_at_any_moment_saves_the_same_step_on_all(
    finished: Given, ranks: Ranks, number: int
) -> None:
    """At random moments: start, validation, steps, saves; one signal or two, to one rank or to both."""
    project, reference = finished
    shutil.rmtree(project / "outputs")
    random = np.random.default_rng(number)
    project.set(runtime={"async_checkpoint": bool(number % 2)})
    for _ in range(3):
        pids = ranks.start(project)
        time.sleep(random.uniform(0.2, 3.0))
        for _ in range(random.integers(1, 3)):
            victim = pids[random.integers(2)]
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(victim, random.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP]))
        statuses, output = ranks.wait()
        assert statuses in ([STOPPED, STOPPED], [0, 0]), output
        published(project)
    ranks.run(project)
    assert result(project) == reference
