"""The batch scripts of slurm/ with programs in place of DVC and its stage: what they do with signals, errors, nodes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project import BIN, REPO, wait_for
from tests.slurm.cluster import Cluster

CLUSTER_DOCS = REPO / "docs/cluster.md"

DVC = """#!/bin/bash
echo "dvc $*"
bash -c 'exec python3 -m stages.launch' & wait $!; status=$?
((status == 0)) || { echo "ERROR: failed to run: exec python -m stages.launch, exited with $status" >&2; exit 255; }
"""
LAUNCH = """
import os, signal, sys, time
def stop(number, frame):
    time.sleep(2)
    print("saved", flush=True)
    sys.exit(int(os.environ.get("STATUS", 75)))
signal.signal(signal.SIGTERM, stop)
first = "SLURM_RESTART_COUNT" not in os.environ
print("first start" if first else "later start", flush=True)
if first and "ERROR" in os.environ:
    sys.exit("error: " + os.environ["ERROR"])
time.sleep(300 if first else 0)
"""
DASK = f"""#!{BIN}/python
import os, subprocess, time, yaml
runtime = yaml.safe_load(os.environ["PIPELINE_RUNTIME"])
while not os.path.exists(runtime["dask_scheduler"]):
    time.sleep(0.2)
from distributed import Client
client = Client(scheduler_file=runtime["dask_scheduler"])
client.wait_for_workers(4, timeout=60)
nodes = client.run(lambda: __import__("os").environ["SLURMD_NODENAME"])
print("dask:", *sorted(nodes.values()), *client.nthreads().values(), runtime["nproc_per_node"], flush=True)
subprocess.run(["srun", "--overlap", "--nodes=2", "--ntasks=2", "echo", "training"], check=True)
"""


class Script:
    """A directory with the batch scripts, in which one of them runs as a job."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        shutil.copytree(REPO / "slurm", directory / "slurm")
        (directory / "stages").mkdir()
        (directory / "stages/launch.py").write_text(LAUNCH)
        (directory / ".venv/bin").mkdir(parents=True)
        self.dvc(DVC)

    def dvc(self, text: str) -> None:
        program = self.directory / ".venv/bin/dvc"
        program.write_text(text)
        program.chmod(0o755)

    def submit(self, *arguments: str, **environment: str) -> str:
        self.job = self.cluster.submit(*arguments, cwd=self.directory, **environment)
        return self.job

    def wait_for_start(self) -> None:
        log = self.directory / f"slurm-{self.job}.out"
        wait_for(lambda: log.exists() and "first start" in log.read_text())

    def end(self) -> tuple[str, str, str]:
        """Wait for the end of the job: its state, how often it was started again, its log."""
        self.cluster.wait(self.job)
        wait_for(lambda: not self.cluster.tasks(self.job))
        fields = self.cluster.job(self.job)
        return fields["JobState"], fields["Restarts"], Path(fields["StdOut"]).read_text()


@pytest.fixture
def script(cluster: Cluster, tmp_path: Path) -> Script:
    return Script(cluster, tmp_path)


SIGNAL = ["scancel", "--batch", "--signal=USR1"]
LOST = "node n2 was lost: torchrun has ended there without a word"
NO_RESTART = "MAX_RESTARTS is 0: submit it again to continue"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "variables", "state", "restarts", "expected"),
    [
        (SIGNAL, {}, "COMPLETED 0:0", "1", "(?s)saved.*later start"),
        (["scontrol", "requeue"], {}, "COMPLETED 0:0", "1", "(?s)saved.*later start"),
        (SIGNAL, {"STATUS": "0"}, "COMPLETED 0:0", "0", "saved"),  # it finished in spite of the signal
        (SIGNAL, {"MAX_RESTARTS": "0"}, "FAILED 75:0", "0", NO_RESTART),
        (SIGNAL, {"SBATCH_NO_REQUEUE": "1"}, "FAILED 75:0", "0", "saved"),
        (["scancel"], {}, "CANCELLED 75:0", "0", "saved"),
        ([], {"ERROR": LOST}, "COMPLETED 0:0", "1", LOST),
        ([], {"ERROR": "rank 1 crashed"}, "FAILED 255:0", "0", "rank 1 crashed"),
    ],
    ids=["signal", "requeue", "signal at the end", "no restarts", "no requeue", "cancel", "lost node", "crash"],
)
def test_a_job_that_is_interrupted_saves_and_starts_again_where_that_helps(
    script: Script, command: list[str], variables: dict[str, str], state: str, restarts: str, expected: str
) -> None:
    job = script.submit("slurm/train.sbatch", **variables)
    if command:
        script.wait_for_start()
        script.cluster.run([*command, job])
    ended, starts, log = script.end()
    assert (f"{ended} {script.cluster.job(job)['ExitCode']}", starts) == (state, restarts), log
    assert re.search(expected, log), log


