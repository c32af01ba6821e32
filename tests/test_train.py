"""Training: the same rows, the same weights, whatever happens meanwhile."""

import json
import math
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from stages.base import history
from stages.base.errors import StageError
from stages.base.packed import TRAIN, VALIDATION, PackedTokens
from stages.base.params_file import load_params
from stages.checkpointing import decision, run
from stages.checkpointing.layout import CheckpointManifest, list_checkpoints, step_name
from stages.checkpointing.state import TrainMetrics
from stages.forward.batch import Marks, count_labels, make_batch
from stages.forward.rows import TokenRows, _open
from stages.launching.hooks import RankHooks
from stages.launching.rank import start
from stages.launching.runtime import Launch, TrainRuntime, how_to_resume, read_launch
from stages.ranks.watchdog import Heartbeat
from stages.training import loop, step
from stages.training.loader import BatchLoader
from stages.training.order import permute, shuffled
from stages.training.params import TrainParams
from stages.training.schedule import learning_rate
from tests.artifacts import describe
from tests.project import Project, flip_bit, wait_for
from tests.ranks import Ranks
from tests.trainings import each_rank, newest_checkpoint


def content(path: Path) -> dict[str, bytes]:
    """The weights and the optimizer of a checkpoint, and its history."""
    return {str(file.relative_to(path)): file.read_bytes() for file in (*path.rglob("*.distcp"), path / "history.tsv")}


def test_the_order_has_every_row_once_in_each_epoch() -> None:
    for num_rows in (1, 2, 3, 5, 8, 100, 1025):
        for epoch in (0, 1):
            assert sorted(permute(np.arange(num_rows), num_rows, 7, epoch)) == list(range(num_rows))
    steps = np.concatenate([shuffled(np.arange(6 * step, 6 * step + 6), 10, seed=1) for step in range(5)])  # 3 epochs
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
    assert make_batch(rows, 0, document_mask=True, lengths=True)["cu_seq_lens"].tolist() == [0, 3, 7, 8, 8]
    batch = make_batch(rows.view(2, 4), 0, document_mask=True, lengths=True)
    assert batch["cu_seq_lens"].tolist() == [0, 3, 4, 7, 8]  # two rows: the second begins inside a document
    batch = make_batch(rows, eos_token_id=0, document_mask=False)
    assert "position_ids" not in batch
    assert batch["labels"].tolist() == [[6, 0, 7, 8, 9, 0, 4, -100]]
    batch = make_batch(rows.view(2, 4), 0, document_mask=False, lengths=True)  # each row is a document
    assert batch["cu_seq_lens"].tolist() == [0, 4, 8]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("ends", "expected"), [([], 1000), ([600], 1000), ([400, 800], 512), ([*range(0, 1000, 9)], 128)]
)
def test_no_document_is_longer_than_the_length_that_kernels_are_given(ends: list[int], expected: int) -> None:
    """A power of two, or that of a row."""
    rows = torch.ones(2, 1000, dtype=torch.int32)
    rows[:, ends] = 0
    batch = make_batch(rows, 0, document_mask=True, lengths=True)
    assert type(batch["max_length"]) is int  # the CPU waits for no GPU to know it
    assert batch["cu_seq_lens"].diff().max() <= batch["max_length"] == expected


