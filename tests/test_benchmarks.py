"""The benchmark of the training compares programs that do the same work."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.project import REPO


def test_losses_that_differ_are_refused() -> None:
    from benchmarks.train.comparisons import check_losses

    check_losses({"ours": [2.0, 1.9], "bare": [2.0, 1.9001]}, "fp32")
    with pytest.raises(SystemExit, match="differ"):
        check_losses({"ours": [2.0, 1.9], "bare": [2.0, 1.95]}, "fp32")


@pytest.mark.slow
def test_compared_trainings_have_the_same_losses(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    size = "--params 1M --seq-length 64 --batch-size 2 --rounds 2 --log-freq 2"
    command = [sys.executable, "-m", "benchmarks.train", "--only", "speed", *size.split(), "--work", str(tmp_path)]
    # It fails without a table if the losses differ.
    output = subprocess.run(command, cwd=REPO, text=True, check=True, capture_output=True, timeout=280).stdout
    rows = [line.split("|")[1].strip() for line in output.splitlines() if line.startswith("| (")]
    assert rows == ["(a) ours", "(b) bare FSDP2", "(c) Trainer", "(d) DDP"]
    assert list(tmp_path.iterdir()) == []
