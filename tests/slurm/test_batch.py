"""The batch scripts of slurm/: an interrupted job ends with what an undisturbed run without Slurm leaves."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import environment
from tests.project import BIN, Project, wait_for
from tests.ranks import Ranks
from tests.slurm.cluster import NODES, Cluster
from tests.trainings import steps, weights

TRAIN = ("slurm/train.sbatch", "-S", "seed=1")


def slow(num_steps: int, times: int = 1) -> dict[str, str]:
    """The environment of a training with steps of two seconds or more, so that it still runs when it is interrupted."""
    return environment("\n".join(times * [f"delay rank 1 at step {step}" for step in range(3, 3 + num_steps)]))


def submit(cluster: Cluster, project: Project, *arguments: str, ranks: int = 1, **variables: str) -> str:
    """Submit a job with so many ranks on each node. The test projects have no .venv."""
    variables |= {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return cluster.submit(*arguments, cwd=project.path, PIPELINE_RUNTIME=f"{{nproc_per_node: {ranks}}}", **variables)


def log(fields: dict[str, str]) -> str:
    return Path(fields["StdOut"]).read_text()


LOST = (1, 2)
"""How often a job whose node was lost may start again. Once is enough. But Slurm repeats the order to end the job,
which the lost node did not confirm, a minute later, and may hit the next start, which here follows within seconds."""


def completed(cluster: Cluster, job: str, *restarts: int) -> str:
    """Wait until a job has ended, after none or one of `restarts`; returns its log."""
    fields = cluster.wait(job)
    assert fields["JobState"] == "COMPLETED", log(fields)
    assert int(fields["Restarts"]) in (restarts or (0,)), log(fields)
    wait_for(lambda: not cluster.tasks(job))
    return log(fields)


def started(cluster: Cluster, project: Project, *arguments: str, ranks: int = 1, **variables: str) -> str:
    """Submit a training that can be interrupted, and wait for its first checkpoint."""
    job = submit(cluster, project, *arguments, *TRAIN, ranks=ranks, **slow(4), **variables)
    wait_for(lambda: steps(project, seed=1), 120)
    return job


def requeue(cluster: Cluster, job: str) -> None:
    cluster.run(["scontrol", "requeue", job])


def signal_script(cluster: Cluster, job: str) -> None:
    cluster.run(["scancel", "--batch", "--signal=USR1", job])  # as Slurm does it before the time limit


def signal_launcher(cluster: Cluster, job: str) -> None:
    [launcher] = [task for task in cluster.tasks(job) if "stages.launch" in task.cmdline()]
    launcher.terminate()


def test_two_nodes_train_what_two_local_ranks_do(
    cluster: Cluster, reproduced: Project, uninterrupted: dict[str, str]
) -> None:
    reproduced.set(seed=1)
    output = completed(cluster, submit(cluster, reproduced, "--nodes=2", "slurm/train.sbatch"))
    assert "training with 2 ranks on 2 nodes" in output
    assert weights(reproduced) == uninterrupted


@pytest.mark.slow
def test_two_nodes_with_two_ranks_each_train_what_four_local_ranks_do(
    cluster: Cluster, reproduced: Project, ranks: Ranks, tmp_path: Path
) -> None:
    """The model is sharded on each node, and each has a copy of it."""
    reproduced.set(seed=1, batch_size=1, fsdp={"sharding_strategy": "HYBRID_SHARD"})
    local = reproduced.copy(tmp_path / "local")
    local.set(fsdp={"size": 2})
    ranks.run(local, world_size=4)
    job = submit(cluster, reproduced, "--nodes=2", "slurm/train.sbatch", ranks=2)
    assert "training with 4 ranks on 2 nodes" in completed(cluster, job)
    assert weights(reproduced) == weights(local)
    again = completed(cluster, submit(cluster, reproduced, "--nodes=2", "slurm/train.sbatch", ranks=2))
    assert "Stage 'train' didn't change, skipping" in again


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", [requeue, signal_script, signal_launcher])
def test_a_training_that_is_interrupted_ends_with_the_same_weights(
    cluster: Cluster, reproduced: Project, uninterrupted: dict[str, str], interrupt: Callable[[Cluster, str], None]
) -> None:
    job = started(cluster, reproduced, "--nodes=2")
    interrupt(cluster, job)
    output = completed(cluster, job, 1)
    assert re.search(r"interrupted: step-\d+ is saved.*resuming from step", output, re.S), output
    assert weights(reproduced) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("node", NODES)
def test_a_training_whose_node_is_lost_continues_when_there_are_enough_nodes(
    cluster: Cluster, reproduced: Project, uninterrupted: dict[str, str], node: str
) -> None:
    """The node of the launcher, or another one: Slurm starts the job again, by itself or when the launcher names it."""
    job = started(cluster, reproduced, "--nodes=2")
    cluster.kill_node(node)
    try:
        cluster.wait(job, "PENDING")
    finally:
        cluster.start_node(node)
    output = completed(cluster, job, *LOST)
    assert "resuming from step" in output, output
    if node != NODES[0]:  # the launcher lives; Slurm may notice the loss first, and end the job
        assert f"error: node {node} was lost" in output or "DUE TO NODE FAILURE" in output, output
    assert weights(reproduced) == uninterrupted


@pytest.mark.slow
def test_a_training_whose_node_stays_lost_continues_on_another(
    cluster: Cluster, reproduced: Project, uninterrupted: dict[str, str]
) -> None:
    job = started(cluster, reproduced, ranks=2)
    lost = cluster.job(job)["NodeList"]
    cluster.kill_node(lost)
    try:
        assert "resuming from step" in completed(cluster, job, *LOST)
    finally:
        cluster.start_node(lost)
    assert {lost, cluster.job(job)["NodeList"]} == set(NODES)
    assert weights(reproduced) == uninterrupted


@pytest.mark.slow
def test_a_training_longer_than_its_time_limit_ends_with_the_same_weights(
    cluster: Cluster, reproduced: Project, uninterrupted: dict[str, str]
) -> None:
    # Slurm looks every half minute, and sends the signal up to a minute early: here within the first 40 seconds.
    job = submit(cluster, reproduced, "--time=1", "--signal=B:USR1@20", *TRAIN, ranks=2, **slow(9, times=2))
    cluster.wait(job, "RUNNING")
    cluster.wait(job, "PENDING")
    cluster.run(["scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED"])  # the start alone may need half a minute
    completed(cluster, job, 1)
    assert weights(reproduced) == uninterrupted


@pytest.mark.slow
def test_a_cancelled_training_leaves_nothing_that_hinders_the_next_job(
    cluster: Cluster, reproduced: Project, uninterrupted: dict[str, str]
) -> None:
    job = started(cluster, reproduced, "--nodes=2")
    cluster.run(["scancel", job])
    following = submit(cluster, reproduced, "--nodes=2", *TRAIN)  # while the first one saves
    assert cluster.wait(job)["JobState"] == "CANCELLED"
    wait_for(lambda: not cluster.tasks(job))
    assert "resuming from step" in completed(cluster, following)
    assert weights(reproduced) == uninterrupted


@pytest.mark.slow
def test_a_training_continues_on_another_number_of_nodes(
    cluster: Cluster, reproduced: Project, uninterrupted: dict[str, str]
) -> None:
    job = started(cluster, reproduced, "--nodes=2", MAX_RESTARTS="0")
    signal_script(cluster, job)
    assert "MAX_RESTARTS is 0: submit it again to continue" in log(cluster.wait(job))
    output = completed(cluster, submit(cluster, reproduced, *TRAIN, ranks=2))
    assert "resuming from step" in output
    assert "training with 2 ranks" in output
    assert weights(reproduced) == uninterrupted


@pytest.mark.slow
def test_two_jobs_of_two_clones_share_the_nodes(
    cluster: Cluster, reproduced: Project, uninterrupted: dict[str, str], ranks: Ranks, tmp_path: Path
) -> None:
    clone, local = (reproduced.copy(tmp_path / name) for name in ("clone", "local"))
    for project in (clone, local):
        project.set(seed=2)
    ranks.run(local)
    jobs = [submit(cluster, reproduced, "--nodes=2", *TRAIN, **slow(4)),
            submit(cluster, clone, "--nodes=2", "slurm/train.sbatch", **slow(4))]  # fmt: skip
    wait_for(lambda: steps(reproduced, seed=1) and steps(clone, seed=2), 200)
    assert [cluster.job(job)["JobState"] for job in jobs] == ["RUNNING", "RUNNING"]
    for job in jobs:
        completed(cluster, job)
    assert (weights(reproduced), weights(clone)) == (uninterrupted, weights(local))


@pytest.mark.slow
def test_the_accumulation_follows_from_the_ranks_and_the_total_stays(
    cluster: Cluster, reproduced: Project, ranks: Ranks, tmp_path: Path
) -> None:
    local = reproduced.copy(tmp_path / "local")
    local.set(total_batch_size=16, batch_size=8)
    ranks.run(local)
    variables = {"TOTAL_BATCH_SIZE": "16", "BATCH_SIZE_PER_DEVICE": "8"}
    output = completed(cluster, submit(cluster, reproduced, "--nodes=2", "slurm/train.sbatch", **variables))
    assert "batch 16 = 2 ranks x 8 rows x 1 accumulation step" in output
    assert weights(reproduced, 6) == weights(local, 6)
    variables["LEARNING_RATE"] = "1e-4"  # another run
    output = completed(cluster, submit(cluster, reproduced, "slurm/train.sbatch", **variables))
    assert "batch 16 = 1 rank x 8 rows x 2 accumulation steps" in output
    fields = cluster.wait(
        submit(cluster, reproduced, "--nodes=2", "slurm/train.sbatch", **variables | {"BATCH_SIZE_PER_DEVICE": "3"})
    )
    assert fields["JobState"] == "FAILED"
    expected = "\nerror: total_batch_size 16 is not a multiple of batch_size 3 x 2 ranks: use total_batch_size 12 or 18"
    assert expected in log(fields)
    assert log(fields).count("\nerror:") == 1  # Slurm's own lines are "srun: error: ..." and the like
    assert "Traceback" not in log(fields)


@pytest.mark.slow
def test_a_pipeline_uses_all_nodes_for_data_and_training(
    cluster: Cluster, reproduced: Project, uninterrupted: dict[str, str]
) -> None:
    reproduced.set(seed=1)
    job = submit(cluster, reproduced, "--nodes=2", "slurm/pipeline.sbatch")
    assert "on 2 nodes" in completed(cluster, job)
    assert weights(reproduced) == uninterrupted
    assert reproduced.json("outputs/metrics.json")["validation_loss"]