def test_marks_say_what_is_trained_and_where_documents_begin() -> None:
    rows = torch.tensor([[5, 6, 0, 7, 8, 9, 0, 4]])  # 0 is also within a conversation, as the end of a turn
    trained, starts = (torch.tensor([[bool(int(bit)) for bit in bits]]) for bits in ("00100110", "10000100"))
    batch = make_batch(rows, 0, document_mask=True, lengths=True, marks=Marks(trained, starts))
    assert batch["labels"].tolist() == [[-100, 0, -100, -100, -100, 0, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch["cu_seq_lens"].tolist() == [0, 5, 8]
    batch = make_batch(rows, 0, document_mask=False, marks=Marks(trained, starts))
    assert batch["labels"].tolist() == [[-100, 0, -100, -100, 9, 0, -100, -100]]


def test_a_damaged_file_of_rows_is_one_message(here: Project) -> None:
    path = next(iter(PackedTokens.read(TRAIN).digests))
    content = path.read_bytes()
    for index in range(400):  # of the schema and the first rows
        flip_bit(path, index)
        with suppress(StageError):
            _open(path)
        path.write_bytes(content)


@pytest.mark.parametrize(("eval_rows", "expected"), [(5, [0, 2, 5, 8, 11]), (None, range(14)), (100, range(14))])
def test_a_validation_measures_the_same_rows_on_any_number_of_ranks(
    here: Project, monkeypatch: pytest.MonkeyPatch, eval_rows: int | None, expected: Sequence[int]
) -> None:
    rows = TokenRows(VALIDATION)
    for batch_size, eval_batch_size, world_size in ((2, None, 1), (2, 4, 1), (1, None, 3), (4, 2, 2), (2, 5, 2)):
        here.set(batch_size=batch_size, eval_batch_size=eval_batch_size, total_batch_size=12, eval_rows=eval_rows)
        loader = BatchLoader(rows, load_params(TrainParams), eos_token_id=0)
        measured = []
        for _ in each_rank(monkeypatch, world_size):
            batches = [batch for _, batch in loader.validation_batches()]
            assert len(batches) == math.ceil(len(expected) / ((eval_batch_size or batch_size) * world_size))
            for batch in batches:
                measured += batch["input_ids"][(batch["labels"] != -100).any(dim=1)].tolist()
        assert sorted(measured) == sorted(rows.rows(np.array(expected)).tolist())


def test_a_thread_makes_the_batches_of_the_next_step_and_its_error_is_raised(here: Project, mesh: DeviceMesh) -> None:
    rows, read = TokenRows(TRAIN), []

    class Watched:
        sources: ClassVar[dict[str, int]] = {}

        def __len__(self) -> int:
            return len(rows)

        def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int32]:
            read.append((threading.current_thread().name, indices.tolist()))
            if len(read) == 9:
                raise StageError("the disk")
            return rows.rows(indices)

        def marks(self, indices: NDArray[np.int64]) -> None:
            pass

    loader = BatchLoader(Watched(), load_params(TrainParams), eos_token_id=0)  # type: ignore[arg-type]
    made = loader.step_batches(5)
    wait_for(lambda: len(read) == 8)  # 4 forward passes of step 5, and those of step 6, which was not asked for
    assert [indices for _, indices in read] == [*loader.step_indices(5).tolist(), *loader.step_indices(6).tolist()]
    assert {name for name, _ in read} == {"loader_0"}
    expected = [make_batch(torch.from_numpy(rows.rows(indices)), 0, True) for indices in loader.step_indices(5)]
    torch.testing.assert_close(made.batches, expected, rtol=0, atol=0)
    assert made.num_labels == sum(map(count_labels, expected))
    loader.step_batches(6)
    with pytest.raises(StageError, match="the disk"):
        loader.step_batches(7)
    loader.close()
    assert "loader_0" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def make_rank(here: Project, mesh: DeviceMesh) -> Callable[..., RankHooks]:
    """A function that begins a training in this process; `max_unread` 1: it reads its numbers as late as on a GPU."""

    def make(max_unread: int = 0) -> RankHooks:
        described = run.describe(load_params(TrainParams))
        runtime, chosen = load_params(TrainRuntime, "runtime"), decision.begin(described, "auto")
        signal: Any = SimpleNamespace(received=False, training_starts=lambda: None)
        one = start(described, runtime, chosen.checkpoints, mesh, signal, Heartbeat(), lambda: None)
        one.trainer.max_unread = max_unread
        return one

    return make


def test_numbers_that_are_read_late_are_complete_in_every_checkpoint(
    here: Project, monkeypatch: pytest.MonkeyPatch, make_rank: Callable[..., RankHooks]
) -> None:
    """As on a GPU; whether the training ends, is stopped and resumed, or fails."""
    here.set(batch_size=4, max_steps=9, runtime={"ckpt_freq": 3, "async_checkpoint": False, "keep_checkpoints": 9})
    contents = []
    for max_unread in (0, 1):
        assert make_rank(max_unread).train()
        contents.append({path.name: content(path) for path in list_checkpoints(here.checkpoints())})
        assert contents[-1].keys() == {step_name(step) for step in (3, 6, 9)}
        assert contents[-1][step_name(6)]["history.tsv"].count(b"\n") == 2 + 6  # names, before the first step
        shutil.rmtree(here / "outputs")
    assert contents[0] == contents[1]

    queue_step = step.train_step
    one = make_rank(max_unread=1)

    def stop_in_step_5(*args: Any) -> torch.Tensor:
        one.stop_signal.received = one.trainer.step == 4
        return queue_step(*args)

    monkeypatch.setattr(loop, "train_step", stop_in_step_5)
    assert not one.train()
    assert one.trainer.step == 5  # the step in which the signal came
    losses, number = step.training_losses, 0

    def fail_in_step_7(*args: Any) -> Any:
        nonlocal number
        number += 1  # 2 forward passes a step; the first one is of step 6
        loss, router_loss = losses(*args)
        return loss * (math.nan if number == 3 else 1), router_loss

    monkeypatch.setattr(loop, "train_step", queue_step)
    monkeypatch.setattr(step, "training_losses", fail_in_step_7)
    one = make_rank(max_unread=1)
    with pytest.raises(StageError, match=r"^step 7: the gradient norm is nan: .*; the newest checkpoint is of step 6$"):
        one.train()
    assert one.trainer.step == 8  # which was queued before the numbers of step 7 were read
    assert [path.name for path in list_checkpoints(here.checkpoints())] == [step_name(step) for step in (6, 5, 3)]
    assert make_rank(max_unread=1).train()
    assert content(here.checkpoints() / step_name(9)) == contents[0][step_name(9)]


def test_16_a_signal_during_the_validation_before_the_first_step_ends_a_rank(
    here: Project, make_rank: Callable[..., RankHooks]
) -> None:
    here.set(max_steps=1)
    one, measured = make_rank(), []
    one.stop_signal.training_starts = lambda: measured.append(one.trainer.validation)  # type: ignore[method-assign]
    assert one.train()
    assert measured and measured[0] and measured[0].loss  # from then on, signals are remembered


def test_the_validation_loss_does_not_depend_on_the_rows_of_a_forward_pass(
    here: Project, make_rank: Callable[..., RankHooks]
) -> None:
    """14 rows, which 5 does not divide."""
    losses = {}
    for size in (None, 5, 100):
        here.set(eval_batch_size=size)
        one = make_rank()
        one.trainer.validate(one)
        assert len([*one.trainer.validation_loader.validation_batches()]) == math.ceil(14 / (size or 2))
        losses[size] = one.trainer.validation.loss
    assert losses == pytest.approx(dict.fromkeys(losses, losses[None]), rel=1e-6)


def test_trap_29_rows_that_the_tokens_do_not_have_are_refused(training: Project) -> None:
    directory = training / "data/tokens/train"
    state = training.json("data/tokens/train/state.json")
    state["_data_files"][0]["rows"] += 1
    (directory / "state.json").write_text(json.dumps(state))
    with pytest.raises(StageError, match=r"lists 97 rows, and there are 96: run `dvc repro -f -s pack`"):
        TokenRows(directory)


def test_a_loss_that_is_not_finite_before_the_first_step_is_that_of_the_initial_weights(
    make_rank: Callable[..., RankHooks],
) -> None:
    """No learning rate has caused it."""
    one = make_rank()
    with torch.no_grad():
        next(one.trainer.model.parameters()).fill_(math.nan)
    with pytest.raises(StageError, match=r"^the validation loss is nan before the first step: the initial weights"):
        one.train()


OPT = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "ffn_dim": 32, "word_embed_proj_dim": 16}
GRANITE = {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "logits_scaling": 4.0}


