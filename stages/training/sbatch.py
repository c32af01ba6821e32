"""A training as a job of Slurm: the launcher of a login node submits it, and follows it until it has ended.

The job runs slurm/launch.sbatch, and in it the launcher again, which trains on the nodes of the job. A launch whose run
has a job already follows that one, so this launcher may be killed, or its login node restarted.
"""

import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from stages.artifacts.errors import StageError
from stages.training.console import print_line
from stages.training.handoff import Launch
from stages.training.params import TrainRuntime
from stages.training.run import Run
from stages.training.signals import INTERRUPTED, on_stop_signal

_SCRIPT = Path("slurm/launch.sbatch")

_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
}
"""States of a job that does not run again. (One that goes back into the queue is PENDING.)"""

_POLL_SECONDS = 5
"""Between two questions to Slurm's controller, which answers all users of the cluster."""


class _Job(NamedTuple):
    """What Slurm reports about a job."""

    state: str
    reason: str
    """Why it waits in the queue."""
    exitcode: int


def submits(runtime: TrainRuntime) -> bool:
    """Whether a launch is to submit a job. Inside one, or another allocation, it trains."""
    return runtime.launcher == "sbatch" and "SLURM_JOB_ID" not in os.environ


def run_job(run: Run, runtime: TrainRuntime) -> int:
    """Submit a job that trains `run`, unless there is one, and follow it; returns its exit status.

    A signal to stop asks the training to save and the job to end, however long that takes.

    Raises:
        StageError: Slurm refuses the job, or cannot be asked.
    """
    stopping = threading.Event()
    on_stop_signal(stopping.set)
    # Its name and where its checkpoints are: another clone may train the same run for itself.
    name, comment = f"train-{run.run_id}", str(run.directory.resolve())
    if job := _find(name, comment):
        print_line(f"following job {job}, which an earlier launch has submitted")
        log = _Log(_log_path(run, job), skip=True)
    else:
        job = _submit(run, runtime, name, comment)
        print_line(f"submitted job {job}: Ctrl-C ends it after a save")
        log = _Log(_log_path(run, job), skip=False)
    found = _follow(job, log, stopping)
    if found.state == "COMPLETED":
        return 0
    if found.state != "FAILED":  # otherwise its log ends with the reason
        print(f"error: job {job} has ended in state {found.state}; the next launch submits another", file=sys.stderr)
    return INTERRUPTED if stopping.is_set() else found.exitcode or 1


def _find(name: str, comment: str) -> str | None:
    """The job of that name and comment that waits or runs."""
    for line in _run("squeue", "--me", "--noheader", f"--name={name}", "--format=%A %k").splitlines():
        job, _, its_comment = line.strip().partition(" ")
        if its_comment == comment:
            return job
    return None


def _submit(run: Run, runtime: TrainRuntime, name: str, comment: str) -> str:
    if not _SCRIPT.exists():
        raise StageError(f"runtime.launcher sbatch submits {_SCRIPT}, which is not in {Path.cwd()}")
    Launch(run.params, runtime, run.identity).hand_over()  # sbatch passes the environment on
    log = _log_path(run, "%j")
    log.parent.mkdir(parents=True, exist_ok=True)
    nodes = [f"--nodes={runtime.num_nodes}"] if runtime.num_nodes else []
    # The last ones count: a comment of the user's would hide the job from `_find`, and without this environment the job
    # would train what is in params.yaml when it starts.
    own = [*nodes, f"--job-name={name}", f"--comment={comment}", f"--output={log}", "--export=ALL"]
    answer = _run("sbatch", "--parsable", *shlex.split(runtime.sbatch_args or ""), *own, str(_SCRIPT))
    job = answer.strip().partition(";")[0]  # after which comes the cluster, where there are several
    if not job.isdecimal():
        raise StageError(f"sbatch has printed {answer.strip()!r} instead of the number of a job: check sbatch_args")
    return job


def _log_path(run: Run, job: str) -> Path:
    return run.log_directory.resolve() / f"slurm-{job}.out"  # not in the copy that `dvc exp run --temp` deletes


def _follow(job: str, log: "_Log", stopping: threading.Event) -> _Job:
    """Show the log of a job until it has ended, or Slurm has forgotten it."""
    reason = ""
    was_asked_to_stop = False
    found = _show(job)
    while found.state not in _ENDED:
        if found.state == "PENDING" and found.reason != reason:
            print_line(f"job {job} waits in the queue ({found.reason})")
            reason = found.reason
        for _ in range(_POLL_SECONDS):
            if stopping.is_set() and not was_asked_to_stop:
                break
            log.show()
            time.sleep(1)
        if stopping.is_set():  # each time: the controller may not have answered, or the job was between two states
            _stop(job)
            if not was_asked_to_stop:
                print_line(f"asked job {job} to save and end")  # after that: it fails where the terminal is gone
            was_asked_to_stop = True
        try:
            found = _show(job)
        except StageError as error:
            if "Invalid job id" in str(error):
                raise StageError(f"Slurm no longer knows how job {job} has ended: launch it again") from None
            # The controller restarts, or is busy: the job runs all the same.
            print(f"{error}; asking again", file=sys.stderr, flush=True)
    log.show()
    return found


def _show(job: str) -> _Job:
    """Ask Slurm about a job.

    Raises:
        StageError: there is no answer.
    """
    text = _run("scontrol", "--oneliner", "show", "job", job)
    fields = dict(field.split("=", 1) for field in text.split() if "=" in field)
    status, _, _signal = fields["ExitCode"].partition(":")
    return _Job(fields["JobState"], fields["Reason"], int(status))


def _stop(job: str) -> None:
    """Ask a job to save and to end, but not to go back into the queue."""
    # Not `scancel` alone: Slurm would kill it after half a minute, in the middle of a large save.
    for command in (
        ("scontrol", "update", f"JobId={job}", "Requeue=0"),
        ("scancel", "--state=PENDING", job),
        ("scancel", "--batch", "--signal=USR1", job),
    ):
        subprocess.run(command, stderr=subprocess.DEVNULL)  # each fails in a state that is not its own


def _run(*command: str) -> str:
    """What a command of Slurm prints.

    Raises:
        StageError: it fails, or there is none.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise StageError(f"runtime.launcher sbatch needs the command {command[0]}, which is not on PATH") from None
    if done.returncode:
        raise StageError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout


class _Log:
    """Shows what a job prints, as far as it was not shown before; with `skip` nothing of what is in the file now."""

    def __init__(self, path: Path, skip: bool) -> None:
        self._path = path
        self._position = path.stat().st_size if skip and path.exists() else 0

    def show(self) -> None:
        """Show what was added to the file; it need not exist yet."""
        if self._path.exists():
            with self._path.open("rb") as file:  # opened each time: that is when NFS looks for what is new
                file.seek(self._position)
                text = file.read()
            self._position += len(text)
            sys.stdout.buffer.write(text)
            sys.stdout.flush()
