"""Architectures through the whole pipeline: one of each kind; `make architectures` tries all."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project import REPO

pytestmark = pytest.mark.slow  # whole pipelines; test_padded.py and test_attention_choice.py have models of each kind

ATTENTION = {
    "llama": "sdpa", "gpt_neox": "sdpa", "gemma4_text": "sdpa", "deepseek_v3": "sdpa", "gpt_oss": "padded",
    "bloom": "padded", "mamba2": "padded", "falcon_h1": "padded", "nemotron_h": "padded", "qwen3_5_text": "padded",
}  # fmt: skip
"""What `auto` takes for each on CPUs."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "attention"), ATTENTION.items())
def test_an_architecture_goes_through_the_whole_pipeline(name: str, attention: str, tmp_path: Path) -> None:
    # In a process of its own, which forks: threads of OpenMP, which tests before this one have started, would hang.
    command = [sys.executable, "-m", "tests.architectures", name, "--only", "--output", str(tmp_path)]
    subprocess.run(command, cwd=REPO, check=True)
    with (tmp_path / "findings.csv").open(newline="") as file:
        (found,) = csv.DictReader(file)
    assert (found["status"], found["attention"]) == ("trained", attention), (tmp_path / f"{name}.log").read_text()