def test_a_training_starts_with_a_test_of_its_attention_and_of_its_loss(
    here: Project, make_rank: Callable[..., RankHooks], capsys: pytest.CaptureFixture[str]
) -> None:
    nano = here.json("models/nano/config.json")
    here.set(runtime={"profile_steps": [70, 71]})
    for config, values, message in (
        (OPT, {"attention": "sdpa"}, "^attention sdpa does not work with OPTForCausalLM in float32 on this cpu: it "
         "lets tokens attend to other documents: use auto, or varlen"),
        (GRANITE, {"attention": "auto", "loss": "fused"}, "^loss fused is not possible with GraniteForCausalLM: the "
         "model changes what its LM head"),
        (GRANITE, {"loss": "auto"}, None),
    ):  # fmt: skip
        (here / "models/nano/config.json").write_text(json.dumps({**nano, **config}))
        describe("models/nano").write()
        here.set(**values)
        with pytest.raises(StageError, match=message) if message else nullcontext():
            make_rank()
    output = capsys.readouterr().out
    assert "loss: plain, because the model changes what its LM head returns" in output
    assert "profile_steps: there are no steps 70 to 71, the last one is 12" in output


def test_a_loss_that_is_not_finite_names_no_checkpoint_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, make_rank: Callable[..., RankHooks]
) -> None:
    losses = step.training_losses
    monkeypatch.setattr(step, "training_losses", lambda *args: (losses(*args)[0] * math.nan, None))
    with pytest.raises(StageError, match=r"^step 1: the gradient norm is nan: .*no checkpoint is saved yet") as error:
        make_rank().train()
    assert "newest checkpoint" not in str(error.value)


