"""Training: the same rows, the same weights, whatever happens meanwhile."""

import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.artifacts.params_file import load_params
from stages.checkpointing.layout import CheckpointManifest, step_name
from stages.tokens.batch import make_batch
from stages.tokens.order import permute, step_rows
from stages.training import run
from stages.training.distributed import LostConnection, process_group
from stages.training.params import TrainParams, TrainRuntime
from tests.project import Project
from tests.ranks import Ranks
from tests.trainings import checkpoint_manifest, newest_checkpoint


def content(path: Path) -> dict[str, bytes]:
    """The weights and the optimizer of a checkpoint, and its history."""
    return {file.name: file.read_bytes() for file in (*path.glob("*.distcp"), path / "history.tsv")}


def test_the_order_has_every_row_once_in_each_epoch() -> None:
    for num_rows in (1, 2, 3, 5, 8, 100, 1025):
        for epoch in (0, 1):
            assert sorted(permute(np.arange(num_rows), num_rows, 7, epoch)) == list(range(num_rows))
    steps = np.concatenate([step_rows(step, 6, 10, seed=1) for step in range(5)])  # 30 rows: 3 epochs
    assert all(sorted(epoch) == list(range(10)) for epoch in steps.reshape(3, 10))


def test_the_order_depends_on_seed_and_epoch_and_never_changes() -> None:
    assert permute(np.arange(10), 10, 0, 0).tolist() == [1, 0, 9, 8, 5, 2, 7, 4, 6, 3]
    assert permute(np.arange(10), 10, 0, 1).tolist() == [8, 9, 6, 1, 4, 0, 3, 7, 2, 5]
    assert permute(np.arange(10), 10, 1, 0).tolist() == [0, 9, 7, 1, 8, 4, 2, 5, 3, 6]


def test_the_order_is_uniform() -> None:
    places = np.array([permute(np.arange(16), 16, seed, 0) for seed in range(3000)])
    counts = np.stack([(places == row).sum(0) for row in range(16)])
    expected = 3000 / 16
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < 15 * 15 + 5 * (2 * 15 * 15) ** 0.5


def test_a_batch_restarts_positions_and_has_no_label_across_documents() -> None:
    rows = torch.tensor([[5, 6, 0, 7, 8, 9, 0, 4]])
    batch = make_batch(rows, eos_token_id=0, document_mask=True)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert batch["labels"].tolist() == [[6, 0, -100, 8, 9, 0, -100, -100]]
    batch = make_batch(rows, eos_token_id=0, document_mask=False)
    assert "position_ids" not in batch
    assert batch["labels"].tolist() == [[6, 0, 7, 8, 9, 0, 4, -100]]


def test_another_lr_starts_over_and_more_epochs_continue(training: Project, ranks: Ranks) -> None:
    training.set(lr_schedule="constant")
    ranks.run(training)
    training.set(num_epochs=2)
    output = ranks.run(training)
    assert "was identical until there" in output
    assert "resuming from step 12 of 24" in output
    adopted = CheckpointManifest.read(newest_checkpoint(training, 24)).adopted
    assert adopted and adopted.step == 12
    assert "params.num_epochs: 1 there, 2 here" in adopted.differences
    continued = content(newest_checkpoint(training, 24))

    shutil.rmtree(training / "outputs")
    ranks.run(training)
    assert CheckpointManifest.read(newest_checkpoint(training, 24)).adopted is None
    # As from scratch: the validation at the end of the shorter run is not in the history.
    assert continued == content(newest_checkpoint(training, 24))

    training.set(lr=0.001)
    assert "resuming" not in ranks.run(training, "kill rank 0 at step 3", -9)
    training.set(lr=0.002)  # the previous run did not finish
    assert "resuming" not in ranks.run(training, "kill rank 0 at step 0", -9)


