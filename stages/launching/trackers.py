"""The metrics of a training for TensorBoard or Weights & Biases, whose packages are extras of pyproject.toml.

Both write below outputs/<experiment_name>/, and neither opens a connection. Only rank 0 has a tracker. No step of a
resumed run is shown twice.
"""

import dataclasses
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from stages.base.errors import StageError, as_stage_error
from stages.base.history import HISTORY, SPEED, Row, read
from stages.checkpointing.run import Run
from stages.launching.console import print_line


class Tracker:
    """Receives the metrics of a training; this one drops them."""

    def log(self, step: int, row: Row) -> None:
        """Receive a row of history.tsv or of speed.tsv."""

    def close(self) -> None:
        """Write what is pending."""


def check(name: str) -> None:
    """Refuse a tracker whose package is not installed."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise StageError(
            f"runtime.tracker is {name!r}, but the package {name} is not installed: `pip install {name}` (the "
            f"extra `{name}` in pyproject.toml has the versions), or use 'none'"
        )


def start_tracker(name: str, run: Run, step: int, checkpoint: Path | None) -> Tracker:
    """The tracker that `runtime.tracker` names, for a run that continues after `step`, from `checkpoint`."""
    if name == "tensorboard":
        return _Dispensable(_TensorBoard(run.log_directory / "tensorboard" / run.run_id, step))
    if name == "wandb":
        return _Dispensable(_Wandb(run, checkpoint))
    return Tracker()


class _Dispensable(Tracker):
    """Drops a tracker that cannot write, as on a full disk: the training, which may save on another one, goes on."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def log(self, step: int, row: Row) -> None:
        self._try(lambda: self._tracker.log(step, row))

    def close(self) -> None:
        self._try(self._tracker.close)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._tracker = Tracker()
            print_line(f"warning: runtime.tracker gets nothing more until the next launch: {as_stage_error(error)}")


class _TensorBoard(Tracker):
    def __init__(self, directory: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard then ignores what an earlier start of the run wrote for steps that are repeated, even step 0.
        self._writer = SummaryWriter(str(directory), purge_step=step + 1 if step else 0)

    def log(self, step: int, row: Row) -> None:
        for name, value in row.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb(Tracker):
    """Always offline. Each start writes a directory with all rows of the run, for `wandb sync`.

    It begins with those of the checkpoint, and deletes the directories of earlier starts: they lack what wandb wrote
    late, have steps that are repeated, and one that is uploaded may replace another.
    """

    def __init__(self, run: Run, checkpoint: Path | None) -> None:
        import wandb

        os.environ["WANDB_ERROR_REPORTING"] = "false"  # or it looks up a server of its makers, even offline
        directory = run.log_directory / "wandb"
        directory.mkdir(parents=True, exist_ok=True)
        for earlier in directory.glob(f"offline-run-*-{run.run_id}"):
            shutil.rmtree(earlier, ignore_errors=True)  # its process may still be there
        self._run = wandb.init(
            mode="offline", dir=run.log_directory, project=run.params.experiment_name, id=run.run_id, name=run.run_id,
            config=dataclasses.asdict(run.params), settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        rows = [row for name in (HISTORY, SPEED) for row in read(checkpoint / name)] if checkpoint else []
        for row in sorted(rows, key=lambda row: row["step"] or 0):
            self.log(int(row.pop("step") or 0), row)

    def log(self, step: int, row: Row) -> None:
        self._run.log({name: value for name, value in row.items() if value is not None}, step=step)

    def close(self) -> None:
        self._run.finish()