def test_more_epochs_continue_to_the_weights_of_a_run_from_scratch(training: Project, ranks: Ranks) -> None:
    training.set(lr_schedule="constant", batch_size=8, total_batch_size=32, eval_freq=3)  # an epoch is of three steps
    ranks.run(training, world_size=1)
    training.set(num_epochs=2)
    output = ranks.run(training, world_size=1)
    assert "was identical until there" in output and "resuming from step 3 of 6" in output
    adopted = CheckpointManifest.read(newest_checkpoint(training, 6)).adopted
    assert adopted and adopted.step == 3
    assert "params.num_epochs: 1 there, 2 here" in adopted.differences
    continued = content(newest_checkpoint(training, 6))

    shutil.rmtree(training / "outputs")
    ranks.run(training, world_size=1)
    assert CheckpointManifest.read(newest_checkpoint(training, 6)).adopted is None
    assert continued == content(newest_checkpoint(training, 6))


@pytest.mark.slow
def test_a_run_extends_the_one_that_it_names_and_records_it(training: Project, ranks: Ranks) -> None:
    ranks.run(training)
    shorter = training.checkpoints().name
    training.set(num_epochs=2, lr=0.001)
    assert "resuming" not in ranks.run(training, "kill rank 0 at step 0", -9)
    training.set(extend_from=shorter)
    output = ranks.run(training, "kill rank 0 at step 15", -9)
    assert f"extending outputs/test/checkpoints/{shorter}/step-00000012 with another schedule" in output
    assert "resuming from step 12 of 24" in output
    assert "identical" not in output
    training.set(runtime={"resume": "never"})  # deletes its own checkpoints, and extends again
    assert "resuming from step 12 of 24" in ranks.run(training)
    last = newest_checkpoint(training, 24)
    adopted = CheckpointManifest.read(last).adopted
    assert adopted
    assert (adopted.run_id, adopted.step) == (shorter, 12)
    assert f"params.extend_from: null there, '{shorter}' here" in adopted.differences
    schedule = load_params(TrainParams, path=training / "params.yaml")
    rates = dict(zip(*history.series(history.read(last / history.HISTORY), "lr"), strict=True))
    assert rates[13] == learning_rate(schedule, 24, 12)  # not that of the run that it extends
    training.set(extend_from=None, runtime={"resume": "auto"})  # another run: its result does not depend on that one
    assert "resuming" not in ranks.run(training)
    assert newest_checkpoint(training, 24).parent != last.parent


