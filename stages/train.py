"""Train the model: one rank of it. `dvc repro train` runs `python -m stages.launch`, which starts the ranks.

Reads    data/tokens/train, data/tokens/validation, data/model.json and the model's own files
Writes   outputs/<experiment_name>/checkpoints/<run_id>/step-N
Command  torchrun --nproc-per-node 2 -m stages.train
"""

import logging
import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR

from stages.artifacts import command, process
from stages.artifacts.errors import StageError
from stages.artifacts.history import HISTORY, History
from stages.artifacts.identity import Adoption
from stages.artifacts.params_file import load_params
from stages.checkpointing import retention
from stages.checkpointing.layout import FORMAT, CheckpointManifest, latest_valid, list_checkpoints, step_name
from stages.checkpointing.lock import rank_lock
from stages.model.manifest import ModelManifest
from stages.tokens.batch import count_labels
from stages.tokens.packed import TRAIN, VALIDATION
from stages.tokens.rows import TokenRows
from stages.training import flops, saver, sharded_model, trackers
from stages.training.console import Console, log_to, print_line
from stages.training.distributed import LostConnection, all_reduce_sum, is_rank0, process_group, run_on_rank0
from stages.training.document_mask import check_document_mask
from stages.training.loader import BatchLoader
from stages.training.memory import explain_out_of_memory
from stages.training.metrics import MetricsLogger
from stages.training.optimizer import make_optimizer, set_lr
from stages.training.params import TrainParams, TrainRuntime
from stages.training.precision import load_scaler_state, make_grad_scaler, scaler_state
from stages.training.run import Run, adoption, describe, packages, resume_candidates
from stages.training.schedule import lr_ratio
from stages.training.signals import INTERRUPTED, LAUNCHER, StopSignal
from stages.training.state import TrainState
from stages.training.step import StepResult, train_step, validation_loss
from stages.training.timers import Timers, memory_gib
from stages.training.watchdog import Heartbeat

_LOG = logging.getLogger("stages.train")


