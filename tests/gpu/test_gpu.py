"""What only a GPU can show. Without one, all tests are skipped; with several, the first is used."""

import importlib.util
import re

import numpy as np
import pytest

from tests.faults import environment
from tests.project import GPUS, LAUNCH, REPO, Project

pytestmark = [pytest.mark.skipif(not GPUS, reason="needs a GPU"), pytest.mark.timeout(900)]

GPU = {"CUDA_VISIBLE_DEVICES": GPUS.split(",")[0]}
PROBE = """
import dataclasses
from pathlib import Path
from transformers import AutoConfig
from stages.artifacts.params_file import load_params
from stages.training import document_mask
from stages.training.params import TrainParams
one_row = dataclasses.replace(load_params(TrainParams), precision="bf16", batch_size=1)
for name in ("llama", "qwen3", "mistral", "gemma", "phi3", "gpt_neox"):
    print(name, document_mask.leaks_documents(AutoConfig.for_model(name), one_row, "{attention}"))
"""


@pytest.fixture(autouse=True)
def gpu(training: Project) -> None:
    """What the tests start must see it, or all would train on the CPU and pass."""
    training.run("python", "-c", "import torch; assert torch.cuda.is_available()", **GPU)


def train(project: Project, fault: str = "", status: int = 0, **variables: str) -> str:
    return project.run(*LAUNCH, status=status, timeout=600, **{**GPU, **variables, **environment(fault)})


def losses(project: Project) -> np.ndarray:
    return np.genfromtxt(project / "outputs/history.tsv", delimiter="\t", names=True)["loss"][1:]


@pytest.mark.parametrize("compile_blocks", [False, True])
def test_a_killed_training_continues(training: Project, compile_blocks: bool) -> None:
    """To the same losses, up to the rounding of kernels that sum in any order."""
    training.set(precision="bf16", compile=compile_blocks)
    undisturbed = training.copy(training.path.with_name("undisturbed"))
    train(undisturbed)
    train(training, "kill rank 0 at step 5", status=1)
    assert re.search(r"resuming from step [24] of 12", train(training))
    np.testing.assert_allclose(losses(training), losses(undisturbed), rtol=0.01)
    metrics = training.json("outputs/train_metrics.json")
    assert 0 < metrics["cost"]["memory_peak_gib"] < 10
    times = metrics["cost"]["milliseconds"]
    assert times.keys() == {"data", "forward", "backward", "update", "validation", "saving", "other"}
    assert all(value >= 0 for value in times.values())
    assert metrics["cost"]["steps"] == 12


def test_a_gpu_trains_on_the_same_rows_as_two_ranks_on_the_cpu(training: Project) -> None:
    training.set(precision="fp32")
    cpu = training.copy(training.path.with_name("cpu"))
    train(cpu, CUDA_VISIBLE_DEVICES="")
    train(training)
    np.testing.assert_allclose(losses(training), losses(cpu), atol=1e-3)


@pytest.mark.parametrize(
    "attention",
    [
        "sdpa",
        pytest.param(
            "flash_attention_2",
            marks=pytest.mark.skipif(not importlib.util.find_spec("flash_attn"), reason="needs flash_attn"),
        ),
    ],
)
def test_documents_are_kept_apart(training: Project, attention: str) -> None:
    output = training.run("python", "-c", PROBE.format(attention=attention), **{**GPU, "PYTHONPATH": str(REPO)})
    assert output.count("False") == 6, output
