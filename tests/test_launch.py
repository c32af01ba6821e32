"""The launcher: what it does with a run that is finished, and with one that cannot continue."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from stages.artifacts import publish
from stages.artifacts.errors import StageError
from stages.training import memory
from stages.training.params import TrainParams
from tests.faults import environment
from tests.project import LAUNCH, REPO
from tests.ranks import Ranks
from tests.trainings import Given, result


def test_a_finished_run_is_not_trained_again(finished: Given) -> None:
    project, reference = finished
    last = project.checkpoints() / "step-00000012"
    for _ in range(2):
        assert "has already finished, at step 12: nothing to train" in project.run(*LAUNCH)
        assert result(project) == reference
        assert (project / "outputs/test/history.tsv").read_text() == (last / "history.tsv").read_text()
        pointer = project.json("outputs/test/run.json")
        assert pointer["manifest_sha256"] == publish.sha256_file(last / "manifest.json")
        assert (pointer["step"], pointer["adopted"]) == (12, None)


def test_16_a_signal_while_a_rank_exits_does_not_kill_it() -> None:
    code = """
import os, signal
from stages.training.signals import StopSignal
class Late:
    def __del__(self):  # called after Python has restored the default handlers
        os.kill(os.getpid(), signal.SIGTERM)
stop, late = StopSignal(), Late()
stop.ignore()
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0


def test_an_error_that_the_user_must_fix_causes_no_restart(fresh: Given, ranks: Ranks) -> None:
    project, reference = fresh
    project.set(runtime={"max_restarts": 3})
    output = project.run(*LAUNCH, status=2, **environment("memory rank 1 at step 5"))
    assert "error: rank 1 is out of memory (DefaultCPUAllocator: can't allocate memory: you tried to allocate" in output
    assert "use batch_size 1 (total_batch_size 8 stays, and so do the steps), activation_checkpointing full" in output
    assert "restart" not in output
    assert "Traceback" not in output
    assert "resuming from step 4" in ranks.run(project)
    assert result(project) == reference


@pytest.fixture
def params(params: TrainParams) -> TrainParams:
    return replace(params, batch_size=4, total_batch_size=24)


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**52),
        lambda: bytearray(2**62),
        lambda: _raise(torch.OutOfMemoryError("CUDA")),
        lambda: _raise(torch.AcceleratorError("CUDA error: out of memory")),
        lambda: _raise(torch.distributed.DistBackendError("NCCL error: Cuda failure 2 'out of memory'")),
        lambda: _raise(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
        lambda: _raise(RuntimeError("Registering memory failed with cudaError: 2")),
    ],
)
def test_out_of_memory_is_one_clear_error(allocate: Callable[[], object], params: TrainParams) -> None:
    with (
        pytest.raises(StageError, match=r"rank 3 is out of memory.*: use batch_size 3 "),
        memory.explain_out_of_memory(params, 3, 2),
    ):
        allocate()


@pytest.mark.parametrize("message", ["gloo: connection closed", "Registering memory failed with cudaError: 201"])
def test_other_errors_are_not_reported_as_out_of_memory(params: TrainParams, message: str) -> None:
    with pytest.raises(RuntimeError, match=message), memory.explain_out_of_memory(params, 3, 2):
        raise RuntimeError(message)


def _raise(error: Exception) -> None:
    raise error