def test_a_rank_that_read_other_files_than_rank_0_is_named_once(
    training: Project, ranks: Ranks, tmp_path: Path
) -> None:
    other = training.copy(tmp_path / "other")
    other.set(seed=1, lr=0.1, runtime={"ckpt_freq": 3})
    ranks.start(training, f"directory rank 1 at {other.path}")
    statuses, output = ranks.wait()
    assert statuses == [2, 2], output
    assert output.splitlines() == [
        "error: rank 1 differs from rank 0: params.lr: 0.003 there, 0.1 here",
        "error: rank 1 differs from rank 0: params.seed: 0 there, 1 here",
        "error: rank 1 differs from rank 0: runtime.ckpt_freq: 2 there, 3 here",
    ]


def test_ranks_train_what_the_launcher_read_and_refuse_changed_files(
    here: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.set(max_steps=4)
    params = load_params(TrainParams)
    monkeypatch.setenv("TRAINING_LAUNCH", "")  # so that it is removed again
    Launch(params, load_params(TrainRuntime, "runtime"), run.describe(params).identity, None).hand_over()
    launch = json.loads(os.environ["TRAINING_LAUNCH"])
    here.set(seed=1, max_steps=2)  # for the next launch
    described, _, _ = read_launch()
    assert (described.params.seed, described.total_steps) == (0, 4)
    model = here / "data/model.json"
    model.write_text(model.read_text() + "\n")
    changed = r"\nmodel: '\w+' at the launch, '\w+' now"
    with pytest.raises(StageError, match=f"files have changed since the launch: launch the training again{changed}$"):
        read_launch()
    del launch["runtime"]
    monkeypatch.setenv("TRAINING_LAUNCH", json.dumps(launch))
    with pytest.raises(
        StageError, match=r"^the code has changed since the launch \(runtime: Field required\): launch it"
    ):
        read_launch()


@pytest.mark.usefixtures("here")
def test_ranks_start_however_many_checkpoints_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    own = run.describe(load_params(TrainParams))
    kept = [own.directory / step_name(step) for step in range(5000, 0, -1)]
    monkeypatch.setenv("TRAINING_LAUNCH", "")  # so that it is removed again
    chosen = decision.Decision("resume", kept, "x has the format 1; " * 10_000)
    Launch(own.params, load_params(TrainRuntime, "runtime"), own.identity, chosen).hand_over()
    subprocess.run(["true"], check=True)
    _, _, received = read_launch()
    assert received and received.checkpoints == kept[:100]


def test_a_changed_batch_size_adopts_an_unfinished_run(training: Project, ranks: Ranks) -> None:
    training.set(max_steps=8)
    ranks.run(training, "kill rank 0 at step 5", -9, world_size=1)
    training.set(batch_size=4, eval_batch_size=3, eval_rows=5)
    output = ranks.run(training, world_size=1)
    assert "was identical until there" in output
    last = newest_checkpoint(training, 8)
    adopted = CheckpointManifest.read(last).adopted
    assert adopted
    assert "params.batch_size: 2 there, 4 here" in adopted.differences
    # Losses on other rows are not kept, and neither is what the steps of another run have cost.
    steps, _ = history.series(history.read(last / "history.tsv"), "validation_loss")
    assert steps == [step for step in (4, 8) if step > adopted.step]
    assert TrainMetrics.of(last).cost.steps == 8 - adopted.step


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"total_batch_size": 10}, "10 is not a multiple of batch_size 2 x 2 ranks: use total_batch_size 8 or 12 or"),
        ({"batch_size": 8}, "use total_batch_size 16"),
        ({"lr": "fast"}, "lr is 'fast'"),
        ({"max_grad_norm": 0}, "max_grad_norm is 0: no clipping is written as a limit that no"),
        ({"lr_schedule": "cosinus"}, "'constant' or 'wsd'"),
        ({"extend_from": "the last one"}, "extend_from is 'the last one': string should match pattern"),
        ({"extend_from": 1234567890123456}, "run 1234567890123456 cannot be extended:"),  # YAML reads it as a number
        ({"extend_from": 1.5e57}, "string should match pattern '^[0-9a-f]{16}$'; put text that looks like a number in"),
        ({"num_epoch": 2}, "unknown parameter 'num_epoch'; did you mean 'num_epochs'?"),
        ({"fsdp": {"sharding": 1}}, "unknown parameter 'fsdp.sharding'"),
        ({"runtime": {"keep_checkpoints": 1}}, "runtime.keep_checkpoints is 1: input should be greater"),
        ({"total_batch_size": 1000}, "less than one step"),
        ({"warmup_steps": True}, "warmup_steps must be a number, not a boolean"),
        ({"runtime": {"profile_steps": [7, 3]}}, "profile_steps is [7, 3]: the first step must not be after the last"),
        ({"runtime": {"log_freq": True}}, "runtime.log_freq must be a number, not a boolean"),
        ({"seed": 2**63}, f"seed is {2**63}: input should be less than {2**32}"),
    ],
)  # fmt: skip
def test_impossible_parameters_are_refused(here: Project, values: dict[str, object], message: str) -> None:
    here.set(**values)
    with pytest.raises(StageError, match=re.escape(message)):
        read_params()


