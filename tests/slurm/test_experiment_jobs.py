"""slurm/experiments.sbatch: two experiments at the same time, one of them interrupted."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.checkpointing.layout import CheckpointManifest, step_name
from tests.faults import environment
from tests.project import BIN, Project, wait_for
from tests.slurm.cluster import Cluster
from tests.trainings import steps


def signal_script(cluster: Cluster, job: str) -> None:
    cluster.run(["scancel", "--batch", "--signal=USR1", job])


def kill_all(cluster: Cluster, job: str) -> None:
    """As when the node loses power; the node is still there, so that Slurm starts the job again at once."""
    for task in cluster.tasks(job):
        if task.name() != "slurmstepd":
            task.suspend()  # so that none of them notices that another one is gone
    for task in cluster.tasks(job):
        task.kill()
    cluster.run(["scontrol", "requeue", job])


def weights(project: Project, seed: int) -> dict[str, str]:
    """SHA-256 of the shards of the last checkpoint of the run with this seed."""
    for path in (project / "outputs/test/checkpoints").glob(f"*/{step_name(12)}"):
        manifest = CheckpointManifest.read(path)
        if manifest.identity.params["seed"] == seed:
            return {name: entry.sha256 for name, entry in manifest.files.items() if name.endswith(".distcp")}
    return {}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("interrupt", [signal_script, kill_all])
def test_an_experiment_of_a_job_that_is_interrupted_is_resumed(
    cluster: Cluster,
    reproduced: Project,
    uninterrupted: dict[str, str],
    interrupt: Callable[[Cluster, str], None],
) -> None:
    delays = environment("\n".join(f"delay rank 1 at step {step}" for step in range(3, 8)))
    variables = {"PATH": f"{BIN}:/usr/bin:/bin:/usr/sbin", "OMP_NUM_THREADS": "1", **delays}
    jobs = [
        cluster.submit("slurm/experiments.sbatch", "-S", f"seed={seed}", cwd=reproduced.path, **variables)
        for seed in (1, 2)
    ]
    wait_for(lambda: steps(reproduced, seed=1) and steps(reproduced, seed=2), 200)
    log = Path(cluster.job(jobs[0])["StdOut"])
    interrupt(cluster, jobs[0])
    for each in jobs:
        fields = cluster.wait(each, seconds=300)
        assert fields["JobState"] == "COMPLETED", Path(fields["StdOut"]).read_text()
    (baseline,) = json.loads(reproduced.run("dvc", "exp", "show", "--json", "--hide-workspace"))
    found = [each["revs"][0]["data"] for each in baseline["experiments"]]
    assert sorted(data["params"]["params.yaml"]["data"]["seed"] for data in found) == [1, 2]
    assert [data["metrics"]["outputs/cost.json"]["data"]["steps"] for data in found] == [12, 12]
    assert weights(reproduced, seed=1) == uninterrupted
    assert re.search(r"resuming from step [1-9]\d* of 12", log.read_text()), log.read_text()
    wait_for(lambda: not any(cluster.tasks(each) for each in jobs))