@pytest.mark.parametrize(
    ("values", "resume", "step"),
    [
        ({"lr_schedule": "constant"}, "auto", 12),
        ({"lr_schedule": "cosine", "lr_decay_steps": 12}, "auto", 12),
        ({"lr_schedule": "wsd", "lr_decay_ratio": 0.2}, "auto", 10),  # the end of the stable phase
        ({"lr_schedule": "cosine"}, "auto", 2),  # that of the warm-up
        ({"lr_schedule": "linear"}, "extend", 12),
    ],
)
def test_more_epochs_continue_from_the_step_where_the_learning_rates_differ(
    training: Project, monkeypatch: pytest.MonkeyPatch, values: dict[str, object], resume: str, step: int
) -> None:
    monkeypatch.chdir(training.path)
    training.set(**values)
    shorter = run.describe(load_params(TrainParams))
    for saved in range(2, 13, 2):
        path = shorter.directory / step_name(saved)
        path.mkdir(parents=True)
        checkpoint_manifest(identity=shorter.identity, step=saved, total_steps=12).write(path)
    training.set(num_epochs=2, runtime={"resume": resume})
    longer = run.describe(load_params(TrainParams))
    found = run.resume_candidates(longer, load_params(TrainRuntime, "runtime"), print)
    assert found[0].name == step_name(step)


def test_no_checkpoint_of_a_finished_run_is_adopted_by_a_run_of_the_same_length(
    training: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(training.path)
    finished = run.describe(load_params(TrainParams))
    training.set(batch_size=4)
    other = run.describe(load_params(TrainParams))
    runtime = load_params(TrainRuntime, "runtime")
    for saved, adopted in ((10, ["step-00000010"]), (12, [])):  # 12 is the last step: step 10 no longer counts, either
        path = finished.directory / step_name(saved)
        path.mkdir(parents=True)
        checkpoint_manifest(identity=finished.identity, step=saved, total_steps=12).write(path)
        assert [path.name for path in run.resume_candidates(other, runtime, print)] == adopted


def test_extend_continues_although_the_schedule_differs(training: Project, ranks: Ranks) -> None:
    ranks.run(training)
    training.set(num_epochs=2)
    assert "resuming" not in ranks.run(training, "kill rank 0 at step 0", -9)
    training.set(runtime={"resume": "extend"})
    assert "resuming from step 12 of 24" in ranks.run(training)
    adopted = CheckpointManifest.read(newest_checkpoint(training, 24)).adopted
    assert adopted and adopted.step == 12


def test_a_changed_batch_size_adopts_an_unfinished_run(training: Project, ranks: Ranks) -> None:
    ranks.run(training, "kill rank 0 at step 5", -9)
    training.set(batch_size=4)
    output = ranks.run(training)
    assert "was identical until there" in output
    adopted = CheckpointManifest.read(newest_checkpoint(training, 12)).adopted
    assert adopted
    assert "params.batch_size: 2 there, 4 here" in adopted.differences


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"total_batch_size": 9}, "total_batch_size 9 is not a multiple of batch_size 2: use 8 or 10"),
        ({"batch_size": 8}, "use total_batch_size 16"),
        ({"lr": "fast"}, "lr is 'fast'"),
        ({"lr_schedule": "cosinus"}, "'constant' or 'wsd'"),
        ({"num_epoch": 2}, "unknown parameter 'num_epoch'; did you mean 'num_epochs'?"),
        ({"fsdp": {"sharding": 1}}, "unknown parameter 'fsdp.sharding'"),
        ({"runtime": {"keep_checkpoints": 1}}, "runtime.keep_checkpoints is 1: input should be greater"),
        ({"total_batch_size": 1000}, "less than one step"),
    ],
)  # fmt: skip
def test_impossible_parameters_are_one_clear_error(
    training: Project, ranks: Ranks, values: dict[str, object], message: str
) -> None:
    training.set(**values)
    output = ranks.run(training, status=2)
    assert message in output
    assert "Traceback" not in output


def test_a_float_that_yaml_reads_as_a_string_is_a_float(training: Project, ranks: Ranks) -> None:
    file: Path = training / "params.yaml"
    file.write_text(file.read_text().replace("lr: 0.003", "lr: 2e-05"))
    training.set(max_steps=2)
    assert "lr: 2e-05" in file.read_text() or "lr: '2e-05'" in file.read_text()
    ranks.run(training)
    last = (newest_checkpoint(training, 2) / "history.tsv").read_text().splitlines()[-1]
    assert last.split("\t")[4] == "2e-05"


def test_a_rank_whose_peers_end_while_it_joins_them_has_lost_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as peer:
        peer.bind(("127.0.0.1", 0))
        port = peer.getsockname()[1]
    # Nobody answers there now, as where rank 0 has ended before rank 1 came.
    rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LostConnection, match="rank 1 lost the connection"), process_group((1, 2), timeout_minutes=0.01):
        pass
