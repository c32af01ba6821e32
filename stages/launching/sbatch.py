"""A training as a job of Slurm: the launcher of a login node submits it, and shows its log until it has ended.

The job runs slurm/launch.sbatch, and in it the launcher again, which trains on the nodes of the job. Jobs of one run
in one directory have one name and one log, and wait for each other (`--dependency=singleton`): so the launcher may be
killed, or its login node restarted. The job of the next launch finds what the one before has trained.
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

from stages.base import process, publish
from stages.base.errors import StageError
from stages.checkpointing.run import Run
from stages.launching.console import droppable, print_line
from stages.launching.runtime import Launch, TrainRuntime
from stages.ranks.signals import INTERRUPTED, on_stop_signals

_SCRIPT = Path("slurm/launch.sbatch")
_STOP_SECONDS = 5
"""Between two requests to stop: Slurm's controller may be busy, or the job between two states."""


def submits(runtime: TrainRuntime) -> bool:
    """Whether a launch is to submit a job. Inside one, or another allocation, it trains."""
    return runtime.launcher == "sbatch" and "SLURM_JOB_ID" not in os.environ


def run_job(run: Run, runtime: TrainRuntime) -> int:
    """Submit a job that trains `run`, and show its log until it has ended; returns its exit status.

    A signal to stop asks the training to save and the job to end, however long that takes.

    Raises:
        StageError: there is no sbatch, or no script.
    """
    if not _SCRIPT.exists():
        raise StageError(f"runtime.launcher sbatch submits {_SCRIPT}, which is not in {Path.cwd()}")
    Launch(run.params, runtime, run.identity, decision=None).hand_over()  # sbatch passes the environment on
    log = run.log_directory.resolve() / f"slurm-{run.run_id}.out"  # not in the copy that `dvc exp run --temp` deletes
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    stopping = threading.Event()
    on_stop_signals(stopping.set)
    # Another clone may train the same run: its jobs have nothing to do with these.
    name = f"train-{run.run_id}-{publish.sha256_json(str(run.directory.resolve()))[:8]}"
    nodes = [f"--nodes={runtime.num_nodes}"] if runtime.num_nodes else []
    # The last ones count: without this environment the job would train what is in params.yaml when it starts.
    output = str(log).replace("%", "%%")  # to Slurm, %u is the user
    own = [*nodes, f"--job-name={name}", f"--output={output}", "--export=ALL", str(_SCRIPT)]
    command = ["sbatch", "--wait", "--dependency=singleton", *shlex.split(runtime.sbatch_args or ""), *own]
    position = log.stat().st_size
    try:
        waiting = subprocess.Popen(
            command, start_new_session=True, preexec_fn=partial(process.die_with_parent, signal.SIGTERM, os.getpid())
        )
    except FileNotFoundError:
        raise StageError("runtime.launcher sbatch needs the command sbatch, which is not on PATH") from None
    print_line(f"job {name}: Ctrl-C ends it after a save")
    asked = -float("inf")
    while True:
        has_ended = waiting.poll() is not None
        with log.open("rb") as file:  # opened each time: that is when NFS looks for what is new
            file.seek(position)
            text = file.read()
        position += len(text)
        with droppable(sys.stdout):
            sys.stdout.buffer.write(text)
            sys.stdout.flush()
        if has_ended:
            break
        if stopping.is_set() and time.monotonic() > asked + _STOP_SECONDS:
            asked = time.monotonic()
            _stop(name)
        time.sleep(1)
    if waiting.returncode:
        print_line(f"error: job {name} has ended with status {waiting.returncode}", sys.stderr)
    return INTERRUPTED if stopping.is_set() else waiting.returncode


def _stop(name: str) -> None:
    """Ask the jobs of a name to save and to end, but not to go back into the queue."""
    found = subprocess.run(["squeue", "--me", "--noheader", f"--name={name}", "--format=%A"], stdout=subprocess.PIPE)
    for job in found.stdout.decode().split():
        # Not `scancel` alone: Slurm would kill it after half a minute, in the middle of a large save.
        for command in (
            ("scontrol", "update", f"JobId={job}", "Requeue=0"),
            ("scancel", "--state=PENDING", job),
            ("scancel", "--batch", "--signal=USR1", job),
        ):
            subprocess.run(command, stderr=subprocess.DEVNULL)  # each fails in a state that is not its own
