"""A training that `dvc repro` on a login node submits, with `runtime.launcher: sbatch`."""

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.faults import environment
from tests.project import BIN, LAUNCH, Project, wait_for
from tests.slurm.cluster import Cluster
from tests.trainings import steps, weights

VARIABLES = {
    "PATH": f"{BIN}:{os.environ['PATH']}",
    "PIPELINE_RUNTIME": "{launcher: sbatch, num_nodes: 2, nproc_per_node: 1, sbatch_args: --time=10}",
    "OMP_NUM_THREADS": "1",
}
SLOW = environment("\n".join(f"delay rank 1 at step {step}" for step in range(3, 7)))
"""Steps of two seconds."""


def repro(cluster: Cluster, project: Project, **variables: str) -> "subprocess.Popen[str]":
    return project.popen("dvc", "repro", "train", SLURM_CONF=str(cluster.conf), **VARIABLES, **variables)


def jobs(cluster: Cluster) -> list[str]:
    return cluster.run(["squeue", "--noheader", "--format=%A"]).split()


@pytest.mark.slow
def test_an_interrupted_repro_ends_its_job_after_a_save_and_the_next_one_finishes(
    cluster: Cluster, reproduced: Project, uninterrupted: dict[str, str]
) -> None:
    reproduced.set(seed=1)
    process = repro(cluster, reproduced, **SLOW)
    wait_for(lambda: steps(reproduced, seed=1), 120)
    [launcher] = [
        each
        for each in psutil.Process(process.pid).children(recursive=True)
        if "stages.launch" in " ".join(each.cmdline())
    ]
    launcher.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 255, output
    assert re.search(r"Submitted batch job \d+.*interrupted: step-\d+ is saved", output, re.S)
    assert "exited with 75" in output
    assert not jobs(cluster)

    process = repro(cluster, reproduced)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    assert re.search(r"resuming from step \d+ of .*2 ranks on 2 nodes", output, re.S)
    assert weights(reproduced) == uninterrupted
    assert "Data and pipelines are up to date" in reproduced.run("dvc", "repro", "train", **VARIABLES)


@pytest.mark.slow
def test_the_job_of_a_second_launch_waits_for_that_of_one_that_was_killed(
    cluster: Cluster, reproduced: Project, uninterrupted: dict[str, str]
) -> None:
    reproduced.set(seed=1)
    process = repro(cluster, reproduced, **SLOW)
    wait_for(lambda: steps(reproduced, seed=1), 120)
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        each.kill()
    process.communicate()
    assert len(jobs(cluster)) == 1
    (reproduced / ".dvc/tmp/rwlock").unlink(missing_ok=True)
    process = repro(cluster, reproduced)
    wait_for(lambda: len(jobs(cluster)) == 2)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    assert "has already finished" in output
    assert "resuming from step" not in output
    assert weights(reproduced) == uninterrupted


@pytest.mark.slow
def test_an_error_of_the_job_is_that_of_the_launch(cluster: Cluster, reproduced: Project, tmp_path: Path) -> None:
    project = reproduced.copy(tmp_path / "100%u of it")  # for Slurm, %u is the user
    project.set(seed=1)
    variables = VARIABLES | {"SLURM_CONF": str(cluster.conf)}
    output = project.run(*LAUNCH, status=2, **variables, MAX_RESTARTS="-1")
    assert "error: this job was started again 0 times" in output
    wrong = variables | {"PIPELINE_RUNTIME": "{launcher: sbatch, sbatch_args: --partition=none}"}
    output = project.run(*LAUNCH, status=1, **wrong)
    assert "sbatch: error: invalid partition specified: none" in output
