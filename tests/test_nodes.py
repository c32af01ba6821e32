"""A training on several nodes, which are agents on this machine, started by tests/fake_slurm/srun."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Client
from typing import Any

import psutil
import pytest

from stages.artifacts.errors import StageError
from stages.artifacts.params_file import load_params
from stages.checkpointing.layout import list_checkpoints
from stages.training import distributed, slurm
from stages.training.node_agent import Endpoint
from stages.training.params import TrainRuntime
from stages.training.run import packages
from stages.training.signals import INTERRUPTED
from tests.faults import environment
from tests.project import BIN, LAUNCH, REPO, Project, is_alive, ranks_of, wait_for
from tests.ranks import Ranks
from tests.trainings import Given, result

ALLOCATION = {
    "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2",
    "PATH": f"{BIN}:{REPO / 'tests/fake_slurm'}:{os.environ['PATH']}",
}  # fmt: skip


@pytest.fixture
def nodes(fresh: Given) -> Given:
    """A project that trains with one rank on each node, and the result that two ranks of one machine have."""
    fresh[0].set(runtime={"nproc_per_node": 1, "launcher": "auto"})
    return fresh


def agents(process: "subprocess.Popen[str]") -> dict[str, psutil.Process]:
    """The agents of a launcher, by the name of their node."""
    return {rank.parent().environ()["SLURMD_NODENAME"]: rank.parent() for rank in ranks_of(process)}


def start(project: Project, faults: str = "", ranks: int = 2, **variables: str) -> "subprocess.Popen[str]":
    """Launch on two nodes, and wait until the first checkpoint is published."""
    process = project.popen(*LAUNCH, **ALLOCATION, **environment(faults), **variables)
    wait_for(lambda: list(project.path.glob("outputs/test/checkpoints/*/step-00000004")) or process.poll() is not None)
    return process


def end(process: "subprocess.Popen[str]", status: int) -> str:
    output, _ = process.communicate(timeout=100)
    assert process.returncode == status, output
    assert "Traceback" not in output
    return output


def test_a_signal_to_one_node_saves_on_all_and_they_compute_what_one_does(nodes: Given, ranks: Ranks) -> None:
    project, reference = nodes
    process = start(project, "delay rank 1 at step 5")
    agents(process)["n2"].send_signal(signal.SIGUSR1)
    output = end(process, INTERRUPTED)
    assert "training with 2 ranks on 2 nodes (CPU, network lo)" in output
    assert re.search(r"interrupted: step-0000000[567] is saved", output)
    assert re.search("resuming from step [567] of 12", ranks.run(project))
    assert result(project) == reference


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("victim", ["launcher", "agent", "rank"])
def test_a_signal_to_any_process_saves_on_all(nodes: Given, victim: str, number: signal.Signals) -> None:
    project, reference = nodes
    process = start(project, "delay rank 1 at step 5")
    processes = {"launcher": process, "agent": agents(process)["n2"], "rank": ranks_of(process)[1]}
    processes[victim].send_signal(number)
    assert "interrupted: step-" in end(process, INTERRUPTED)
    project.run(*LAUNCH, **ALLOCATION)
    assert result(project) == reference


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_node_and_restarted(nodes: Given) -> None:
    project, reference = nodes
    project.set(runtime={"timeout_minutes": 0.05, "max_restarts": 1})
    output = end(start(project, "stop rank 1 at step 5"), 0)
    assert re.search(
        r"rank 1 on node n2 made no progress for \d+ s: step 6, data \(the process is stopped, as by SIGSTOP\); "
        r"waiting for it: rank 0 on node n1 in step 6, agreeing with the other ranks; restart 1 of 1",
        output,
    ), output
    assert result(project) == reference


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_with_its_node(nodes: Given) -> None:
    project, reference = nodes
    output = end(start(project, "kill rank 1 at step 5"), 1)
    assert "error: rank 1 on node n2 was killed by signal 9: step 6, data" in output
    project.run(*LAUNCH, **ALLOCATION)
    assert result(project) == reference


@pytest.mark.slow
def test_a_lost_node_is_named_and_the_training_restarted(nodes: Given) -> None:
    project, reference = nodes
    project.set(runtime={"max_restarts": 1})
    process = start(project, "delay rank 1 at step 5")
    agents(process)["n2"].kill()
    output = end(process, 0)
    assert re.search(r"node n2 was lost \(its agent ended\): rank 1 in .*; restart 1 of 1", output)
    assert result(project) == reference


@pytest.mark.slow
def test_no_process_outlives_a_killed_launcher(nodes: Given) -> None:
    project, reference = nodes
    process = start(project, "stop rank 1 at step 5")
    wait_for((project / "stopped").exists)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) == 5  # srun, two agents, two ranks
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(is_alive, started)), seconds=5)
    project.run(*LAUNCH, **ALLOCATION)
    assert result(project) == reference


@pytest.mark.slow
def test_an_error_that_the_user_must_fix_ends_all_nodes(nodes: Given) -> None:
    project, _ = nodes
    project.set(runtime={"max_restarts": 3})
    output = end(start(project, "memory rank 1 at step 5"), 2)
    assert "error: rank 1 is out of memory" in output
    assert "restart" not in output


@pytest.mark.slow
def test_a_node_with_other_files_is_refused(nodes: Given, tmp_path: Any) -> None:
    project, _ = nodes
    other = project.copy(tmp_path / "other")
    model = other / "data/model.json"
    model.write_text(model.read_text() + "\n")
    output = project.run(*LAUNCH, status=2, **ALLOCATION, FAKE_DIRECTORY_1=str(other.path))
    assert re.fullmatch(
        r"error: node n2 has other files than the node of the launcher \(there\):\n"
        r"error: model: '\w+' there, '\w+' here\n",
        output,
    )
    (other / "data/model.json").unlink()
    output = project.run(*LAUNCH, status=2, **ALLOCATION, FAKE_DIRECTORY_1=str(other.path))
    assert output == "error: node n2: data/model.json is missing: run `dvc repro`\n"


@pytest.mark.slow
def test_nodes_that_do_not_start_are_one_clear_error(nodes: Given, tmp_path: Any) -> None:
    project, _ = nodes
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\necho 'srun: error: no node' >&2\nexit 3\n")
    srun.chmod(0o755)
    path = {**ALLOCATION, "PATH": f"{BIN}:{tmp_path}:{os.environ['PATH']}"}
    assert project.run(*LAUNCH, status=1, **path).splitlines()[:2] == [
        "srun: error: no node",
        "error: srun ended with status 3, as shown above: 0 of 2 nodes have answered (none)",
    ]