class Trainer:
    """The state of a training, and its loop."""

    def __init__(
        self, run: Run, runtime: TrainRuntime, mesh: DeviceMesh, stop_signal: StopSignal, heartbeat: Heartbeat
    ) -> None:
        self.run, self.params, self.runtime = run, run.params, runtime
        self.stop_signal, self.heartbeat = stop_signal, heartbeat
        model_manifest = ModelManifest.read()
        eos_token_id = model_manifest.eos_token_id
        assert eos_token_id is not None, "pack refuses a model without one"
        # Before the seeds are set, because the check seeds torch itself; on one rank, as its answer is the same on all.
        run_on_rank0(lambda: check_document_mask(model_manifest, self.params))
        # Dropout must differ between ranks, which train on different rows. Times the number of ranks: seed + rank would
        # give rank 1 of seed 0 the masks of rank 0 of seed 1.
        torch.manual_seed(self.params.seed * dist.get_world_size() + dist.get_rank())

        train_rows = TokenRows(TRAIN)
        self.train_loader = BatchLoader(train_rows, self.params, eos_token_id)
        self.validation_loader = BatchLoader(TokenRows(VALIDATION), self.params, eos_token_id)
        heartbeat.note("choosing the checkpoint to start from")
        # Before the model is built: where there is a checkpoint, the weights of the model files are not read at all.
        start = run_on_rank0(self.find_start)
        heartbeat.note("building the model")
        self.model = sharded_model.build(model_manifest, self.params, mesh, initialize=start is None)
        self.optimizer = make_optimizer(self.model, self.params)
        self.scaler = make_grad_scaler(self.params.precision, next(self.model.parameters()).device)
        self.scheduler = LambdaLR(self.optimizer, lambda step: lr_ratio(self.params, run.total_steps, step))
        # torch's stager cannot copy the state of the 8-bit optimizer.
        asynchronous = runtime.async_checkpoint and self.params.optimizer != "adamw_8bit"
        self.saver = saver.Saver(runtime, asynchronous)

        self.step = 0
        self.adopted: Adoption | None = None
        self.validation_loss: float | None = None
        """Of this very step, if it was validated."""
        self.saved_step: int | None = None
        self.saved_at = time.monotonic()
        state, history = (None, History()) if start is None else self.resume(start)
        self.timers = Timers(lambda phase: heartbeat.note(f"step {self.step + 1}, {phase}"))
        self.tracker = trackers.start_tracker(runtime.tracker if is_rank0() else "none", run, self.step)
        self.metrics = MetricsLogger(
            run, runtime.log_freq, Console(dist.get_rank(), self.step, run.total_steps), self.tracker, self.timers,
            flops.flops_per_token(self.model, train_rows.seq_length), history, state.metrics if state else None,
        )  # fmt: skip

    def train(self) -> bool:
        """Train to the last step; False where a signal asked to stop before. Either way the state is saved."""
        self.model.train()
        with self.saver:
            if self.step == 0:  # the loss before training, with which `evaluate` compares
                self.validate()
                self.record(StepResult(loss=None, grad_norm=None))
            while self.step < self.run.total_steps:
                batches, num_labels, must_stop, must_save = self.next_batches()
                if must_stop:
                    break
                if must_save:  # the step before this one; its batches are already there, but draw no random numbers
                    self.save()
                result = self.train_step(batches, num_labels)
                self.validate()
                self.record(result)
            self.save()  # where a save has failed on any rank, all raise here, as they left the loop at the same step
        self.metrics.console.close()
        return self.step == self.run.total_steps

    def next_batches(self) -> tuple[list[dict[str, Tensor]], int, bool, bool]:
        """This rank's batches, the labels of all ranks in this step, and whether to stop or to save before it.

        What one rank knows, all must know at the same step: a signal reaches one process, a save fails on one rank,
        and the clock for saving is that of rank 0. A rank that acted alone would leave the others waiting in the next
        collective. So each step has one all-reduce of four numbers on the CPU. With that of the loss it takes 4 ms of a
        step of 970 ms of the default model on two cores (docs/benchmarks.md).
        """
        with self.timers.phase("data"):
            batches = self.train_loader.step_batches(self.step)
            self.heartbeat.note(f"step {self.step + 1}, agreeing with the other ranks")
            num_labels, stop, failed, save = all_reduce_sum(
                sum(map(count_labels, batches)), self.stop_signal.received, self.saver.failed, self.is_time_to_save()
            )
        return batches, int(num_labels), bool(stop or failed), bool(save)

    def train_step(self, batches: list[dict[str, Tensor]], num_labels: int) -> StepResult:
        """Update the weights with one step."""
        try:
            result = train_step(self.model, self.optimizer, self.scaler, batches, num_labels, self.params, self.timers)
        except StageError as error:
            raise StageError(f"step {self.step + 1}: {error}") from None
        self.scheduler.step()
        self.step += 1
        return result

    def is_time_to_validate(self) -> bool:
        """Whether a validation is due after this step."""
        return self.step % self.params.eval_freq == 0 or self.step == self.run.total_steps

    def validate(self) -> None:
        """Measure the loss on the validation rows, where it is due."""
        self.validation_loss = None
        if self.is_time_to_validate():
            self.validation_loss = validation_loss(
                self.model,
                self.validation_loader,
                before_forward=lambda: self.heartbeat.note(f"validation after step {self.step}"),
            )

    def record(self, result: StepResult) -> None:
        """Report the step and its validation."""
        if self.runtime.debug and self.step:
            rows = self.train_loader.step_indices(self.step - 1).tolist()
            now, peak = memory_gib()
            _LOG.debug(
                f"step {self.step} done: rows {rows}, loss {result.loss!r}, grad norm {result.grad_norm!r}, "
                f"memory {now:.3f} GiB, peak {peak:.3f} GiB"
            )
        self.metrics.log(self.step, result, self.validation_loss, self.is_time_to_validate())

    def find_start(self) -> Path | None:
        """The checkpoint to continue from, or None for step 0. Called on rank 0 alone."""
        directory = self.run.directory
        # `prune` would count the old steps as the newest, and a rename could not replace them.
        if self.runtime.resume == "never":
            retention.delete(list_checkpoints(directory))
        path = latest_valid(resume_candidates(self.run, self.runtime, print_line), print_line)
        for newer in list_checkpoints(directory):
            # Damaged: the run will publish this step again, and a rename cannot replace a directory.
            if path is None or newer.name > path.name:
                retention.quarantine(newer)
        retention.prune(directory, self.runtime.keep_checkpoints)
        return path

    def resume(self, path: Path) -> tuple[TrainState, History]:
        """Continue from a checkpoint of this run, or of one that was identical until there."""
        with rank_lock(path.parent):  # of another run, perhaps: `checkpoints prune` must not delete it meanwhile
            state = saver.load(path, self.model, self.optimizer, self.scheduler)
            history = History((path / HISTORY).read_text(encoding="utf-8"))
            manifest = CheckpointManifest.read(path)
        load_scaler_state(self.scaler, state.loss_scaler)
        self.step, self.adopted, self.validation_loss = state.step, manifest.adopted, manifest.validation_loss
        if path.parent == self.run.directory:
            self.saved_step = self.step  # nothing to publish before the next step
        else:
            self.adopted = adoption(self.run, manifest)
            # From here on the learning rate is this run's, also where `resume=extend` had another one until here.
            for group, lr in zip(self.optimizer.param_groups, self.scheduler.base_lrs, strict=True):
                set_lr(group, lr * lr_ratio(self.params, self.run.total_steps, self.step))
        if is_rank0():
            print_line(f"resuming from step {self.step} of {self.run.total_steps}: {path}")
        return state, history

    def is_time_to_save(self) -> bool:
        """Whether rank 0, whose clock counts, wants a checkpoint of this step; False on the other ranks."""
        if not is_rank0():
            return False
        freq, minutes = self.runtime.ckpt_freq, self.runtime.ckpt_minutes
        by_step = freq is not None and self.step % freq == 0
        return by_step or (minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes)

    def save(self) -> None:
        """Publish a checkpoint of this step, unless there is one, or nothing was trained yet."""
        if self.step in (0, self.saved_step):
            return
        self.heartbeat.note(f"saving step {self.step}")
        state = TrainState(
            step=self.step,
            epoch=self.step * self.params.total_batch_size / self.run.num_rows,
            metrics=self.metrics.metrics,
            loss_scaler=scaler_state(self.scaler),
            rng=[],
        )
        manifest = CheckpointManifest(
            format=FORMAT,
            run_id=self.run.run_id,
            step=self.step,
            total_steps=self.run.total_steps,
            identity=self.run.identity,
            validation_loss=self.validation_loss,
            adopted=self.adopted,
            packages=packages(),
            files={},
            tensors={},
        )
        path = self.run.directory / step_name(self.step)
        history = self.metrics.history.text()
        self.saver.save(path, self.model, self.optimizer, self.scheduler, state, history, manifest)
        self.saved_step, self.saved_at = self.step, time.monotonic()


