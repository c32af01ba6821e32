"""TensorBoard and Weights & Biases get each step of a run once, however often it is killed, and ask no network."""

import dataclasses
import errno
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from stages.base.errors import StageError
from stages.base.history import HISTORY, SPEED, History, Table
from stages.launching import trackers


@dataclasses.dataclass
class Params:
    experiment_name: str = "test"
    lr: float = 0.1


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """What a tracker reads of a `Run`."""
    return SimpleNamespace(log_directory=tmp_path, run_id="0123456789abcdef", params=Params())


def train(name: str, run: Any, start: int, steps: range) -> None:
    """A start of the run, from the checkpoint of step `start`."""
    history, speed = History(), Table(["step", "tokens_per_second", "mfu"])
    for step in range(start + 1):
        history.add(step=step, loss=10.0 - step)
        speed.add(step=step, tokens_per_second=5.0)
    checkpoint = run.log_directory.with_name("checkpoint")
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / HISTORY).write_text(history.text())
    (checkpoint / SPEED).write_text(speed.text())
    tracker = trackers.start_tracker(name, run, start, checkpoint if start else None)
    for step in steps:
        tracker.log(step, {"loss": 10.0 - step})
        tracker.log(step, {"tokens_per_second": 5.0, "mfu": None})
    tracker.close()


def test_tensorboard_shows_each_step_once_after_a_kill(run: Any) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train("tensorboard", run, 0, range(6))  # killed after step 5; the last checkpoint is that of step 4
    train("tensorboard", run, 4, range(5, 9))
    shown = EventAccumulator(str(run.log_directory / "tensorboard" / run.run_id)).Reload()
    assert [event.step for event in shown.Scalars("loss")] == list(range(9))
    assert [event.value for event in shown.Scalars("loss")] == [10.0 - step for step in range(9)]


def test_a_tracker_whose_disk_is_full_ends_no_training(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be that of the project, with the checkpoints elsewhere."""
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(trackers, "_TensorBoard", lambda *_: SimpleNamespace(log=full, close=full))
    train("tensorboard", run, 0, range(6))
    assert full.call_count == 1
    assert capsys.readouterr().out.startswith("warning: runtime.tracker gets nothing more until the next launch: No ")


def test_wandb_has_each_step_once_after_a_kill_and_stays_offline(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    starts: list[list[tuple[int, dict[str, float]]]] = []
    asked: dict[str, Any] = {}

    class Started:
        def log(self, values: dict[str, float], step: int) -> None:
            starts[-1].append((step, values))

        def finish(self) -> None:
            pass

    def init(**options: Any) -> Started:
        assert not wandb.env.error_reporting_enabled()
        asked.update(options)
        starts.append([])
        (run.log_directory / f"wandb/offline-run-{len(starts)}-{options['id']}").mkdir()
        return Started()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")  # as it is without a value
    train("wandb", run, 0, range(6))
    train("wandb", run, 4, range(5, 9))
    for name, value in ("loss", 4.0), ("tokens_per_second", 5.0):
        assert [step for step, values in starts[-1] if name in values] == list(range(9))
        assert {step: values[name] for step, values in starts[-1] if name in values}[6] == value
    assert [step for step, _ in starts[-1]] == sorted(step for step, _ in starts[-1])  # wandb drops what goes back
    assert [path.name for path in (run.log_directory / "wandb").iterdir()] == [f"offline-run-2-{run.run_id}"]
    assert (asked["mode"], asked["id"], asked["config"]["lr"]) == ("offline", run.run_id, 0.1)


def test_no_tracker_writes_nothing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", None)
    train("none", run, 0, range(3))
    assert list(run.log_directory.iterdir()) == []


def test_a_tracker_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StageError, match=r"runtime.tracker is 'wandb', but the package wandb is not installed"):
        trackers.check("wandb")
    trackers.check("none")
