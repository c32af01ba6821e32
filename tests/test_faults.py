"""Faults of a training that is started as users start it. The numbers are those of docs/faults.md."""

import contextlib
import shutil
import signal
import socket
import time

import psutil
import pytest

from tests.conftest import REPO, Project
from tests.test_pipeline import steps, training_ranks, weights
from tests.test_train import LAUNCH, digests, ranks, wait_for


def with_fault(text: str) -> dict[str, str]:
    """The environment in which the ranks have this fault: see tests/faults.py."""
    return {"FAULT": text, "FAULT_REPO": str(REPO), "PYTHONPATH": str(REPO / "tests/faults_site")}


@pytest.fixture(scope="session")
def reference(_training: Project, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What an undisturbed run ends with."""
    project = _training.copy(tmp_path_factory.mktemp("reference") / "project")
    project.run(*LAUNCH)
    result = digests(project)
    shutil.rmtree(project.path)
    return result


def test_26_a_rank_that_always_dies_is_restarted_so_often_and_no_more(
    training: Project, reference: dict[str, str]
) -> None:
    training.set(runtime={"max_restarts": 1, "async_checkpoint": False})
    output = training.run(*LAUNCH, status=1, **with_fault("kill rank 1 at step 5"))
    assert output.count("rank 1 was killed by signal 9") == 2
    assert output.count("restart 1 of 1") == 1
    assert "resuming from step 4 of 12" in output
    assert "Traceback" not in output
    training.run(*LAUNCH)
    assert digests(training) == reference


@pytest.mark.slow
def test_26_what_the_user_must_mend_is_not_tried_again(training: Project) -> None:
    training.set(runtime={"max_restarts": 3})
    output = training.run(*LAUNCH, status=2, **with_fault("nan rank 0 at step 1"))
    assert "restart" not in output


@pytest.mark.slow
def test_28_two_trainings_share_a_machine_and_a_port_is_taken(training: Project, reference: dict[str, str]) -> None:
    other = training.copy(training.path.with_name("other"))
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 29500))
        taken.listen()
        processes = [project.popen(*LAUNCH) for project in (training, other)]
        for process in processes:
            output, _ = process.communicate(timeout=200)
            assert process.returncode == 0, output
    assert digests(training) == digests(other) == reference


@pytest.mark.slow
def test_15_a_rank_that_hangs_is_given_up(training: Project, reference: dict[str, str]) -> None:
    training.set(runtime={"timeout_minutes": 0.1, "async_checkpoint": True})
    began = time.monotonic()
    process = training.popen(*LAUNCH, **with_fault("stop rank 1 at step 6"))
    wait_for(lambda: len(ranks(process)) == 2)
    workers = ranks(process)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 2, output
    assert "rank 0 lost the connection to another rank" in output
    assert time.monotonic() - began < 100
    wait_for(lambda: not any(worker.is_running() for worker in workers), seconds=2)
    training.run(*LAUNCH)
    assert digests(training) == reference


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_14_dvc_is_ended_and_started_again_at_once(reproduced: Project, number: signal.Signals) -> None:
    reproduced.set(seed=1)
    undisturbed = reproduced.copy(reproduced.path.with_name("undisturbed"))
    undisturbed.run("python", "-m", "stages.launch")
    process = reproduced.popen("dvc", "repro")
    wait_for(lambda: "step-00000004" in steps(reproduced, seed=1))
    old = training_ranks(process)
    process.send_signal(number)
    process.wait(timeout=60)
    again = reproduced.popen("dvc", "repro")
    while again.poll() is None:
        alive = [rank for rank in old if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
        with contextlib.suppress(psutil.NoSuchProcess):
            assert not (alive and training_ranks(again)), "two writers"
        time.sleep(0.02)
    output, _ = again.communicate()
    assert again.returncode == 0, output
    assert "resuming from step" in output
    assert weights(reproduced) == weights(undisturbed)
    shutil.rmtree(undisturbed.path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_16_17_the_launcher_is_told_to_stop_at_any_moment(
    training: Project, reference: dict[str, str], number: signal.Signals
) -> None:
    """While it starts, while the ranks start, and while they train; half of the times it is told twice."""
    for delay in (0.1, 2, 4, 6):
        process = training.popen(*LAUNCH)
        time.sleep(delay)
        started = ranks(process)
        process.send_signal(number)
        if delay in (2, 6):
            time.sleep(0.1)
            process.send_signal(number)
        output, _ = process.communicate(timeout=100)
        ended = {0, 75} if started else {0, 75, 130, -number}  # it does not listen yet
        assert process.returncode in ended, output
        assert "Traceback" not in output
        wait_for(lambda: not any(rank.is_running() for rank in started), seconds=2)  # noqa: B023
    training.run(*LAUNCH)
    assert digests(training) == reference