def read_params() -> TrainParams:
    """As two ranks do at their start."""
    described, runtime, _ = read_launch()
    described.params.grad_accum_steps(2)
    decision.begin(described, how_to_resume(runtime))
    return described.params


def test_a_float_that_yaml_reads_as_a_string_is_a_float(here: Project) -> None:
    here.set(lr="2e-05")
    assert "lr: 2e-05" in (here / "params.yaml").read_text()
    assert read_params().lr == 0.00002


def test_the_environment_overrides_the_runtime_section(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_params(TrainRuntime, "runtime")
    monkeypatch.setenv("PIPELINE_RUNTIME", "{log_freq: 7}")
    assert load_params(TrainRuntime, "runtime") == replace(before, log_freq=7)
    place = r"params.yaml with \$PIPELINE_RUNTIME: "
    for value, message in (
        ("{log_frq: 7}", place + ".* did you mean 'runtime.log_freq'"),
        ("{log_freq: 0}", place + "runtime.log_freq is 0"),
        ("{sbatch_args: '--time=\"1'}", place + "runtime.sbatch_args is .*: no closing quotation"),
        ("{sbatch_args: --mem=1G --test-only}", "the training is one job, so sbatch cannot have --test-only"),
        ("docker", "values of the section"),
    ):
        monkeypatch.setenv("PIPELINE_RUNTIME", value)
        with pytest.raises(StageError, match=message):
            load_params(TrainRuntime, "runtime")


def test_a_rank_whose_peer_ends_before_they_connect_has_lost_the_connection(
    training: Project, ranks: Ranks, tmp_path: Path
) -> None:
    training.set(runtime={"timeout_minutes": 0.01})
    ranks.start(training, f"directory rank 0 at {tmp_path}")  # where there is no params.yaml
    statuses, output = ranks.wait()
    assert statuses == [2, 1], output
    assert "error: rank 1 lost the connection to another rank" in output
    assert "Traceback" not in output


def test_a_step_has_one_collective_of_numbers(training: Project, ranks: Ranks) -> None:
    training.set(max_steps=4, eval_freq=3)
    ranks.run(training, f"count rank 0 at {training / 'collectives'}")
    collectives = [line.split() for line in (training / "collectives").read_text().splitlines()]
    sums = [size for name, size in collectives if name == "all_reduce"]
    assert sums.count("32") == 4 + 2  # before each step, before each validation and the end


def test_the_table_of_positions_is_that_of_seq_length(here: Project, make_rank: Callable[..., RankHooks]) -> None:
    """As if the model had no other, though no document is longer than its original context."""
    config, losses = here.json("models/nano/config.json"), []
    for short in (1.0, 4.0):
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [short] * 4, "long_factor": [4.0] * 4,
                "factor": 4.0, "original_max_position_embeddings": 24}  # fmt: skip
        (here / "models/nano/config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
        describe("models/nano").write()
        one = make_rank()
        one.trainer.validate(one)
        losses.append(one.trainer.validation.loss)
    assert losses[0] == losses[1]