@pytest.mark.parametrize(
    ("arguments", "variables", "command"),
    [
        ([], {}, "dvc repro train\n"),
        (
            ["-S", "lr=1e-4"],
            {"TOTAL_BATCH_SIZE": "16", "BATCH_SIZE_PER_DEVICE": "8"},
            "dvc exp run -S total_batch_size=16 -S batch_size=8 -S lr=1e-4 train\n",
        ),
    ],
)
def test_parameters_are_those_of_arguments_and_environment(
    script: Script, arguments: list[str], variables: dict[str, str], command: str
) -> None:
    script.dvc('#!/bin/bash\necho "dvc $*"\n')
    script.submit("slurm/train.sbatch", *arguments, **variables)
    state, _, log = script.end()
    assert (state, log.endswith(command)) == ("COMPLETED", True), log


@pytest.mark.slow
def test_the_recipe_for_apptainer_saves_before_it_ends_and_has_the_status_of_the_training(script: Script) -> None:
    """With a stand-in for Apptainer: a container shares the processes of its node unless it is asked not to."""
    [recipe] = re.findall(r"^#!/bin/bash\n.*?^apptainer .*?(?=^```)", CLUSTER_DOCS.read_text(), re.M | re.S)
    (script.directory / "recipe").write_text(recipe.replace("--gpus-per-node=8 ", ""))
    apptainer = script.directory / ".venv/bin/apptainer"
    apptainer.write_text('#!/bin/bash\nwhile [[ $1 != python ]]; do shift; done\nexec "$@"\n')
    apptainer.chmod(0o755)
    (script.directory / ".venv/bin/python").symlink_to(sys.executable)
    job = script.submit("recipe", PATH=f"{script.directory}/.venv/bin:/usr/bin:/bin", HF_HOME="/nonexistent")
    script.wait_for_start()
    script.cluster.run(["scancel", "--batch", "--signal=USR1", job])
    state, _, log = script.end()
    assert (state, script.cluster.job(job)["ExitCode"], "saved" in log) == ("FAILED", "75:0", True), log


@pytest.mark.slow
def test_a_job_on_two_nodes_has_a_dask_cluster_on_both_beside_the_training(script: Script) -> None:
    script.dvc(DASK)
    variables = {"PIPELINE_RUNTIME": "{nproc_per_node: 1}", "PATH": f"{BIN}:/usr/bin:/bin"}
    script.submit("--nodes=2", "--cpus-per-task=2", "slurm/pipeline.sbatch", **variables)
    state, _, log = script.end()
    assert state == "COMPLETED", log
    assert "dask: n1 n1 n2 n2 1 1 1 1 1\n" in log
    assert log.count("training\n") == 2
    assert [path.name for path in (script.directory / ".dvc/tmp").iterdir()] == ["job.lock"]


def test_a_script_that_is_not_submitted_says_so(script: Script) -> None:
    done = subprocess.run(["bash", "slurm/train.sbatch"], cwd=script.directory, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: this is no job of Slurm: sbatch slurm/train.sbatch\n")


def test_a_runtime_that_is_none_is_one_message(script: Script) -> None:
    script.submit("--nodes=2", "slurm/data.sbatch", PIPELINE_RUNTIME="{ranks", PATH=f"{BIN}:/usr/bin:/bin")
    state, _, log = script.end()
    expected = r"error: PIPELINE_RUNTIME is \{ranks: it must contain values of the section `runtime`, such as .*\n"
    assert state == "FAILED" and re.fullmatch(expected, log), log


@pytest.mark.slow
def test_the_commands_of_the_guide_are_accepted(script: Script) -> None:
    commands = re.findall(r"^\$ .*?sbatch (.*slurm/\w+\.sbatch.*?)\)?$", CLUSTER_DOCS.read_text(), re.MULTILINE)
    assert len(commands) > 6
    for command in commands:
        words = [word for word in command.split() if not re.match(r"--(partition|gpus|dependency)|\\$", word)]
        fewer = [re.sub("=[0-9]+$", "=2", word) if word.startswith(("--nodes", "--cpus")) else word for word in words]
        script.cluster.run(["sbatch", "--test-only", *fewer], script.directory)


@pytest.mark.parametrize(("content", "left"), [("", ""), ("{}", ".dvc/tmp/rwlock dvc.lock")])
def test_what_a_killed_dvc_left_empty_hinders_no_job(script: Script, content: str, left: str) -> None:
    (script.directory / ".dvc/tmp").mkdir(parents=True)
    for name in (".dvc/tmp/rwlock", "dvc.lock"):
        (script.directory / name).write_text(content)
    script.dvc("#!/bin/bash\necho left: $(ls .dvc/tmp/rwlock dvc.lock 2> /dev/null)\n")
    script.submit("slurm/train.sbatch")
    state, _, log = script.end()
    assert (state, log.splitlines()[-1]) == ("COMPLETED", f"left: {left}".strip())


@pytest.mark.slow
def test_one_job_at_a_time(script: Script) -> None:
    first = script.submit("slurm/train.sbatch")
    script.wait_for_start()
    script.submit("slurm/train.sbatch")
    state, _, log = script.end()
    assert state == "FAILED"
    assert f"error: job {first} runs in {script.directory}; submit this one with --dependency=afterany:{first}" in log
    script.cluster.run(["scancel", first])
