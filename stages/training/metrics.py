"""What a training reports: the console, history.tsv, train_metrics.json and the tracker.

history.tsv            every `history_freq` steps and at each validation: values that are reproducible, no times
console, tracker       every `log_freq` steps: the same, and speed, memory and the times of a step
train_metrics.json     the newest of all of them, in the checkpoint and as a DVC metric
"""

import dataclasses
import math

from stages.artifacts.history import History
from stages.training import flops
from stages.training.console import Console
from stages.training.run import Run
from stages.training.schedule import lr_ratio
from stages.training.state import TrainMetrics
from stages.training.step import StepResult
from stages.training.timers import Timers, memory_gib, reset_peak_memory
from stages.training.trackers import Tracker, without_none


class MetricsLogger:
    """Takes what each step has measured and reports it."""

    def __init__(
        self, run: Run, log_freq: int, console: Console, tracker: Tracker, timers: Timers, flops_per_token: int | None,
        history: History, metrics: TrainMetrics | None,
    ) -> None:  # fmt: skip
        """`history` and `metrics` are those of the checkpoint that a run resumes from."""
        self.metrics = metrics or TrainMetrics()
        self.history = history
        self.console = console
        self._run, self._params, self._log_freq = run, run.params, log_freq
        self._tracker, self._timers, self._flops_per_token = tracker, timers, flops_per_token
        self._tokens_per_step = run.params.total_batch_size * run.seq_length
        self._timed_steps = 0

    def log(self, step: int, result: StepResult, validation_loss: float | None, is_validated: bool) -> None:
        """Report step `step` (0: nothing was trained yet), and the validation after it if there was one."""
        is_last = step == self._run.total_steps
        # Of the update just done: steps are counted from 1 here, and from 0 in the schedule.
        lr = self._params.lr * lr_ratio(self._params, self._run.total_steps, max(0, step - 1))
        if is_validated:
            self.metrics = dataclasses.replace(self.metrics, validation_loss=validation_loss)
        if validation_loss is not None:
            self.console.line(f"step {step}: validation loss {validation_loss:.4f}")
        if step % self._params.history_freq == 0 or validation_loss is not None or is_last:
            self._log_history(step, result, lr if step else None, validation_loss)
        if step == 0:
            return
        self._timed_steps += 1
        self.console.advance()
        self.metrics = dataclasses.replace(
            self.metrics, steps=step, tokens=step * self._tokens_per_step, loss=result.loss,
            skipped_steps=self.metrics.skipped_steps + (result.grad_norm is None),
        )  # fmt: skip
        if step % self._log_freq == 0 or is_last:
            self._log_speed(step, result, lr)

    def _log_history(self, step: int, result: StepResult, lr: float | None, validation_loss: float | None) -> None:
        values: dict[str, float | None] = {
            "epoch": step * self._params.total_batch_size / self._run.num_rows,
            "tokens": step * self._tokens_per_step,
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "validation_loss": validation_loss,
        }
        # Unrounded and without times: a resumed run must give the same file, byte for byte.
        self.history.add(step=step, **values)
        self._tracker.log(step, without_none(values))

    def _log_speed(self, step: int, result: StepResult, lr: float) -> None:
        """The line of every `log_freq` steps: all that is timed is since the line before."""
        seconds = self._timers.reset()
        steps, self._timed_steps = self._timed_steps, 0
        rate = steps * self._tokens_per_step / sum(seconds.values())
        mfu = flops.utilization(rate, self._flops_per_token, self._params.precision)
        now, peak = memory_gib()
        reset_peak_memory()  # each line shows its own peak: that of loading would hide all later ones
        times = {name: 1000 * value / steps for name, value in seconds.items()}
        self.metrics = dataclasses.replace(
            self.metrics,
            tokens_per_second=round(rate, 1),
            mfu=None if mfu is None else round(mfu, 4),
            memory_peak_gib=round(max(peak, self.metrics.memory_peak_gib or 0), 3),
            milliseconds={name: round(value, 3) for name, value in times.items()},
        )
        speed = {"tokens_per_second": rate, "mfu": mfu, "memory_gib": now, "memory_peak_gib": peak}
        self._tracker.log(step, without_none(speed | {f"{name}_ms": value for name, value in times.items()}))
        loss, grad_norm = (math.nan if value is None else value for value in result)
        skipped = self.metrics.skipped_steps
        self.console.line(
            f"step {step}/{self._run.total_steps}  loss {loss:.4f}  lr {lr:.2e}  grad norm {grad_norm:.3f}  "
            f"{rate:,.0f} tokens/s  "
            + ("" if mfu is None else f"MFU {mfu:.1%}  ")
            + "  ".join(f"{name} {value:.1f} ms" for name, value in times.items())
            + f"  memory {now:.2f} GiB, peak {peak:.2f} GiB"
            + (f"  {skipped} steps skipped" if skipped else "")
        )
