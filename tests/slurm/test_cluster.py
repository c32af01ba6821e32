"""The cluster of the tests: what every other test here relies on."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.project import REPO, wait_for
from tests.slurm.cluster import NODES, Cluster


def test_a_job_runs_a_task_on_each_node(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("--nodes=2", "--ntasks-per-node=1", "--wrap", "srun printenv SLURMD_NODENAME", cwd=tmp_path)
    fields = cluster.wait(job)
    assert fields["JobState"] == "COMPLETED"
    assert sorted(Path(fields["StdOut"]).read_text().split()) == list(NODES)


def test_the_doctor_checks_each_node(cluster: Cluster, tmp_path: Path) -> None:
    command = f"srun {sys.executable} -m stages.doctor"
    arguments = ("--nodes=2", "--ntasks-per-node=2", "--wrap", command)
    fields = cluster.wait(cluster.submit(*arguments, cwd=tmp_path, PYTHONPATH=str(REPO)))
    lines = Path(fields["StdOut"]).read_text().splitlines()
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "1:0"), lines  # tmp_path has no project
    for node in NODES:  # once, although each has two tasks
        assert lines.count(f"{node}: error    params.yaml is missing: run from the root of the project") == 1


@pytest.mark.slow
def test_scancel_ends_the_tasks_of_all_nodes(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("--nodes=2", "--ntasks-per-node=1", "--wrap", "srun sleep 300", cwd=tmp_path)
    wait_for(lambda: sum(task.name() == "sleep" for task in cluster.tasks(job)) == 2)
    cluster.run(["scancel", job])
    assert cluster.wait(job)["JobState"] == "CANCELLED"
    wait_for(lambda: not cluster.tasks(job))


@pytest.mark.slow
def test_a_requeued_job_starts_again_and_counts(cluster: Cluster, tmp_path: Path) -> None:
    script = 'echo start ${SLURM_RESTART_COUNT:-0}; [ "${SLURM_RESTART_COUNT:-0}" = 1 ] || sleep 300'
    job = cluster.submit("--requeue", "--open-mode=append", "--wrap", script, cwd=tmp_path)
    log = Path(cluster.wait(job, "RUNNING")["StdOut"])
    wait_for(lambda: log.exists() and "start 0" in log.read_text())
    cluster.run(["scontrol", "requeue", job])
    assert cluster.wait(job)["JobState"] == "COMPLETED"
    assert "start 0" in log.read_text()
    assert log.read_text().endswith("start 1\n")


@pytest.mark.slow
def test_the_signal_before_the_time_limit_reaches_the_script(cluster: Cluster, tmp_path: Path) -> None:
    script = "trap 'echo signal; exit 3' USR1; sleep 300 & wait"
    # Slurm looks at limits every half minute, so it sends the signal up to a minute early: at once, with one minute.
    job = cluster.submit("--time=1", "--signal=B:USR1@30", "--wrap", script, cwd=tmp_path)
    fields = cluster.wait(job, "FAILED")
    # Slurm may add a line of its own, of a process that ends before it is told to go on.
    assert (fields["ExitCode"], Path(fields["StdOut"]).read_text().splitlines()[0]) == ("3:0", "signal")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_the_cluster(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.slurm.cluster"]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=REPO, stdout=output)
    wait_for(log.read_text)
    conf = Path(log.read_text().strip().removeprefix("export SLURM_CONF="))
    subprocess.run(
        ["sbatch", "--wrap", "trap '' TERM INT HUP; setsid sleep 300"],
        cwd=tmp_path,
        env={**os.environ, "SLURM_CONF": str(conf)},
        check=True,
        stdout=subprocess.DEVNULL,
    )

    def running() -> set[str]:
        """The names of the processes that have a file of the cluster open, or its settings."""
        names = set()
        for each in psutil.process_iter():
            with suppress(psutil.Error):
                if each.environ().get("SLURM_CONF") == str(conf) or str(conf.parent) in str(each.open_files()):
                    names.add(each.name())
        return names

    wait_for(lambda: {"sleep", "slurmstepd", "munged"} <= running())
    process.send_signal(number)
    assert process.wait(30) == (-number if number == signal.SIGKILL else 0)
    wait_for(lambda: not conf.parent.exists(), 20)
    assert not running()
