"""Trainings whose ranks hang, crash or run out of memory: named, ended, and started again where that can help."""

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stages.artifacts.command import StageError
from stages.training import memory
from tests.conftest import Project
from tests.test_train import LAUNCH, digests

FAULT = """
import os, signal, sys
from pathlib import Path
if os.environ.get("RANK") == "1":
    sys.path.insert(0, os.getcwd())
    from stages.training import step
    of_step = step.Batches.of_step
    def strike(self, number):
        if number == 4:
            {fault}
        return of_step(self, number)
    step.Batches.of_step = strike
"""


@pytest.fixture
def faulty(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Environments in which rank 1 meets a fault, a statement, when it fetches the rows of step 5."""

    def plant(fault: str) -> dict[str, str]:
        site = tmp_path / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(FAULT.format(fault=fault))
        return {"PYTHONPATH": str(site)}

    return plant


def test_a_rank_that_hangs_is_named_and_the_restart_ends_with_the_same_weights(
    training: Project, faulty: Callable[[str], dict[str, str]]
) -> None:
    training.run(*LAUNCH)
    reference = digests(training)
    shutil.rmtree(training / "outputs")

    training.set(runtime={"timeout_minutes": 0.15, "max_restarts": 1, "debug": True})
    once = "Path('stopped').exists() or (Path('stopped').touch(), os.kill(os.getpid(), signal.SIGSTOP))"
    output = training.run(*LAUNCH, **faulty(once))
    assert (
        "rank 1 has not moved for 8 s: step 5, data (the process is stopped, as by SIGSTOP); waiting for it: rank 0 in "
        "step 5, agreement with the other ranks; restart 1 of 1\n"
    ) in output
    assert "resuming from step 4 of 12" in output
    assert digests(training) == reference  # so `debug` changes nothing, too

    (log,) = (training / "outputs/test/logs").glob("*/rank-1.log")
    text = log.read_text()
    assert text.count("step 3 done: rows [[") == 1
    assert "step 12, backward" in text
    (log,) = (training / "outputs/test/logs").glob("*/rank-0.log")
    assert "in all_reduce" in log.read_text()  # the stack of a rank that waited


def test_a_rank_that_always_dies_at_a_step_ends_the_training_after_max_restarts(
    training: Project, faulty: Callable[[str], dict[str, str]]
) -> None:
    training.set(runtime={"max_restarts": 1})
    output = training.run(*LAUNCH, status=1, **faulty("os.kill(os.getpid(), signal.SIGKILL)"))
    assert output.count("rank 1 was killed by signal 9: step 5, data (if the machine ran out of memory, take") == 2
    assert "restart 1 of 1" in output
    assert "error: after 1 restarts, the training failed; the next launch goes on from its newest checkpoint" in output
    assert "Traceback" not in output


def test_what_would_come_again_is_not_started_again(training: Project, faulty: Callable[[str], dict[str, str]]) -> None:
    training.set(runtime={"max_restarts": 3})
    output = training.run(*LAUNCH, status=2, **faulty("__import__('torch').empty(2**52)"))
    assert "error: rank 1 is out of memory (DefaultCPUAllocator: can't allocate memory: you tried to allocate" in output
    assert "take batch_size 1 (total_batch_size 8 stays, and so do the steps), activation_checkpointing full" in output
    assert "restart" not in output
    assert "Traceback" not in output
    assert "resuming from step 4" in training.run(*LAUNCH)


@pytest.mark.parametrize(
    "allocate", [lambda: torch.empty(2**52), lambda: bytearray(2**62), lambda: _raise(torch.OutOfMemoryError("CUDA"))]
)
def test_out_of_memory_is_one_clear_error(allocate: Callable[[], object], params: memory.TrainParams) -> None:
    with (
        pytest.raises(StageError, match=r"rank 3 is out of memory.*: take batch_size 3 "),
        memory.explained(params, 3, 2),
    ):
        allocate()


def test_other_errors_are_not_taken_for_it(params: memory.TrainParams) -> None:
    with pytest.raises(RuntimeError, match="gloo"), memory.explained(params, 3, 2):
        raise RuntimeError("gloo: connection closed")


def _raise(error: Exception) -> None:
    raise error


@pytest.fixture
def params(training: Project, monkeypatch: pytest.MonkeyPatch) -> memory.TrainParams:
    from stages.artifacts.params import load

    training.set(batch_size=4, total_batch_size=24)
    monkeypatch.chdir(training.path)
    return load(memory.TrainParams)


def test_two_trainings_run_on_one_machine_and_need_no_port_of_their_own(training: Project, tmp_path: Path) -> None:
    training.set(max_steps=2)
    with socket.socket() as taken:
        taken.bind(("", 29500))  # torchrun's own choice
        taken.listen()
        other = training.copy(tmp_path / "other")
        process = other.popen(*LAUNCH, MASTER_PORT="29500")
        training.run(*LAUNCH, MASTER_PORT="29500")
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert digests(training, step=2) == digests(other, step=2)
