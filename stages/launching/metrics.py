"""What a training reports: the console, history.tsv, speed.tsv, train_metrics.json and the tracker.

history.tsv            every `history_freq` steps and at each validation: values that are reproducible, no times
speed.tsv              every `log_freq` steps, or 30 s where they are slow: speed, memory and times since the row before
console, tracker       at the same steps: both
train_metrics.json     the newest values, and what the whole run has cost; it comes from the last checkpoint
"""

import dataclasses
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from time import monotonic
from types import MappingProxyType

from stages.base.history import History, Table, of_source
from stages.checkpointing.run import Run
from stages.checkpointing.state import Cost, Place, TrainMetrics
from stages.launching import flops
from stages.launching.console import SILENT_SECONDS, Console
from stages.launching.timers import PHASES, Timers, memory_gib, reset_peak_memory
from stages.launching.trackers import Tracker, without_none
from stages.training.schedule import learning_rate
from stages.training.step import StepResult

_TIMED = (*PHASES, "other")

SPEED_COLUMNS = (
    *("step", "seconds", "tokens_per_second", "mfu", "memory_gib", "memory_peak_gib", "milliseconds_per_save"),
    *(f"{name}_ms" for name in _TIMED),
)
"""Of speed.tsv. Each row is about the steps since the row before, or since the launch if that is later: tokens per
second, MFU, memory of rank 0 in GiB at the end and at its peak, milliseconds that each save was waited for, and
milliseconds per step of each phase. `seconds` is the training time of the whole run so far."""


