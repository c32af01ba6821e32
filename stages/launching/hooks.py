"""What a rank does around the loop, which alone decides the weights: note, report, save, stop."""

import dataclasses
import logging
import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path

import torch.distributed as dist

from stages.base.errors import StageError
from stages.base.history import HISTORY, SPEED, History, Table
from stages.checkpointing.layout import FORMAT, CheckpointManifest, step_name
from stages.checkpointing.run import Run, packages
from stages.checkpointing.saver import Saver
from stages.checkpointing.state import Place, ScalerState, TrainState
from stages.forward.distributed import is_rank0
from stages.launching import flops, trackers
from stages.launching.console import Console
from stages.launching.metrics import SPEED_COLUMNS, MetricsLogger
from stages.launching.profiler import Profiler
from stages.launching.runtime import TrainRuntime
from stages.launching.timers import Timers, memory_gib
from stages.ranks.signals import StopSignal
from stages.ranks.watchdog import Heartbeat
from stages.training.loop import Trainer
from stages.training.precision import scaler_state
from stages.training.step import StepResult, Validation

_LOG = logging.getLogger("stages.train")


class RankHooks:
    """The `Hooks` of the loop."""

    def __init__(
        self, run: Run, runtime: TrainRuntime, trainer: Trainer, saver: Saver, checkpoint: Path | None,
        place: Place | None, stop_signal: StopSignal, heartbeat: Heartbeat,
    ) -> None:  # fmt: skip
        """`trainer` is at the step of `checkpoint`, or at 0; `place` is that of this launch, on rank 0 alone."""
        self.run, self.runtime, self.trainer, self.saver, self.place = run, runtime, trainer, saver, place
        self.stop_signal, self.note, self.saved_at = stop_signal, heartbeat.note, time.monotonic()
        self.saved_step = trainer.step or None  # nothing to publish before the next step
        before = TrainState.of(checkpoint) if checkpoint else None
        history, speed = ((checkpoint / name).read_text("utf-8") if checkpoint else "" for name in (HISTORY, SPEED))
        self.adopted = CheckpointManifest.read(checkpoint).adopted if checkpoint else None
        self.launches = 1 + (before.launches if before else 0)
        tracker = runtime.tracker if is_rank0() else "none"
        self.tracker = trackers.start_tracker(tracker, run, trainer.step, checkpoint)
        steps = runtime.profile_steps if is_rank0() else None
        self.profiler = Profiler(steps, run.log_directory / "profile" / run.run_id)
        timers = Timers(lambda phase: heartbeat.note(f"step {trainer.step + 1}, {phase}"))
        self.phase = timers.phase
        sources = filter(None, trainer.validation_loader.validation_rows)
        self.metrics = MetricsLogger(
            run, runtime.log_freq, Console(dist.get_rank(), trainer.step, run.total_steps), self.tracker, timers,
            flops.flops_per_token(trainer.model, run.seq_length), History(history, sources),
            Table(SPEED_COLUMNS, speed), before.skipped_steps if before else 0,
        )  # fmt: skip

    def train(self) -> bool:
        """Train to the last step; False where a signal asked to stop before. Either way the state is saved."""
        with closing(self.tracker):
            with self.saver, self.profiler:
                is_finished = self.trainer.train(self)
            self.metrics.console.close()
        return is_finished

    def before_step(self, step: int) -> None:
        """A step starts, which a signal to stop waits for; before the first one there was nothing to save."""
        self.stop_signal.training_starts()
        self.profiler.before_step(step)

    @contextmanager
    def explained(self, step: int) -> Iterator[None]:
        """Have errors name the step, and the checkpoint from which the next launch resumes."""
        try:
            yield
        except StageError as error:
            saved = self.saved_step
            newest = f"the newest checkpoint is of step {saved}" if saved else "no checkpoint is saved yet"
            raise StageError(f"step {step}: {error}; {newest}") from None

    def wishes(self) -> tuple[bool, bool]:
        """To stop after a signal or a failed save; to save where rank 0, whose clock counts, finds it due."""
        return self.stop_signal.received or self.saver.failed, is_rank0() and self._is_time_to_save()

    def _is_time_to_save(self) -> bool:
        step, freq, minutes = self.trainer.step, self.runtime.ckpt_freq, self.runtime.ckpt_minutes
        # The best so far is saved whatever `runtime` says, so that the result does not depend on that.
        is_measured = self.run.params.export_from == "best" and self.trainer.validation is not None
        if is_measured and self.metrics.history.best_step(self.adopted) == step:
            return True
        by_step = freq is not None and step % freq == 0
        return by_step or (minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes)

    def report(self, step: int, result: StepResult, validation: Validation | None) -> None:
        """Report a step, and the validation after it."""
        self.metrics.log(step, result, validation)
        loss = validation and validation.loss
        if step == 0 and loss is not None and not math.isfinite(loss):  # no lr, which the next error would name
            raise StageError(
                f"the validation loss is {loss} before the first step: the initial weights are not finite, or too "
                f"large for precision {self.run.params.precision}: use other weights, or precision bf16 or fp32"
            )
        if self.runtime.debug and step:
            rows = self.trainer.train_loader.step_indices(step - 1).tolist()
            now, peak = memory_gib()
            _LOG.debug(
                f"step {step} done: rows {rows}, loss {result.loss!r}, grad norm {result.grad_norm!r}, "
                f"memory {now:.3f} GiB, peak {peak:.3f} GiB"
            )

    def save(self) -> None:
        """Publish a checkpoint of this step, unless there is one, or nothing was trained yet.

        Raises:
            StageError: this step, or one before it, has failed; or the save, or the one before it.
        """
        trainer = self.trainer
        trainer.catch_up()  # the checkpoint has their history, and none that is not finite
        if trainer.step in (0, self.saved_step):
            return
        self.note(f"saving step {trainer.step}")
        self.metrics.time_steps(trainer.step)
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
        state = TrainState(
            loss_scaler=ScalerState(*scaler_state(trainer.scaler)),
            skipped_steps=self.metrics.skipped_steps,
            launches=self.launches,
            place=self.place and dataclasses.replace(self.place, date=date),
            sources=trainer.train_loader.order.epochs(trainer.step),
        )
        manifest = CheckpointManifest(
            format=FORMAT,
            run_id=self.run.run_id,
            step=trainer.step,
            total_steps=self.run.total_steps,
            identity=self.run.identity,
            validation_loss=trainer.validation.loss if trainer.validation else None,
            adopted=self.adopted,
            packages=packages(self.run.identity.params),
            files={},
            tensors={},
        )
        path = self.run.directory / step_name(trainer.step)
        tables = {HISTORY: self.metrics.history.text(), SPEED: self.metrics.speed.text()}
        with self.phase("saving"):
            self.saver.save(path, trainer.model, trainer.optimizer, state, tables, manifest)
        self.saved_step, self.saved_at = trainer.step, time.monotonic()
