"""The batch scripts of slurm/: an interrupted job ends with what an undisturbed run without Slurm leaves."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import psutil
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


def test_a_cancelled_training_saves_and_does_not_come_back(cluster: Cluster, reproduced: Project) -> None:
    job = cluster.submit("slurm/train.sbatch", "-S", "seed=1", cwd=reproduced.path, **ENVIRONMENT, **slow(4))
    wait_for(lambda: steps(reproduced, seed=1))
    cluster.run(["scancel", job])
    fields = cluster.wait(job)
    wait_for(lambda: not cluster.tasks(job))
    assert "is saved; the next launch continues" in log(fields)
    fields = cluster.job(job)
    assert (fields["JobState"], fields["Restarts"]) == ("CANCELLED", "0")


def test_restarts_are_bounded(cluster: Cluster, reproduced: Project) -> None:
    job = cluster.submit(
        "slurm/train.sbatch", "-S", "seed=1", cwd=reproduced.path, MAX_RESTARTS="0", **ENVIRONMENT, **slow(4)
    )
    wait_for(lambda: steps(reproduced, seed=1))
    signal_script(cluster, job)
    fields = cluster.wait(job)
    assert (fields["JobState"], fields["Restarts"]) == ("FAILED", "0")
    assert "MAX_RESTARTS is 0: submit it again to continue" in log(fields)


def test_the_parameters_are_those_of_the_environment(cluster: Cluster, reproduced: Project) -> None:
    """The total stays, and the accumulation follows from the batch size of a device."""
    parameters = {"TOTAL_BATCH_SIZE": "16", "BATCH_SIZE_PER_DEVICE": "4", "MAX_STEPS": "2"}
    job = cluster.submit("slurm/train.sbatch", cwd=reproduced.path, **ENVIRONMENT, **parameters)
    fields = cluster.wait(job)
    assert fields["JobState"] == "COMPLETED", log(fields)
    [manifest] = reproduced.path.glob("outputs/test/checkpoints/*/step-00000002/manifest.json")
    params = reproduced.json(str(manifest.relative_to(reproduced.path)))["identity"]["params"]
    assert (params["total_batch_size"], params["batch_size"], params["max_steps"]) == (16, 4, 2)
    assert "exp run -S total_batch_size=16 -S batch_size=4 -S max_steps=2 train" in log(fields)
    # Without any, params.yaml is used as the job above left it, and there is nothing to do.
    fields = cluster.wait(cluster.submit("slurm/train.sbatch", cwd=reproduced.path, **ENVIRONMENT))
    assert "dvc repro train\n" in log(fields)
    assert "Stage 'train' didn't change, skipping" in log(fields)


def test_the_data_stages_use_all_nodes(cluster: Cluster, reproduced: Project) -> None:
    before = (reproduced / "dvc.lock").read_text()
    job = cluster.submit(
        "--nodes=2", "--cpus-per-task=2", "slurm/data.sbatch", "-S", "min_chars=2", cwd=reproduced.path, **ENVIRONMENT
    )
    nodes = set()

    def ended() -> bool:
        for task in cluster.tasks(job):
            try:
                nodes.update({task.environ()["SLURMD_NODENAME"]} if "worker" in task.cmdline() else ())
            except psutil.Error:
                continue
        return cluster.job(job)["JobState"] not in ("PENDING", "RUNNING")

    wait_for(ended, 120)
    fields = cluster.wait(job)
    assert fields["JobState"] == "COMPLETED", log(fields)
    assert nodes == {"n1", "n2"}
    wait_for(lambda: not cluster.tasks(job))
    assert "executor: processes" in (reproduced / "params.yaml").read_text()
    assert (reproduced / "dvc.lock").read_text() != before


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
