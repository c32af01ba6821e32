"""The cluster of the tests: each node is a node of its own, and nothing is left after its end."""

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


def test_the_doctor_checks_each_node(cluster: Cluster, tmp_path: Path) -> None:
    command = f"srun {sys.executable} -m stages.doctor"
    arguments = ("--nodes=2", "--ntasks-per-node=2", "--wrap", command)
    fields = cluster.wait(cluster.submit(*arguments, cwd=tmp_path, PYTHONPATH=str(REPO)))
    lines = Path(fields["StdOut"]).read_text().splitlines()
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "1:0"), lines  # tmp_path has no project
    for node in NODES:  # once, although each has two tasks
        assert lines.count(f"{node}: error    params.yaml is missing: run from the root of the project") == 1


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
