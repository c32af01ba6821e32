"""The batch scripts of slurm/: an interrupted job ends with what an undisturbed run without Slurm leaves."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import environment
from tests.project import BIN, Project, wait_for
from tests.slurm.cluster import Cluster
from tests.trainings import steps, weights

ENVIRONMENT = {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
"""The test projects have no .venv."""


def slow(num_steps: int) -> dict[str, str]:
    """The environment of a training with steps of two seconds, so that it still runs when it is interrupted."""
    return environment("\n".join(f"delay rank 1 at step {step}" for step in range(3, 3 + num_steps)))


def log(fields: dict[str, str]) -> str:
    return Path(fields["StdOut"]).read_text()


def requeue(cluster: Cluster, job: str) -> None:
    cluster.run(["scontrol", "requeue", job])


def signal_script(cluster: Cluster, job: str) -> None:
    cluster.run(["scancel", "--batch", "--signal=USR1", job])  # as Slurm does it before the time limit


def signal_launcher(cluster: Cluster, job: str) -> None:
    [launcher] = [task for task in cluster.tasks(job) if "stages.launch" in task.cmdline()]
    launcher.terminate()


@pytest.mark.parametrize(
    ("nodes", "interrupt"),
    [(1, requeue), (1, signal_script), (1, signal_launcher), (2, requeue), (2, signal_script), (2, signal_launcher)],
)
def test_a_training_that_is_interrupted_ends_with_the_same_weights(
    cluster: Cluster,
    reproduced: Project,
    uninterrupted: dict[str, str],
    nodes: int,
    interrupt: Callable[[Cluster, str], None],
) -> None:
    """Those of two ranks, which are on one node or on two."""
    variables = {"PIPELINE_RUNTIME": f"{{nproc_per_node: {2 // nodes}}}", **ENVIRONMENT, **slow(4)}
    job = cluster.submit(f"--nodes={nodes}", "slurm/train.sbatch", "-S", "seed=1", cwd=reproduced.path, **variables)
    wait_for(lambda: steps(reproduced, seed=1), 120)
    interrupt(cluster, job)
    fields = cluster.wait(job)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), log(fields)
    assert re.search(r"interrupted: step-\d+ is saved.*resuming from step", log(fields), re.S), log(fields)
    assert weights(reproduced) == uninterrupted
    assert not cluster.tasks(job)


def test_a_training_whose_node_is_lost_continues_on_others(
    cluster: Cluster, reproduced: Project, uninterrupted: dict[str, str]
) -> None:
    variables = {"PIPELINE_RUNTIME": "{nproc_per_node: 1}", **ENVIRONMENT, **slow(4)}
    job = cluster.submit("--nodes=2", "slurm/train.sbatch", "-S", "seed=1", cwd=reproduced.path, **variables)
    wait_for(lambda: steps(reproduced, seed=1), 120)
    cluster.kill_node("n2")
    try:
        cluster.wait(job, "PENDING")
    finally:
        cluster.start_node("n2")
    fields = cluster.wait(job, seconds=200)
    assert fields["JobState"] == "COMPLETED", log(fields)
    assert weights(reproduced) == uninterrupted


def test_a_training_longer_than_its_time_limit_ends_with_the_same_weights(
    cluster: Cluster, reproduced: Project, uninterrupted: dict[str, str]
) -> None:
    # Slurm looks every half minute, and sends the signal up to half a minute early: here after 10 to 40 seconds.
    limit = ("--time=1", "--signal=B:USR1@20")
    job = cluster.submit(*limit, "slurm/train.sbatch", "-S", "seed=1", cwd=reproduced.path, **ENVIRONMENT, **slow(9))
    cluster.wait(job, "RUNNING")
    cluster.wait(job, "PENDING")
    cluster.run(["scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED"])  # the start alone may need half a minute
    fields = cluster.wait(job, seconds=200)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), log(fields)
    assert weights(reproduced) == uninterrupted


def test_a_pipeline_uses_all_nodes_for_data_and_training(
    cluster: Cluster, reproduced: Project, uninterrupted: dict[str, str]
) -> None:
    variables = {"PIPELINE_RUNTIME": "{nproc_per_node: 1}", **ENVIRONMENT}
    job = cluster.submit("--nodes=2", "slurm/pipeline.sbatch", "-S", "seed=1", cwd=reproduced.path, **variables)
    fields = cluster.wait(job, seconds=250)
    assert fields["JobState"] == "COMPLETED", log(fields)
    assert "on 2 nodes" in log(fields)
    assert weights(reproduced) == uninterrupted
    assert reproduced.json("outputs/metrics.json")["validation_loss"]
    wait_for(lambda: not cluster.tasks(job))