def main() -> None:
    command.parser(__doc__).parse_args()
    if LAUNCHER in os.environ:  # a rank whose launcher is gone must not write: the next launch may have started
        process.die_with_parent(signal.SIGKILL, int(os.environ[LAUNCHER]))
    stop_signal = StopSignal()  # early: a signal that came since the launcher blocked them is delivered here
    run = describe(load_params(TrainParams))
    runtime = load_params(TrainRuntime, "runtime")
    trackers.check(runtime.tracker)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Before the process group: every rank finds these errors by itself, and none waits for another that has ended.
    run.params.grad_accum_steps(world_size)
    mesh_shape = run.params.fsdp.mesh_shape(world_size, int(os.environ["LOCAL_WORLD_SIZE"]))
    if runtime.debug:
        log_to(run.log_directory / "logs" / run.run_id / f"rank-{rank}.log")
    heartbeat = Heartbeat(rank)
    try:
        with (
            # Outermost: held until the process group has ended and the last checkpoint is published.
            rank_lock(run.directory),
            process_group(mesh_shape, runtime.timeout_minutes) as mesh,
            explain_out_of_memory(run.params, rank, world_size),
        ):
            trainer = Trainer(run, runtime, mesh, stop_signal, heartbeat)
            with closing(trainer.tracker):
                is_finished = trainer.train()
    except LostConnection as error:
        sys.exit(f"error: {error}")  # status 1: unlike a StageError, it may not occur again
    stop_signal.ignore()
    if not is_finished:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    command.run(main)
