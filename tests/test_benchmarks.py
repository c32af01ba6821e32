"""The benchmarks of the training measure what they claim, and compare programs that do the same work."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages.base.history import HISTORY
from tests.project import REPO, Project
from tests.ranks import Ranks
from tests.trainings import newest_checkpoint


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


TINY = "--ranks 1 --params 1M --save-params 1M --seq-length 64 --batch-sizes 1 2 --precision fp32 --eager --megabytes 1"
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.slow
def test_the_steps_that_are_timed_are_those_of_a_training(training: Project, ranks: Ranks, tmp_path: Path) -> None:
    """They have its losses, with documents and without."""
    from benchmarks.gpu.results import RESULT

    training.set(lr_schedule="constant", warmup_steps=0, max_steps=5)
    settings: dict[str, dict[str, Any]] = {
        "varlen": {"attention": "varlen", "loss": "fused", "batch_size": 8, "activation_checkpointing": "full"},
        "without": {"attention": "sdpa", "loss": "plain", "batch_size": 8, "document_mask": False},
    }
    job = training / "job.json"
    job.write_text(json.dumps({"settings": settings, "num_ranks": 1, "seq_length": 32, "steps": 2}))
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    output = training.run(
        "python", "-m", "benchmarks.gpu.steps", "measure", str(job), **RANK, **port, PYTHONPATH=str(REPO)
    )
    lines = [line.removeprefix(RESULT) for line in output.splitlines() if line.startswith(RESULT)]
    results = {row["name"]: row for row in map(json.loads, lines)}
    assert results.keys() == settings.keys()
    for name, document_mask in (("varlen", True), ("without", False)):
        project = training.copy(tmp_path / name)
        project.set(document_mask=document_mask)
        ranks.run(project)
        with (newest_checkpoint(project, step=5) / HISTORY).open() as file:
            expected = [float(row["loss"]) for row in csv.DictReader(file, delimiter="\t") if row["loss"]]
        assert results[name]["losses"] == pytest.approx(expected, abs=1e-5)
    # Documents of 21 and 11 tokens, or a row of 32.
    assert results["varlen"]["tokens attended to"] == pytest.approx((21 * 11 + 11 * 6) / 32)
    assert results["without"]["tokens attended to"] == 33 / 2


def test_without_a_gpu_nothing_large_is_started() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu"]
    found = subprocess.run(command, cwd=REPO, env=environment, text=True, capture_output=True, timeout=120)
    assert found.returncode == 2
    assert re.fullmatch(r"error: torch \S+ cannot use a GPU here; --help shows how to try it on CPUs\n", found.stderr)


def test_the_report_names_what_is_reached_missing_and_failed(tmp_path: Path) -> None:
    from benchmarks.gpu.report import report
    from benchmarks.gpu.results import Results

    best = "varlen, fused, batch 8, compiled"
    about, stamp = {"arguments": "", "best": best}, {"device": "a GPU", "code": "1"}
    results = Results(tmp_path / "results.json", about, stamp)
    losses = [6.0, 5.0]
    results.add(
        "steps",
        best,
        {"tokens/s": 970.0, "MFU": 0.56, "MFU, unmasked attention only": None, "peak GiB": 9.0, "losses": losses},
    )
    results.add("steps", f"{best}, no documents", {"tokens/s": 1010.0, "MFU": 0.6, "peak GiB": 9.0, "losses": losses})
    for size in range(8):
        name = f"sdpa, plain, batch {size}"
        results.add("matrix", name, {"tokens/s": 1.0, "peak GiB": 10.0, "losses": [6.0, 5.5]})
        if size < 7:
            results.add("predicted", name, {"predicted GiB": 10.5})
    results.add("steps", "flex", {"error": "no flex"})
    planned = {"steps": [best, "flex"], "predicted": [], "resume": ["deterministic"]}

    def goals() -> dict[str, list[str]]:
        lines = [line for line in report(results, planned).splitlines() if line.startswith("|")]
        return {
            cells[1].strip(): [cell.strip() for cell in cells[2:4]] for cells in (line.split("|") for line in lines)
        }

    memory = "memory, predicted / measured: 0.9 to 1.1"
    assert goals()["MFU with documents, as in PaLM: at least 55 %"] == ["56.0%", "yes"]
    assert goals()["tokens/s with documents, of those without: at least 97 %"] == ["96.0%", "no"]
    assert goals()["the same, counting unmasked attention only"] == ["", "not measured"]
    assert goals()[memory] == ["", "not measured"]  # seven are too few
    results.add("predicted", "sdpa, plain, batch 7", {"predicted GiB": 8.5})
    assert goals()[memory] == ["0.850 to 1.050", "no"]
    text = report(results, planned)
    assert "- steps: flex: no flex" in text
    assert "- resume: deterministic" in text
    # Other code continues: what is stored stays, is marked, and is not compared with what it measures itself.
    other = Results(tmp_path / "results.json", about, {**stamp, "code": "2"})
    assert {part: other.rows(part) for part in other.parts} == {part: results.rows(part) for part in results.parts}
    assert other.missing("steps", [best, "flex", "eager"]) == ["eager"]
    assert other.failed("steps", [best, "flex", "eager"]) == ["flex"]
    other.add("steps", f"{best}, no documents", {"tokens/s": 1.0, "MFU": 0.6, "peak GiB": 9.0, "losses": losses})
    text = report(other, planned)
    assert f"| {best} [1] | 970 |" in text
    assert f"| {best}, no documents | 1 |" in text
    assert "- [1] device a GPU, code 1" in text
    assert "- steps: flex [1]: no flex" in text
    assert "| MFU with documents, as in PaLM: at least 55 % | 56.0% [1] | yes |" in text
    assert "of those without: at least 97 % | | not measured |" in text
    # Only what is asked for is thrown away, and results of another model are never mixed with these.
    fresh = Results(tmp_path / "results.json", about, stamp, fresh=["steps"])
    assert fresh.parts.keys() == {"matrix", "predicted"}
    with pytest.raises(SystemExit, match="use another --results, or throw them away with --fresh"):
        Results(tmp_path / "results.json", {**about, "arguments": "params 8B"}, stamp, fresh=["steps"])


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_of_the_gpu_benchmark_runs_and_continues(tmp_path: Path) -> None:
    """On CPUs, at a tiny size: what a CPU cannot do is named, and the second run measures what the first did not."""
    pytest.importorskip("accelerate")
    command = [sys.executable, "-m", "benchmarks.gpu", *TINY.split(), "--steps", "2", "--work", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

    def run(*arguments: str, status: int) -> str:
        found = subprocess.run([*command, *arguments], cwd=REPO, env=environment, text=True, capture_output=True)
        assert found.returncode == status, found.stdout + found.stderr
        return found.stdout

    assert "run the same command again to measure the rest" in run("--minutes", "0.5", "--only", "steps", status=0)
    # torchrun starts ranks in process groups of their own, which no signal to its own group reaches.
    assert not [process for process in psutil.process_iter() if str(tmp_path) in " ".join(cmdline(process))]
    run("--only", "tests", "steps", "--first", "2", status=0)
    first = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert first["tests"]["tests/gpu"]["skipped"] > 20  # without an error
    assert len(first["steps"]) == 2
    output = run(status=1)
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    for part, rows in first.items():
        assert rows.items() <= parts[part].items()
    errors = {name for rows in parts.values() for name, row in rows.items() if "error" in row}
    assert errors
    assert all("flex" in name or "fp8" in name for name in errors), errors
    assert parts["resume"]["deterministic"]["same bits"] == 1
    assert "Not measured yet" not in output
    assert "| tokens/s, of the bare loop: over 100 % |" in output
    assert "flex, fused, batch 2: " in output.split("Failed:")[1]


@pytest.mark.parametrize("module", ["benchmarks.train", "benchmarks.data"])
def test_a_work_directory_that_is_missing_is_said(module: str) -> None:
    command = [sys.executable, "-m", module, "--work", "absent/directory"]
    process = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr.endswith("error: --work: absent/directory is no directory: create it on a fast disk\n")