class MetricsLogger:
    """Takes what each step has measured and reports it."""

    def __init__(
        self, run: Run, log_freq: int, console: Console, tracker: Tracker, timers: Timers, flops_per_token: int | None,
        history: History, speed: Table, metrics: TrainMetrics | None, place: Place | None,
    ) -> None:  # fmt: skip
        """`history`, `speed` and `metrics` are those of the checkpoint that a run resumes from; `place` is rank 0's."""
        self.history, self.speed = history, speed
        self.console = console
        self._metrics, self._place = metrics or TrainMetrics(), place
        self._cost_before = self._metrics.cost  # of the earlier launches
        self._run, self._params, self._log_freq = run, run.params, log_freq
        self._tracker, self._timers, self._flops_per_token = tracker, timers, flops_per_token
        self._tokens_per_step = run.params.total_batch_size * run.seq_length
        self._num_steps = 0  # of this launch
        self._reported_steps, self._reported_saves = 0, 0
        self._reported_seconds = dict.fromkeys(_TIMED, 0.0)
        self._memory_peak_gib = 0.0
        self._reported_at = monotonic()

    def log(
        self, step: int, result: StepResult, validation_loss: float | None, is_validated: bool,
        source_losses: Mapping[str, float | None] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Report step `step` (0: nothing was trained yet), and the validation after it if there was one."""
        is_last = step == self._run.total_steps
        # Of the update just done: steps are counted from 1 here, and from 0 in the schedule.
        lr = learning_rate(self._params, self._run.total_steps, max(0, step - 1))
        if is_validated:
            self._metrics = dataclasses.replace(self._metrics, validation_loss=validation_loss)
        if step % self._params.history_freq == 0 or validation_loss is not None or is_last:
            values: dict[str, float | None] = {
                "epoch": step * self._params.total_batch_size / self._run.num_rows,
                "tokens": step * self._tokens_per_step,
                "loss": result.loss,
                "lr": lr if step else None,
                "grad_norm": result.grad_norm,
                "validation_loss": validation_loss,
                **{of_source(name): loss for name, loss in source_losses.items() if is_validated},
            }
            # Unrounded and without times: a resumed run must give the same file, byte for byte.
            self.history.add(step=step, **values)
            self._tracker.log(step, without_none(values))
        if step == 0:
            return
        self._num_steps += 1
        self.console.advance()
        self._metrics = dataclasses.replace(
            self._metrics, steps=step, tokens=step * self._tokens_per_step, loss=result.loss,
            skipped_steps=self._metrics.skipped_steps + (result.grad_norm is None),
        )  # fmt: skip
        # Ten slow steps take minutes, in which a person would think that the training hangs.
        if step % self._log_freq == 0 or is_last or monotonic() - self._reported_at >= SILENT_SECONDS:
            self._log_speed(step, result, lr)

    def _log_speed(self, step: int, result: StepResult, lr: float) -> None:
        """The line of some steps: all that is timed is since the line before."""
        self._reported_at = monotonic()
        read = self._timers.read()
        seconds = {name: value - self._reported_seconds[name] for name, value in read.items()}
        steps = self._num_steps - self._reported_steps
        saves = self._timers.counts["saving"] - self._reported_saves
        per_save = 1000 * seconds["saving"] / saves if saves else None
        self._reported_steps, self._reported_seconds = self._num_steps, read
        self._reported_saves = self._timers.counts["saving"]
        rate = steps * self._tokens_per_step / sum(seconds.values())
        mfu = self._utilization(rate)
        now, peak = memory_gib()
        reset_peak_memory()  # each line shows its own peak: that of loading would hide all later ones
        self._memory_peak_gib = max(peak, self._memory_peak_gib)
        times = {name: 1000 * value / steps for name, value in seconds.items()}
        phases = {f"{name}_ms": value for name, value in times.items()}
        speed = {"tokens_per_second": rate, "mfu": mfu, "memory_gib": now, "memory_peak_gib": peak,
                 "milliseconds_per_save": per_save, **phases}  # fmt: skip
        self._tracker.log(step, without_none(speed))
        speed["seconds"] = self._cost_before.training_seconds + sum(read.values())
        self.speed.add(step=step, **{name: value and round(value, 4) for name, value in speed.items()})
        loss, grad_norm = (math.nan if value is None else value for value in result)
        skipped = self._metrics.skipped_steps
        # Of this launch with its validations and saves; the first steps of one, which compile, count less and less.
        left = (self._run.total_steps - step) * sum(read.values()) / self._num_steps
        # In one line of a terminal; memory and phases are in speed.tsv.
        self.console.line(
            f"step {step}/{self._run.total_steps}  loss {loss:.4f}  lr {lr:.2e}  grad norm {grad_norm:.2f}  "
            f"{rate:,.0f} tokens/s"
            + ("" if mfu is None else f"  MFU {mfu:.0%}")
            + (f"  {skipped} steps skipped" if skipped else "")
            + (f"  ETA {clock(left)}" if left else "")
        )

    def snapshot(self) -> TrainMetrics:
        """The metrics as of now, for a checkpoint."""
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
        place = self._place and dataclasses.replace(self._place, date=date)
        return dataclasses.replace(self._metrics, cost=self._cost(), place=place)

    def _cost(self) -> Cost:
        """What all steps of the run have cost: those of earlier launches, and those of this one."""
        before, steps = self._cost_before, self._cost_before.steps + self._num_steps
        if not steps:
            return before
        here = self._timers.read()
        seconds_here = sum(here.values())
        seconds = before.training_seconds + seconds_here
        mfu = self._utilization(self._num_steps * self._tokens_per_step / seconds_here)
        if before.mfu is not None and mfu is not None:  # a mean over the time: the launches may be on different GPUs
            mfu = (before.mfu * before.training_seconds + mfu * seconds_here) / seconds
        return Cost(
            steps=steps,
            launches=before.launches + (self._num_steps > 0),
            training_seconds=round(seconds, 3),
            milliseconds={
                name: round((before.milliseconds.get(name, 0.0) * before.steps + 1000 * value) / steps, 3)
                for name, value in here.items()
            },
            tokens_per_second=round(steps * self._tokens_per_step / seconds, 1),
            mfu=None if mfu is None else round(mfu, 4),
            memory_peak_gib=round(max(self._memory_peak_gib, memory_gib()[1], before.memory_peak_gib or 0), 3),
        )

    def _utilization(self, tokens_per_second: float) -> float | None:
        return flops.utilization(tokens_per_second, self._flops_per_token, self._params.precision)


def clock(seconds: float) -> str:
    """A time as hours, minutes and seconds: `27:46:40`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
