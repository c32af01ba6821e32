"""Faults of a training that is started as users start it. The numbers are those of docs/reliability.md."""

import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from stages.base.command import USER_ERROR
from stages.checkpointing.lock import writer_lock
from stages.ranks.signals import INTERRUPTED
from stages.ranks.torchrun import CRASHED
from tests.faults import environment
from tests.project import LAUNCH, Project, is_alive, ranks_of, run_here, wait_for
from tests.ranks import Ranks
from tests.trainings import Given, names, published, result, steps, weights
from tests.two_nodes import ALLOCATION

STARTING = """
import os, pathlib, sys, time

def wait():
    pathlib.Path(f"waits-{os.environ['RANK']}").touch()
    for _ in range(3000):
        if not pathlib.Path("go").exists():
            time.sleep(0.02)

class BeforeTorch:
    @staticmethod
    def find_spec(name, *_):
        if name == "torch":
            wait()

if os.environ.get("RANK") == "0":
    wait()
elif "RANK" in os.environ:
    sys.meta_path.insert(0, BeforeTorch)
"""
"""Rank 0 waits before its first line, and rank 1 when it has asked to be told of the end of its parent."""


def test_13_no_rank_begins_or_goes_on_whose_launcher_is_killed(training: Project, tmp_path: Path) -> None:
    """The kernel tells a process nothing of a parent that has ended before it asked to be told."""
    (tmp_path / "sitecustomize.py").write_text(STARTING)
    process = training.popen(*LAUNCH, PYTHONPATH=str(tmp_path))
    wait_for(lambda: len([*training.path.glob("waits-*")]) == 2)
    started = psutil.Process(process.pid).children(recursive=True)
    [first] = (rank for rank in ranks_of(process) if rank.environ()["RANK"] == "0")
    assert len(started) == 3  # torchrun, two ranks
    process.kill()
    wait_for(lambda: list(filter(is_alive, started)) == [first], seconds=2)
    (training / "go").touch()
    wait_for(lambda: not is_alive(first), seconds=2)
    process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(("allocation", "seconds"), [({}, 2), (ALLOCATION, 60)], ids=["one machine", "two nodes"])
def test_13_no_process_outlives_a_killed_launcher(
    fresh: Given, ranks: Ranks, allocation: dict[str, str], seconds: float
) -> None:
    project, reference = fresh
    project.set(runtime={"nproc_per_node": 1 if allocation else 2, "launcher": "auto"})
    process = project.popen(*LAUNCH, **allocation, **environment("stop rank 1 at step 4"))
    wait_for((project / "stopped").exists)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) == (5 if allocation else 3)  # srun, a torchrun on each node, two ranks
    process.kill()
    wait_for(lambda: not any(map(is_alive, started)), seconds)
    process.communicate(timeout=60)
    assert "resuming from step 2" in ranks.run(project)
    assert result(project) == reference


