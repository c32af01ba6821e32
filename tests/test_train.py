"""Training: the same rows, the same weights, whatever happens on the way."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from stages.training.batch import make_batch
from stages.training.order import permute, step_rows
from tests.conftest import Project

LAUNCH = ("python", "-m", "stages.launch")


def digests(project: Project, step: int = 12) -> dict[str, str]:
    """SHA-256 of the shards (weights and optimizer) of a checkpoint, and of the history."""
    files = [*(project.checkpoints() / f"step-{step:08d}").glob("*.distcp"), project / "outputs/test/history.tsv"]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def wait_for_step(project: Project, step: int) -> None:
    wait_for(lambda: list((project / "outputs").glob(f"test/checkpoints/*/step-{step:08d}")))


def ranks(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_order_takes_every_row_once_in_each_epoch() -> None:
    for num_rows in (1, 2, 3, 5, 8, 100, 1025):
        for epoch in (0, 1):
            assert sorted(permute(np.arange(num_rows), num_rows, 7, epoch)) == list(range(num_rows))
    steps = np.concatenate([step_rows(step, 6, 10, seed=1) for step in range(5)])  # 30 rows: 3 epochs
    assert all(sorted(epoch) == list(range(10)) for epoch in steps.reshape(3, 10))


def test_order_depends_on_seed_and_epoch_and_stays_the_same_for_ever() -> None:
    assert permute(np.arange(10), 10, 0, 0).tolist() == [1, 0, 9, 8, 5, 2, 7, 4, 6, 3]
    assert permute(np.arange(10), 10, 0, 1).tolist() == [8, 9, 6, 1, 4, 0, 3, 7, 2, 5]
    assert permute(np.arange(10), 10, 1, 0).tolist() == [0, 9, 7, 1, 8, 4, 2, 5, 3, 6]


def test_order_is_even() -> None:
    places = np.array([permute(np.arange(16), 16, seed, 0) for seed in range(3000)])
    counts = np.stack([(places == row).sum(0) for row in range(16)])
    expected = 3000 / 16
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < 15 * 15 + 5 * (2 * 15 * 15) ** 0.5


def test_batch_restarts_positions_and_predicts_nothing_across_documents() -> None:
    rows = torch.tensor([[5, 6, 0, 7, 8, 9, 0, 4]])
    batch = make_batch(rows, eos_token_id=0, document_mask=True)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert batch["labels"].tolist() == [[6, 0, -100, 8, 9, 0, -100, -100]]
    batch = make_batch(rows, eos_token_id=0, document_mask=False)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch["labels"].tolist() == [[6, 0, 7, 8, 9, 0, 4, -100]]


def test_killed_and_stopped_at_any_time_ends_with_the_same_weights(training: Project) -> None:
    config = training / "models/nano/config.json"
    config.write_text(json.dumps({**training.json("models/nano/config.json"), "attention_dropout": 0.2}))
    training.run("python", "-m", "stages.download")
    training.run(*LAUNCH)
    reference = digests(training)
    rows = (training / "outputs/test/history.tsv").read_text().splitlines()
    assert len(rows) == 14  # names, the validation before the first step, twelve steps
    shutil.rmtree(training / "outputs")

    process = training.popen(*LAUNCH)  # stopped before the first step: there is nothing to save
    wait_for(lambda: len(ranks(process)) == 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75

    process = training.popen(*LAUNCH)
    wait_for_step(training, 2)
    ranks(process)[1].kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "was killed by signal 9" in output
    assert "Traceback" not in output

    process = training.popen(*LAUNCH)
    wait_for_step(training, 6)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "resuming from step 2" in output or "resuming from step 4" in output

    process = training.popen(*LAUNCH)
    wait_for(lambda: len(ranks(process)) == 2)
    workers = ranks(process)
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not any(worker.is_running() for worker in workers), seconds=2)

    training.run(*LAUNCH)
    assert digests(training) == reference
    assert "nothing to train" in training.run(*LAUNCH)
    assert digests(training) == reference


def test_one_rank_and_two_take_the_same_rows(training: Project) -> None:
    training.run(*LAUNCH)
    two = np.genfromtxt(training / "outputs/test/history.tsv", delimiter="\t", names=True)
    shutil.rmtree(training / "outputs")
    training.set(runtime={"nproc_per_node": 1})
    process = training.popen(*LAUNCH)
    wait_for_step(training, 6)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    training.set(runtime={"nproc_per_node": 2})
    training.run(*LAUNCH)
    one = np.genfromtxt(training / "outputs/test/history.tsv", delimiter="\t", names=True)
    assert np.array_equal(one["step"], two["step"])
    np.testing.assert_allclose(one["loss"][1:], two["loss"][1:], atol=1e-4)
    np.testing.assert_allclose(one["grad_norm"][1:], two["grad_norm"][1:], rtol=1e-3)


def test_another_lr_starts_anew_and_more_epochs_go_on(training: Project) -> None:
    training.set(lr_schedule="constant")
    training.run(*LAUNCH)
    training.set(num_epochs=2)
    output = training.run(*LAUNCH)
    assert "took the same path until there" in output
    assert "resuming from step 12 of 24" in output
    adopted = training.json("outputs/test/run.json")["adopted"]
    assert adopted["step"] == 12
    assert "params.num_epochs: 1 there, 2 here" in adopted["differences"]
    continued = (training / "outputs/test/history.tsv").read_text()

    shutil.rmtree(training / "outputs")
    training.run(*LAUNCH)
    assert training.json("outputs/test/run.json")["adopted"] is None
    # The rows are those of a run from scratch, but for the validation that closed the shorter one.
    assert continued == (training / "outputs/test/history.tsv").read_text()

    training.set(lr=0.001)
    output = training.run(*LAUNCH)
    assert "resuming" not in output
    assert training.json("outputs/test/run.json")["adopted"] is None


def test_extend_goes_on_although_the_schedule_was_another(training: Project) -> None:
    training.run(*LAUNCH)
    training.set(num_epochs=2)
    process = training.popen(*LAUNCH)
    wait_for_step(training, 2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert "resuming" not in output

    shutil.rmtree(next((training / "outputs/test/checkpoints").glob("*/step-00000002")).parent)
    training.set(runtime={"resume": "extend"})
    assert "resuming from step 12 of 24" in training.run(*LAUNCH)
    assert training.json("outputs/test/run.json")["adopted"]["step"] == 12


def test_a_changed_batch_size_adopts_an_unfinished_run(training: Project) -> None:
    process = training.popen(*LAUNCH)
    wait_for_step(training, 4)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    training.set(batch_size=4)
    output = training.run(*LAUNCH)
    assert "took the same path until there" in output
    assert "params.batch_size: 2 there, 4 here" in training.json("outputs/test/run.json")["adopted"]["differences"]


def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(training: Project) -> None:
    training.run(*LAUNCH)
    reference = digests(training)
    newest = training.checkpoints() / "step-00000012"
    shard = next(newest.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    output = training.run(*LAUNCH)
    assert "is damaged" in output
    assert "resuming from step 10" in output
    assert digests(training) == reference


def test_no_whole_checkpoint_is_an_error_and_never_a_start_at_step_0(training: Project) -> None:
    training.run(*LAUNCH)
    for shard in training.checkpoints().glob("*/*.distcp"):
        os.truncate(shard, shard.stat().st_size - 1)
    output = training.run(*LAUNCH, status=2)
    assert "is whole" in output
    assert "runtime.resume=never" in output
    assert "Traceback" not in output


def test_a_second_writer_is_refused(training: Project) -> None:
    process = training.popen(*LAUNCH)
    wait_for(lambda: len(ranks(process)) == 2)
    output = training.run(*LAUNCH, status=2)
    assert "another training writes into" in output
    process.kill()
    process.communicate(timeout=60)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"total_batch_size": 9}, "total_batch_size 9 is no multiple of batch_size 2: take 8 or 10"),
        ({"batch_size": 8}, "take total_batch_size 16"),
        ({"lr": "fast"}, "lr is 'fast'"),
        ({"lr_schedule": "cosinus"}, "'constant' or 'wsd'"),
        ({"num_epoch": 2}, "unknown parameter 'num_epoch'; did you mean 'num_epochs'?"),
        ({"fsdp": {"sharding": 1}}, "unknown parameter 'fsdp.sharding'"),
        ({"runtime": {"keep_checkpoints": 1}}, "runtime.keep_checkpoints is 1: input should be greater"),
        ({"total_batch_size": 1000}, "less than one step"),
    ],
)  # fmt: skip
def test_impossible_parameters_are_one_clear_error(training: Project, values: dict[str, object], message: str) -> None:
    training.set(**values)
    output = training.run(*LAUNCH, status=2)
    assert message in output
    assert "Traceback" not in output


def test_a_float_that_yaml_reads_as_a_string_is_a_float(training: Project) -> None:
    file: Path = training / "params.yaml"
    file.write_text(file.read_text().replace("lr: 0.003", "lr: 2e-05"))
    training.set(max_steps=2)
    assert "lr: 2e-05" in file.read_text() or "lr: '2e-05'" in file.read_text()
    training.run(*LAUNCH)
    last = (training / "outputs/test/history.tsv").read_text().splitlines()[-1]
    assert last.split("\t")[4] == "2e-05"
