"""What a training reports: rows of history.tsv and speed.tsv, which also go to the tracker, and lines of the console.

history.tsv    every `history_freq` steps and at each validation: values that are reproducible, no times
speed.tsv      every `log_freq` steps, 30 s where they are slow, and at each save: speed, memory and times since the row
               before; together its rows are all steps of the run, so that what it has cost is computed from them
"""

import math
from datetime import timedelta
from time import monotonic

from stages.base.history import History, Row, Table, of_source
from stages.base.summary import counted
from stages.checkpointing.run import Run
from stages.launching import flops
from stages.launching.console import SILENT_SECONDS, Console
from stages.launching.timers import PHASES, Timers, memory_gib, reset_peak_memory
from stages.launching.trackers import Tracker
from stages.training.schedule import learning_rate
from stages.training.step import StepResult, Validation

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
        self._seconds, self._timed_steps, self._untimed_steps = 0.0, 0, 0  # of this launch
        self._printed_at = monotonic()

    def log(self, step: int, result: StepResult, validation: Validation | None = None) -> None:
        """Report step `step` (0: nothing was trained yet), and the validation after it if there was one."""
        is_last = step == self._run.total_steps
        lr = learning_rate(self._params, self._run.total_steps, step - 1) if step else None  # of the update just done
        if validation and validation.loss is not None:
            measured = {name: loss for name, loss in validation.of_sources.items() if loss is not None}
            self.console.line(
                f"step {step}: validation loss {validation.loss:.4f} ({counted(validation.num_rows, 'row')})"
                + "".join(f"  {name} {loss:.4f}" for name, loss in measured.items())
            )
        if step % self._params.history_freq == 0 or (validation and validation.loss is not None) or is_last:
            # Unrounded and without times: a resumed run must give the same file, byte for byte.
            row: Row = {
                "epoch": step * self._params.total_batch_size / self._run.num_rows,
                "tokens": step * self._tokens_per_step,
                "loss": result.loss,
                "lr": lr,
                "grad_norm": result.grad_norm,
            }
            if validation:
                row["validation_loss"] = validation.loss
                row |= {of_source(name): loss for name, loss in validation.of_sources.items()}
            self.history.add(step=step, **row)
            self._tracker.log(step, row)
        if lr is None:
            return
        self._untimed_steps += 1
        self.skipped_steps += result.grad_norm is None
        self.console.advance()
        # Ten slow steps take minutes, in which a person would think that the training hangs.
        if step % self._log_freq == 0 or is_last or monotonic() - self._printed_at >= SILENT_SECONDS:
            self._printed_at = monotonic()
            self._print(step, result, lr, self.time_steps(step))

    def time_steps(self, step: int) -> Row:
        """Add a row of speed.tsv about the steps since the row before, if there are any; returns it.

        Tokens per second, MFU, memory of rank 0 in GiB at the end and at its peak, and milliseconds per step of each
        phase. `seconds` is the training time of the whole run so far.
        """
        steps, self._untimed_steps = self._untimed_steps, 0
        if not steps:
            return {}
        phases = self._timers.read()
        passed = sum(phases.values())
        self._seconds, self._timed_steps = self._seconds + passed, self._timed_steps + steps
        rate = steps * self._tokens_per_step / passed
        now, peak = memory_gib()
        reset_peak_memory()  # each row has its own peak: that of loading would hide all later ones
        row: Row = {
            "seconds": self._seconds_before + self._seconds,
            "tokens_per_second": rate,
            "mfu": flops.utilization(rate, self._flops_per_token, self._params.precision),
            "memory_gib": now,
            "memory_peak_gib": peak,
            **{f"{name}_ms": 1000 * value / steps for name, value in phases.items()},
        }
        self.speed.add(step=step, **{name: value and round(value, 4) for name, value in row.items()})
        self._tracker.log(step, row)
        return row

    def _print(self, step: int, result: StepResult, lr: float, speed: Row) -> None:
        """The line of some steps: in one of a terminal, so memory and phases are in speed.tsv alone."""
        mfu = speed["mfu"]
        # Of this launch with its validations and saves; the first steps of one, which compile, count less and less.
        left = (self._run.total_steps - step) * self._seconds / self._timed_steps
        self.console.line(
            f"step {step}/{self._run.total_steps}  loss {_nan_if_none(result.loss):.4f}  lr {lr:.2e}  "
            f"grad norm {_nan_if_none(result.grad_norm):.2f}  {speed['tokens_per_second']:,.0f} tokens/s"
            + ("" if mfu is None else f"  MFU {mfu:.0%}")
            + (f"  {self.skipped_steps} steps skipped" if self.skipped_steps else "")
            + (f"  ETA {timedelta(seconds=round(left))}" if left else "")
        )


def _nan_if_none(value: float | None) -> float:
    """To print it."""
    return math.nan if value is None else value
