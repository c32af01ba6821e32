"""Train the model: one rank of it. `dvc repro train` runs `python -m stages.launch`, which starts the ranks.

Reads    data/tokens/train, data/tokens/validation, data/model.json and the model's own files
Writes   outputs/<experiment_name>/checkpoints/<run_id>/step-N
Command  torchrun --nproc-per-node 2 -m stages.train
"""

import logging
import math
import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR

from stages.artifacts import checkpoint as published
from stages.artifacts import command, params, process
from stages.artifacts.command import StageError
from stages.model import manifest as model_manifest
from stages.training import checkpoint, distributed, flops, memory, model, probe, retention, run, trackers
from stages.training.activity import Activity
from stages.training.batch import num_labels
from stages.training.data import TokenRows
from stages.training.optimizer import make_optimizer, set_lr
from stages.training.params import TrainParams, TrainRuntime
from stages.training.precision import LossScaler
from stages.training.process import INTERRUPTED, LAUNCHER, StopSignal, share_writing
from stages.training.schedule import lr_ratio
from stages.training.step import Batches, train_step, validation_loss
from stages.training.telemetry import Console, History, Timers, log_to, memory_gib, reset_peak_memory

_LOG = logging.getLogger("stages.train")


class Trainer:
    """The state of a training, and its loop."""

    def __init__(
        self, this: run.Run, runtime: TrainRuntime, mesh: DeviceMesh, stop: StopSignal, activity: Activity
    ) -> None:
        self.run, self.params, self.runtime, self.stop = this, this.params, runtime, stop
        self.activity = activity
        self.params.grad_accum_steps(dist.get_world_size())
        manifest = model_manifest.read()
        assert manifest.eos_token_id is not None  # pack refuses a model without one
        distributed.from_main(lambda: probe.check(manifest, self.params))
        torch.manual_seed(self.params.seed * dist.get_world_size() + dist.get_rank())

        train_rows, validation_rows = TokenRows(run.TRAIN), TokenRows(run.VALIDATION)
        self.batches = Batches(train_rows, self.params, manifest.eos_token_id)
        self.validation_batches = Batches(validation_rows, self.params, manifest.eos_token_id)
        self.tokens_per_step = self.params.total_batch_size * train_rows.seq_length
        activity.note("choice of the checkpoint to start from")
        start = distributed.from_main(self.find_start)
        activity.note("building the model")
        self.model = model.build(manifest, self.params, mesh, initialize=start is None)
        self.optimizer = make_optimizer(self.model, self.params)
        self.scaler = LossScaler(self.params.precision)
        self.scheduler = LambdaLR(self.optimizer, lambda step: lr_ratio(self.params, this.total_steps, step))

        self.step = 0
        self.adopted: dict[str, Any] | None = None
        self.history = History()
        self.metrics: dict[str, Any] = {}
        self.validation_loss: float | None = None
        # Of the state of the 8-bit optimizer torch makes no copy.
        asynchronous = runtime.async_checkpoint and self.params.optimizer != "adamw_8bit"
        self.saver = checkpoint.Saver(runtime, asynchronous)
        self.saved_step: int | None = None
        self.saved_at = time.monotonic()
        if start is not None:
            self.resume(start)
        self.console = Console(dist.get_rank(), self.step, this.total_steps)
        tracker = runtime.tracker if distributed.is_main() else "none"
        self.tracker = trackers.start(tracker, this, self.step)
        self.timers = Timers(lambda phase: activity.note(f"step {self.step + 1}, {phase}"))
        self.timed_steps = 0
        self.flops_per_token = flops.flops_per_token(self.model, train_rows.seq_length)

    def train(self) -> bool:
        """Train to the last step; False where a signal asked to stop before. Either way the state is saved."""
        self.model.train()
        with self.saver:
            if self.step == 0:
                self.record(loss=None, grad_norm=None)
            while self.step < self.run.total_steps:
                with self.timers.phase("data"):
                    batches = self.batches.of_step(self.step)
                    self.activity.note(f"step {self.step + 1}, agreement with the other ranks")
                    # What one rank knows, all must know, at the same step.
                    labels, stop, failed, save = distributed.all_reduce_sum(
                        sum(map(num_labels, batches)), self.stop.received, self.saver.failed, self.is_time_to_save()
                    )
                if stop or failed:
                    break
                if save:
                    self.save()
                try:
                    loss, grad_norm = train_step(
                        self.model, self.optimizer, self.scaler, batches, int(labels), self.params, self.timers
                    )
                except StageError as error:
                    raise StageError(f"step {self.step + 1}: {error}") from None
                self.scheduler.step()
                self.step += 1
                if self.runtime.debug:
                    self.log_step(loss, grad_norm)
                self.record(loss, grad_norm)
            self.save()
        self.console.close()
        return self.step == self.run.total_steps

    def record(self, loss: float | None, grad_norm: float | None) -> None:
        """Validate where it is time to; add to the history; tell the person who watches."""
        last = self.step == self.run.total_steps
        self.validation_loss = validation = None
        if self.step % self.params.eval_freq == 0 or last:
            self.validation_loss = validation = validation_loss(
                self.model, self.validation_batches, lambda: self.activity.note(f"validation after step {self.step}")
            )
            self.metrics["validation_loss"] = validation
            if validation is not None:
                self.console.line(f"step {self.step}: validation loss {validation:.4f}")
        lr = self.params.lr * lr_ratio(self.params, self.run.total_steps, max(0, self.step - 1))
        tokens = self.step * self.tokens_per_step
        if self.step % self.params.history_freq == 0 or validation is not None or last:
            epoch = self.step * self.params.total_batch_size / self.run.num_rows
            values = {"epoch": epoch, "tokens": tokens, "loss": loss, "lr": lr if self.step else None,
                      "grad_norm": grad_norm, "validation_loss": validation}  # fmt: skip
            self.history.add(step=self.step, **values)
            self.tracker.log(self.step, trackers.without_none(values))
        if self.step:
            self.timed_steps += 1
            self.console.step()
            self.metrics |= {"loss": loss, "steps": self.step, "tokens": tokens}
            self.metrics["skipped_steps"] = self.scaler.skipped_steps
            if self.step % self.runtime.log_freq == 0 or last:
                self.report(loss, lr, grad_norm)

    def report(self, loss: float | None, lr: float, grad_norm: float | None) -> None:
        """The line of every `log_freq` steps: all that is timed is since the line before."""
        loss, grad_norm = (math.nan if value is None else value for value in (loss, grad_norm))
        seconds = self.timers.take()
        steps, self.timed_steps = self.timed_steps, 0
        rate = steps * self.tokens_per_step / sum(seconds.values())
        mfu = flops.utilisation(rate, self.flops_per_token, self.params.precision)
        now, peak = memory_gib()
        reset_peak_memory()
        times = {name: 1000 * value / steps for name, value in seconds.items()}
        self.metrics |= {
            "tokens_per_second": round(rate, 1),
            **({} if mfu is None else {"mfu": round(mfu, 4)}),
            "memory_peak_gib": round(max(peak, self.metrics.get("memory_peak_gib", 0)), 3),
            "milliseconds": {name: round(value, 3) for name, value in times.items()},
        }
        speed = {"tokens_per_second": rate, "mfu": mfu, "memory_gib": now, "memory_peak_gib": peak}
        self.tracker.log(self.step, trackers.without_none(speed | {f"{name}_ms": time for name, time in times.items()}))
        self.console.line(
            f"step {self.step}/{self.run.total_steps}  loss {loss:.4f}  lr {lr:.2e}  grad norm {grad_norm:.3f}  "
            f"{rate:,.0f} tokens/s  "
            + ("" if mfu is None else f"MFU {mfu:.1%}  ")
            + "  ".join(f"{name} {value:.1f} ms" for name, value in times.items())
            + f"  memory {now:.2f} GiB, peak {peak:.2f} GiB"
            + (f"  {self.scaler.skipped_steps} steps skipped" if self.scaler.skipped_steps else "")
        )

    def log_step(self, loss: float | None, grad_norm: float | None) -> None:
        """What the log of this rank says of a step, beside the times at which its phases began."""
        rows = self.batches.rows_of_step(self.step - 1).tolist()
        now, peak = memory_gib()
        _LOG.debug(
            f"step {self.step} done: rows {rows}, loss {loss!r}, grad norm {grad_norm!r}, memory {now:.3f} GiB, "
            f"peak {peak:.3f} GiB"
        )

    def find_start(self) -> Path | None:
        """The checkpoint to go on from, or None for step 0. Rank 0 alone decides."""
        if self.runtime.resume == "never":
            for old in published.find(self.run.directory):
                retention.delete([old])
        path = published.newest_whole(run.starting_points(self.run, self.runtime, say), say)
        for newer in published.find(self.run.directory):  # damaged: out of the way of those to come
            if path is None or newer.name > path.name:
                retention.set_aside(newer)
        retention.prune(self.run.directory, self.runtime.keep_checkpoints)
        return path

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of this run, or of one that took the same path."""
        with share_writing(path.parent):
            state = checkpoint.load(path, self.model, self.optimizer, self.scheduler)
        manifest = published.read_manifest(path)
        self.scaler.load_state_dict(state["loss_scaler"])
        self.step, self.metrics, self.adopted = state["step"], state["metrics"], manifest["adopted"]
        self.validation_loss = manifest["validation_loss"]
        self.history = History((path / "history.tsv").read_text(encoding="utf-8"))
        if path.parent == self.run.directory:
            self.saved_step = self.step
        else:
            self.adopted = run.adoption(self.run, manifest)
            # Its learning rate is this run's from here on, also where `resume=extend` took another one until here.
            for group, lr in zip(self.optimizer.param_groups, self.scheduler.base_lrs, strict=True):
                set_lr(group, lr * lr_ratio(self.params, self.run.total_steps, self.step))
        if distributed.is_main():
            say(f"resuming from step {self.step} of {self.run.total_steps}: {path}")

    def is_time_to_save(self) -> bool:
        """Whether rank 0, whose clock counts, wants a checkpoint of this step; the other ranks leave it to it."""
        if not distributed.is_main():
            return False
        freq, minutes = self.runtime.ckpt_freq, self.runtime.ckpt_minutes
        by_step = freq is not None and self.step % freq == 0
        return by_step or (minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes)

    def save(self) -> None:
        """Publish a checkpoint of this step, unless there is one, or nothing was learnt yet."""
        if self.step in (0, self.saved_step):
            return
        self.activity.note(f"saving step {self.step}")
        state = {"step": self.step, "epoch": self.step * self.params.total_batch_size / self.run.num_rows,
                 "metrics": self.metrics, "loss_scaler": self.scaler.state_dict()}  # fmt: skip
        manifest = {
            "run_id": self.run.run_id,
            "step": self.step,
            "total_steps": self.run.total_steps,
            "identity": self.run.identity,
            "validation_loss": self.validation_loss,
            "adopted": self.adopted,
            "packages": run.packages(),
        }
        path = self.run.directory / published.step_name(self.step)
        self.saver.save(path, self.model, self.optimizer, self.scheduler, state, self.history.text(), manifest)
        self.saved_step, self.saved_at = self.step, time.monotonic()


def say(text: str) -> None:
    """Print one line at once."""
    print(text, flush=True)


def main() -> None:
    command.parser(__doc__).parse_args()
    if LAUNCHER in os.environ:  # a rank whose launcher is gone must not write
        process.die_with_parent(signal.SIGKILL, int(os.environ[LAUNCHER]))
    stop = StopSignal()
    this = run.describe(params.load(TrainParams))
    runtime = params.load(TrainRuntime, "runtime")
    trackers.check(runtime.tracker)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if runtime.debug:
        log_to(this.aside / "logs" / this.run_id / f"rank-{rank}.log")
    activity = Activity(rank)
    try:
        with (
            share_writing(this.directory),
            distributed.process_group(this.params.fsdp.mesh_shape, runtime.timeout_minutes) as mesh,
            memory.explained(this.params, rank, world_size),
        ):
            trainer = Trainer(this, runtime, mesh, stop, activity)
            with closing(trainer.tracker):
                finished = trainer.train()
    except distributed.LostConnection as error:
        sys.exit(f"error: {error}")  # status 1: unlike a StageError, it need not come again
    stop.ignore()
    if not finished:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    command.run(main)
