"""The benchmarks of the training measure what they claim, and compare programs that do the same work."""

import argparse
import csv
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from stages.base import code
from stages.base.history import HISTORY
from stages.forward.attention import deactivate_kernels
from tests.project import REPO, Project, wait_for
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
    command = [sys.executable, "-m", "benchmarks.train", *size.split(), "--work", str(tmp_path)]
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


def test_steps_with_sdpa_call_the_kernels_of_a_training(
    here: Project, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never cuDNN, which torch prefers on some GPUs, and whatever the process has timed before."""
    from benchmarks.gpu import steps

    def build(*args: Any, **options: Any) -> None:
        raise InterruptedError(torch.backends.cuda.cudnn_sdp_enabled())

    monkeypatch.setattr(steps.sharded_model, "build", build)
    try:
        with pytest.raises(InterruptedError, match="False"):
            steps.measure(steps.with_settings({"attention": "sdpa", "batch_size": 8}, num_ranks=1), num_steps=1)
    finally:
        deactivate_kernels()


ABSENT = r"(?s)usage: .*error: --work: absent/directory is no directory: create it on a fast disk\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gpu", r"error: torch \S+ cannot use a GPU here; --help shows how to try it on CPUs\n"),
        ("train --work absent/directory", ABSENT),
        ("data --work absent/directory", ABSENT),
    ],
)
def test_what_cannot_be_measured_here_is_said(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", arguments.split())
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"benchmarks.{sys.argv[0]}.__main__").main()
    assert re.fullmatch(message, capsys.readouterr().err)


def test_the_report_names_what_is_reached_missing_and_failed(tmp_path: Path) -> None:
    from benchmarks.gpu.report import report
    from benchmarks.gpu.results import Results

    best = "varlen, fused, batch 8, compiled"
    about, stamp = {"arguments": "", "best": best}, {"device": "a GPU", "code": "1"}
    results = Results(tmp_path / "results.json", about, stamp)
    measured = {"tokens/s": 970.0, "MFU": 0.56, "peak GiB": 9.0, "losses": [6.0, 5.0]}
    results.add("steps", best, {**measured, "MFU, unmasked attention only": None})
    results.add("steps", f"{best}, no documents", {**measured, "tokens/s": 1010.0})
    for size in range(8):
        name = f"sdpa, plain, batch {size}"
        results.add("steps", name, {"tokens/s": 1.0, "peak GiB": 10.0, "losses": [6.0, 5.5]})
        if size < 7:
            results.add("predicted", name, {"predicted GiB": 10.5})
    results.add("steps", "flex", {"error": "no flex"})
    planned = {"steps": [best, "flex"], "predicted": [], "resume": ["deterministic"]}

    def goals() -> dict[str, list[str]]:
        lines = [line for line in report(results, planned).splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.split("|")] for line in lines]
        return {row[1]: row[2:4] for row in cells}

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
    other.add("steps", f"{best}, no documents", {**measured, "tokens/s": 1.0})
    text = report(other, planned)
    assert f"| {best} [1] | 970 |" in text
    assert f"| {best}, no documents | 1 |" in text
    assert "- [1] device a GPU, code 1" in text
    assert "- steps: flex [1]: no flex" in text
    assert "| MFU with documents, as in PaLM: at least 55 % | 56.0% [1] | yes |" in text
    assert "of those without: at least 97 % | | not measured |" in text
    # Only what is asked for is thrown away, and results of another model are never mixed with these.
    fresh = Results(tmp_path / "results.json", about, stamp, fresh=["steps"])
    assert fresh.parts.keys() == {"predicted"}
    with pytest.raises(SystemExit, match="use another --results, or throw them away with --fresh"):
        Results(tmp_path / "results.json", {**about, "arguments": "params 8B"}, stamp, fresh=["steps"])


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


HIDDEN = """
import os, sys
from importlib.machinery import PathFinder
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        is_hidden = name.split(".")[0] in os.environ["HIDDEN"].split()
        return None if is_hidden else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def test_the_checks_of_a_machine_need_few_packages() -> None:
    allowed = {"python", "numpy", "psutil", "safetensors", "torch", "transformers"}
    assert code.packages("benchmarks.gpu.smoke").keys() <= allowed


@pytest.mark.slow
def test_a_missing_package_costs_its_part_alone(tmp_path: Path) -> None:
    """With torch, transformers, psutil and their needs, all checks of the machine pass; the rest says what it lacks."""
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    names = "pydantic pyarrow msgspec dvc datasets accelerate hypothesis"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HIDDEN": names}
    work, results = tmp_path / "work", tmp_path / "results"
    command = [sys.executable, "-m", "benchmarks.gpu", *TINY.split(), "--work", str(work), "--results", str(results)]
    found = subprocess.run([*command, "--first", "4"], cwd=REPO, env=environment, text=True, capture_output=True)
    assert found.returncode == 1, found.stdout + found.stderr
    parts = json.loads((results / "results.json").read_text())["parts"]
    assert parts["smoke"].keys() == {"products", "allocator", "communication", "one step"}
    assert not [row for row in parts["smoke"].values() if "error" in row]
    for part in ("steps", "tests", "large", "predicted", "resume"):
        for row in parts[part].values():
            assert re.search(r"No module named 'pydantic'", row["error"]), part
    assert "accelerate is not installed" in parts["programs"]["(c) Trainer"]["error"]
    assert {path.name for path in results.iterdir()} == {"results.json", "table.md", "log.txt"}
    # Without what makes tests faster or guards them, they run.
    environment["HIDDEN"] = "xdist pytest_timeout hypothesis"
    found = subprocess.run([*command, "--only", "tests"], cwd=REPO, env=environment, text=True, capture_output=True)
    assert found.stdout.count("skipped 1") > 20, found.stdout + found.stderr


def test_a_peer_that_fails_is_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the bare loop, with which all others are compared."""
    from benchmarks.train import comparisons
    from benchmarks.train.comparisons import BARE, OURS, TRAINER

    def in_turns(
        programs: dict[str, Any], first: int, size: int, num_turns: int, errors: dict[str, str]
    ) -> tuple[dict[str, list[float]], dict[str, Any]]:
        errors |= dict.fromkeys([BARE, TRAINER], "CUDA out of memory")
        return {OURS: [2.0] * num_turns}, {OURS: argparse.Namespace(losses=[1.0] * 30, peak=0.0)}

    monkeypatch.setattr(comparisons, "in_turns", in_turns)
    bench: Any = argparse.Namespace(
        args=argparse.Namespace(log_freq=5, rounds=4, precision="bf16"), tokens_per_step=100
    )  # fmt: skip
    errors: dict[str, str] = {}
    rows = comparisons.speed(bench, [OURS, BARE, TRAINER], errors)
    assert rows == {OURS: {"tokens/s": 250.0, "MFU": None, "peak GiB of rank 0": None}}
    assert errors.keys() == {BARE, TRAINER}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_all_of_the_gpu_benchmark_runs_and_continues(tmp_path: Path) -> None:
    """On CPUs, at a tiny size, and ended in each part: what was measured stays, and what a CPU cannot do is named."""
    results = tmp_path / "results"
    options = f"{TINY} --steps 2 --work {tmp_path / 'work'} --results {results}"
    command = [sys.executable, "-m", "benchmarks.gpu", *options.split()]

    def run(*arguments: str, status: int) -> str:
        found = subprocess.run([*command, *arguments], cwd=REPO, text=True, capture_output=True)
        assert found.returncode == status, found.stdout + found.stderr
        return found.stdout

    def stored() -> dict[str, dict[str, Any]]:
        parts: dict[str, dict[str, Any]] = json.loads((results / "results.json").read_text())["parts"]
        assert (results / "table.md").read_text().startswith("# On GPUs")
        return parts

    assert "run the same command again to measure the rest" in run("--minutes", "0.5", "--only", "steps", status=0)
    run("--only", "smoke", "tests", "steps", "--first", "2", status=0)
    before = stored()
    assert len(before["smoke"]) == len(before["tests"]) == 2 <= len(before["steps"])  # half a minute may do for more
    # A child in this process group, ranks in groups of their own, and pytest, which ends soon where no test has a GPU.
    for part, number, seconds in (
        ("resume", signal.SIGKILL, 4), ("steps", signal.SIGTERM, 4), ("tests", signal.SIGKILL, 1),
    ):  # fmt: skip
        log = (results / "log.txt").read_text()
        process = subprocess.Popen([*command, "--only", part], cwd=REPO, stdout=subprocess.DEVNULL)
        wait_for(lambda log=log, part=part: f"== {part}" in (results / "log.txt").read_text()[len(log) :])
        time.sleep(seconds)  # something of it runs
        process.send_signal(number)
        assert process.wait(60) == (130 if number == signal.SIGTERM else -signal.SIGKILL), part
        # torchrun starts ranks in process groups of their own, which no signal to its own group reaches.
        wait_for(lambda: not [each for each in psutil.process_iter() if str(tmp_path) in " ".join(cmdline(each))])
        for name, rows in before.items():
            assert rows.items() <= stored()[name].items(), part
        before = stored()
    output = run("--minutes", "60", status=1)
    for part, rows in before.items():
        assert rows.items() <= stored()[part].items()
    errors = {name for rows in stored().values() for name, row in rows.items() if "error" in row}
    assert errors
    impossible = ("flex", "fp8", *([] if importlib.util.find_spec("accelerate") else ["(c) Trainer"]))
    assert all(any(word in name for word in impossible) for name in errors), errors
    assert stored()["resume"]["deterministic"]["same bits"] == 1
    assert "Not measured yet" not in output
    assert "| tokens/s, of the bare loop: over 100 % |" in output
    assert "flex, fused, batch 2: " in output.split("Failed:")[1]


def test_what_a_benchmark_starts_finds_the_packages_that_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a package index they are in a directory of PYTHONPATH."""
    from benchmarks import growth

    monkeypatch.setenv("PYTHONPATH", "site")
    started = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(InterruptedError):
        growth.run(Path(), "extract", 1)
    assert started.call_args.kwargs["env"]["PYTHONPATH"] == f"{REPO}:site"


def test_growth_is_an_exponent_of_the_last_two_sizes() -> None:
    from benchmarks.growth import Cost, extrapolate, table

    costs = {"extract": [Cost(1, 1.0, 100), Cost(10, 2.0, 100), Cost(100, 20.0, 200)]}
    assert "| 1.00 | 0.30 |" in table("corpus", costs)
    assert [*extrapolate(costs, 18_100, "they")] == ["extract: they need 1.0 h by this slope"]  # 0.2 s each


@pytest.mark.slow
def test_growth_prints_its_table(tmp_path: Path) -> None:
    work = os.path.relpath(tmp_path, REPO)  # from where it is run, whatever the directory of a stage
    command = [sys.executable, "-m", "benchmarks.growth", "files", "--scale", "0.02", "--work", work]
    output = subprocess.run(command, cwd=REPO, text=True, check=True, capture_output=True).stdout
    assert re.search(r"(?m)^\| organize \|.*\n\| extract \|", output), output
    assert not [*tmp_path.iterdir()]


def test_results_of_an_earlier_version_are_continued(tmp_path: Path) -> None:
    """With parts and arguments that are gone."""
    from benchmarks.gpu.__main__ import about, parser
    from benchmarks.gpu.report import report
    from benchmarks.gpu.results import Results

    arguments = (
        "params 1B, save_params 400M, large_params 8B, seq_length 4096, batch_sizes [2, 8], precision bf16, "
        "eager False, steps 6, ckpt_freq 10, megabytes 4"
    )
    common = about(parser().parse_args(["--large-params", "8B"]))
    assert common["arguments"] == arguments
    rows = {"none": {"error": "too slow", "by": {"code": "0"}}, "asynchronous": {"seconds": 1.0, "by": {"code": "0"}}}
    (tmp_path / "results.json").write_text(json.dumps({"about": common, "parts": {"checkpoints": rows}}))
    results = Results(tmp_path / "results.json", common, {"code": "1"})
    assert results.errors() == []
    assert "too slow" not in report(results, {})
    results.add("smoke", "products", {"GB/s": 1.0})
    assert json.loads((tmp_path / "results.json").read_text())["parts"]["checkpoints"] == rows