def test_14_a_second_writer_is_refused(finished: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    project, _ = finished
    monkeypatch.chdir(project.path)
    with writer_lock(project.checkpoints(), print):
        assert "another training writes into" in run_here("launch", status=2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_14_dvc_is_stopped_and_started_again_at_once(
    reproduced: Project, uninterrupted: dict[str, str], number: signal.Signals
) -> None:
    reproduced.set(seed=1)
    process = reproduced.popen("dvc", "repro")
    wait_for(lambda: "step-00000004" in steps(reproduced, seed=1))
    old = ranks_of(process)
    assert len(old) == 2
    process.send_signal(number)
    process.wait(timeout=60)
    again = reproduced.popen("dvc", "repro")
    while again.poll() is None:
        assert not (any(map(is_alive, old)) and ranks_of(again)), "two writers"
        time.sleep(0.02)
    process.communicate()
    output, _ = again.communicate()
    assert again.returncode == 0, output
    assert "resuming from step" in output
    assert weights(reproduced) == uninterrupted


@pytest.mark.slow
def test_15_26_a_rank_that_hangs_and_one_that_always_dies_are_named_and_there_are_max_restarts(
    fresh: Given, ranks: Ranks
) -> None:
    """Also with `resume: never`, which is for the launch, not for its restarts; so is an edited params.yaml."""
    project, reference = fresh
    project.set(runtime={"timeout_minutes": 0.15, "max_restarts": 2, "debug": True, "resume": "never"})
    process = project.popen(*LAUNCH, **environment("stop rank 1 at step 4\nkill rank 1 at step 5"))
    wait_for((project / "stopped").exists)
    project.set(seed=1, max_steps=6, runtime={"max_restarts": 9})
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1, output
    project.set(seed=0, max_steps=None, runtime={"resume": "auto"})
    hangs = r"error: rank 1 on node \S+ made no progress for \d+ s: step \d, \w+ \(the process is stopped, as by "
    waits = (
        r"SIGSTOP, or its node is lost\); waiting for it: rank 0 on node \S+ in step 5, agreeing with the other ranks\n"
    )
    assert re.search(hangs + waits, output), output
    assert re.findall(r"\nrestart (\d) of 2\n", output) == ["1", "2"]
    assert output.count("stages.train FAILED") == 3
    assert re.findall(r"resuming from step (\d) of 12", output) == ["2", "4"]
    assert re.search(r"rank +: 1 \(local_rank: 1\)\n +exitcode +: -9 .*\n.*\n +traceback +: Signal 9 ", output)
    assert "error: the training failed as shown above; set runtime.resume to auto to continue" in output
    assert "because memory ran out, use batch_size 1" in output
    assert "Traceback" not in output
    assert "resuming from step 4 of 12" in ranks.run(project)
    assert result(project) == reference  # so `debug` changes nothing, too

    waiting, stopped = (next((project / "outputs/test/logs").glob(f"*/rank-{rank}.log")) for rank in (0, 1))
    assert "in all_reduce" in waiting.read_text()  # the stack of a rank that waited
    text = stopped.read_text()
    assert re.findall(r"step (\d+) done: rows \[\[", text) == [*"12334", *map(str, range(5, 13))]
    assert "step 12, backward" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status"),
    [("kill rank 0 at os.rename:.*step-00000005.tmp$", CRASHED), ("full rank 0 at step-00000005", USER_ERROR)],
)
def test_16_a_signal_does_not_hide_that_there_was_no_save(fresh: Given, fault: str, status: int) -> None:
    project, _ = fresh
    project.set(runtime={"max_restarts": 1})
    process = project.popen(*LAUNCH, **environment(f"delay rank 1 at step 5\n{fault}"))
    wait_for(lambda: list(project.path.glob("outputs/test/checkpoints/*/step-00000004")))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == status, output
    assert "restart 1" not in output
    assert published(project) == names(2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_16_17_the_launcher_can_be_stopped_at_any_moment(fresh: Given, ranks: Ranks, number: signal.Signals) -> None:
    """While it starts, while the ranks start, and while they train; half of the times it gets two signals."""
    project, reference = fresh
    for delay in (0.1, 2, 4, 6):
        process = project.popen(*LAUNCH)
        time.sleep(delay)
        started = ranks_of(process)
        process.send_signal(number)
        if delay in (2, 6):
            time.sleep(0.1)
            process.send_signal(number)
        output, _ = process.communicate(timeout=100)
        ended = {0, INTERRUPTED} if started else {0, INTERRUPTED, 128 + number, -number}  # before it passes them on
        assert process.returncode in ended, output
        assert "Traceback" not in output or not started  # Python's own, of a Ctrl-C while it imports
        wait_for(lambda started=started: not any(map(is_alive, started)), seconds=2)
    ranks.run(project)
    assert result(project) == reference


@pytest.mark.slow
def test_28_two_trainings_share_a_machine_although_a_port_is_in_use(fresh: Given, tmp_path: Path) -> None:
    project, reference = fresh
    other = project.copy(tmp_path / "other")
    with socket.socket() as occupied:
        occupied.bind(("", 0))
        occupied.listen()
        port = str(occupied.getsockname()[1])
        process = other.popen(*LAUNCH, MASTER_PORT=port)
        project.run(*LAUNCH, MASTER_PORT=port)
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert result(project) == result(other) == reference
