"""What a training reports: rows of history.tsv and speed.tsv, which also go to the tracker, and lines of the console.

history.tsv    every `history_freq` steps and at each validation: values that are reproducible, no times
speed.tsv      every `log_freq` steps, 30 s where they are slow, and at each save: speed, memory and times since the row
               before; together its rows are all steps of the run, so that what it has cost is computed from them
"""

import math
from collections.abc import Mapping
from time import monotonic
from types import MappingProxyType

from stages.base.history import History, Table, of_source
from stages.checkpointing.run import Run
from stages.launching import flops
from stages.launching.console import SILENT_SECONDS, Console
from stages.launching.timers import PHASES, Timers, memory_gib, reset_peak_memory
from stages.launching.trackers import Tracker
from stages.training.schedule import learning_rate
from stages.training.step import StepResult

SPEED_COLUMNS = (
    *("step", "seconds", "tokens_per_second", "mfu", "memory_gib", "memory_peak_gib"),
    *(f"{name}_ms" for name in (*PHASES, "other")),
)
"""Of speed.tsv."""


class MetricsLogger:
    """Takes what each step has measured and reports it."""

    def __init__(
        self, run: Run, log_freq: int, console: Console, tracker: Tracker, timers: Timers, flops_per_token: int | None,
        history: History, speed: Table, skipped_steps: int = 0,
    ) -> None:  # fmt: skip
        """`history`, `speed` and `skipped_steps` are those of the checkpoint that a run resumes from."""
        self.history, self.speed, self.console, self.skipped_steps = history, speed, console, skipped_steps
        self._run, self._params, self._log_freq = run, run.params, log_freq
        self._tracker, self._timers, self._flops_per_token = tracker, timers, flops_per_token
        self._tokens_per_step = run.params.total_batch_size * run.seq_length
        self._seconds_before = speed.last("seconds") or 0.0  # of the earlier launches
        self._num_steps, self._timed_steps = 0, 0  # of this launch
        self._timed_seconds: dict[str, float] = {}
        self._printed_at = monotonic()

    def log(
        self, step: int, result: StepResult, validation_loss: float | None, is_validated: bool,
        source_losses: Mapping[str, float | None] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Report step `step` (0: nothing was trained yet), and the validation after it if there was one."""
        is_last = step == self._run.total_steps
        # Of the update just done: steps are counted from 1 here, and from 0 in the schedule.
        lr = learning_rate(self._params, self._run.total_steps, max(0, step - 1))
        if step % self._params.history_freq == 0 or validation_loss is not None or is_last:
            # Unrounded and without times: a resumed run must give the same file, byte for byte.
            row: dict[str, float | None] = {
                "epoch": step * self._params.total_batch_size / self._run.num_rows,
                "tokens": step * self._tokens_per_step,
                "loss": result.loss,
                "lr": lr if step else None,
                "grad_norm": result.grad_norm,
                "validation_loss": validation_loss,
                **{of_source(name): loss for name, loss in source_losses.items() if is_validated},
            }
            self.history.add(step=step, **row)
            self._tracker.log(step, row)
        if step == 0:
            return
        self._num_steps += 1
        self.skipped_steps += result.grad_norm is None
        self.console.advance()
        # Ten slow steps take minutes, in which a person would think that the training hangs.
        if step % self._log_freq == 0 or is_last or monotonic() - self._printed_at >= SILENT_SECONDS:
            self._printed_at = monotonic()
            self._print(step, result, lr, self.time_steps(step))

    def time_steps(self, step: int) -> dict[str, float | None]:
        """Add a row of speed.tsv about the steps since the row before, if there are any; returns it.

        Tokens per second, MFU, memory of rank 0 in GiB at the end and at its peak, and milliseconds per step of each
        phase. `seconds` is the training time of the whole run so far.
        """
        steps = self._num_steps - self._timed_steps
        if not steps:
            return {}
        read = self._timers.read()
        seconds = {name: value - self._timed_seconds.get(name, 0.0) for name, value in read.items()}
        self._timed_steps, self._timed_seconds = self._num_steps, read
        rate = steps * self._tokens_per_step / sum(seconds.values())
        now, peak = memory_gib()
        reset_peak_memory()  # each row has its own peak: that of loading would hide all later ones
        row = {
            "seconds": self._seconds_before + sum(read.values()),
            "tokens_per_second": rate,
            "mfu": flops.utilization(rate, self._flops_per_token, self._params.precision),
            "memory_gib": now,
            "memory_peak_gib": peak,
            **{f"{name}_ms": 1000 * value / steps for name, value in seconds.items()},
        }
        self.speed.add(step=step, **{name: value and round(value, 4) for name, value in row.items()})
        self._tracker.log(step, row)
        return row

    def _print(self, step: int, result: StepResult, lr: float, speed: dict[str, float | None]) -> None:
        """The line of some steps: in one of a terminal, so memory and phases are in speed.tsv alone."""
        loss, grad_norm = (math.nan if value is None else value for value in result)
        mfu = speed["mfu"]
        # Of this launch with its validations and saves; the first steps of one, which compile, count less and less.
        left = (self._run.total_steps - step) * sum(self._timed_seconds.values()) / self._num_steps
        self.console.line(
            f"step {step}/{self._run.total_steps}  loss {loss:.4f}  lr {lr:.2e}  grad norm {grad_norm:.2f}  "
            f"{speed['tokens_per_second']:,.0f} tokens/s"
            + ("" if mfu is None else f"  MFU {mfu:.0%}")
            + (f"  {self.skipped_steps} steps skipped" if self.skipped_steps else "")
            + (f"  ETA {clock(left)}" if left else "")
        )


def clock(seconds: float) -> str:
    """A time as hours, minutes and seconds: `27:46:40`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
