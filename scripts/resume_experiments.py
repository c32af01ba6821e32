"""Queue experiments again that failed or whose worker is gone, and start workers; their trainings continue.

    python -m scripts.resume_experiments                  all of them
    python -m scripts.resume_experiments warty-ears -j 2  this one; with two workers
    python -m scripts.resume_experiments -j 0             starts none: jobs of slurm/experiments.sbatch do the work

DVC's queue starts a task once. It lists one that failed as "Failed", and one whose worker was killed as "Running", and
can only remove them. Here the same task is queued again: the same commit of parameters and code, the same name. So the
training has the same `run_id`, and continues from its newest checkpoint.

An experiment that outlived its worker would end with a result that nobody collects: it is stopped first, and saves.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from dvc.exceptions import DvcException
from dvc.lock import LockError
from dvc.repo import Repo
from dvc.repo.experiments.executor.base import ExecutorInfo
from dvc.repo.experiments.queue.base import QueueEntry
from dvc.repo.experiments.queue.celery import LocalCeleryQueue
from dvc.repo.experiments.queue.tasks import run_exp
from dvc.repo.experiments.utils import get_exp_rwlock
from dvc.utils.fs import remove
from kombu.message import Message

from stages.artifacts import command
from stages.artifacts.errors import StageError
from stages.artifacts.file_lock import flock, open_lock


def main() -> None:
    """Run the command."""
    parser = command.parser(__doc__)
    parser.add_argument("names", nargs="*", help="experiments, as `dvc queue status` lists them; default: all")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="workers that run at the same time (default: 1)")
    arguments = parser.parse_args()
    try:
        with Repo() as repo:
            resume(repo.experiments.celery_queue, arguments.names)
    except DvcException as error:  # such as no git repository
        raise StageError(str(error)) from None
    if arguments.jobs < 1:
        return
    # By its own command, as what it starts is to outlive this process. Workers that run already are counted. They
    # inherit its output: were that a pipe of this process, who reads it would wait for them.
    with tempfile.TemporaryFile() as output:
        start = [sys.executable, "-m", "dvc", "queue", "start", "--jobs", str(arguments.jobs)]
        status = subprocess.run(start, stdout=output, stderr=output, check=False).returncode
        output.seek(0)
        print(output.read().decode().strip())
    sys.exit(status)


def resume(queue: LocalCeleryQueue, names: list[str], seconds: float = 4) -> None:
    """Queue experiments again, all or those of these names.

    Args:
        queue: Of the project.
        names: Empty for all.
        seconds: How long workers may need to answer what they work on. DVC itself waits for one, but workers look for
            questions only once a second.

    Raises:
        StageError: there is nothing to resume, or nothing of such a name.
    """
    failed = {entry.stash_rev for entry, _ in queue.iter_failed()}
    unfinished = [(message, entry, entry.stash_rev in failed) for message, entry in _unfinished(queue, failed, seconds)]
    if unknown := set(names) - {entry.name for _, entry, _ in unfinished}:
        known = ", ".join(entry.name for _, entry, _ in unfinished) or "none"
        raise StageError(
            f"{', '.join(sorted(unknown))}: neither failed nor without a worker (`dvc queue status`); "
            f"those are: {known}"
        )
    if not unfinished:
        print("no experiment has failed, and none has lost its worker")
    for message, entry, has_failed in unfinished:
        if names and entry.name not in names:
            continue
        clean_up(queue, entry)
        queue_again(queue, message, entry)
        print(f"{entry.name}: queued again, because {'it failed' if has_failed else 'its worker is gone'}")


def _unfinished(queue: LocalCeleryQueue, failed: set[str], seconds: float) -> Iterator[tuple[Message, QueueEntry]]:
    """The tasks that failed, and those that were started but that no worker works on."""
    answers = queue.celery.control.inspect(timeout=seconds).active() or {}
    if silent := sorted(_idle_workers(queue) - answers.keys()):
        raise StageError(f"{', '.join(silent)} has not answered what it works on: try again in a minute")
    claimed = {task["id"] for tasks in answers.values() for task in tasks}
    for message, entry in queue._iter_processed():
        process = find_process(queue, entry)
        is_claimed = message.headers["id"] in claimed or is_locked(queue, entry)
        is_claimed = is_claimed or (process is not None and _has_worker(process))
        is_done = queue.celery.AsyncResult(message.headers["id"]).ready() and entry.stash_rev not in failed
        if not (is_done or is_claimed):
            yield message, entry


def _idle_workers(queue: LocalCeleryQueue) -> set[str]:
    """The workers of DVC on this machine that run no process: they wait, or start or have ended an experiment."""
    prefix = f"dvc-exp-{hashlib.sha256(queue.wdir.encode()).hexdigest()[:6]}-"  # DVC names them so
    found: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            names = [word for word in process.cmdline() if word.startswith(prefix)]
            found.update(names if names and not process.children() else ())
    return found


def find_process(queue: LocalCeleryQueue, entry: QueueEntry) -> psutil.Process | None:
    """The `dvc` that runs an experiment, if it is on this machine."""
    info = queue.proc.get(entry.stash_rev)
    try:
        process = psutil.Process(info.pid) if info else None
        # The process of this number may be another one by now.
        return process if process and queue.get_infofile_path(entry.stash_rev) in process.cmdline() else None
    except psutil.Error:
        return None


def stop_stages(process: psutil.Process, asked: set[psutil.Process]) -> None:
    """Ask the stage that a `dvc` runs to stop, once; a training saves. Call it until the process has ended."""
    with suppress(psutil.NoSuchProcess):
        for child in set(process.children()) - asked:
            if any(word.startswith("stages.") for word in child.cmdline()):  # not git, which would leave its locks
                asked.add(child)
                child.terminate()


def worker_lock(queue: LocalCeleryQueue, entry: QueueEntry) -> Path:
    """The file that a worker of scripts/experiment_worker.py locks while it works on an experiment."""
    return Path(queue.get_infofile_path(entry.stash_rev)).with_name("worker.lock")


def is_locked(queue: LocalCeleryQueue, entry: QueueEntry) -> bool:
    """Whether such a worker works on an experiment, on this machine or on another one."""
    if not (path := worker_lock(queue, entry)).exists():
        return False
    with open_lock(path) as lock:
        return not flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _has_worker(process: psutil.Process) -> bool:
    try:
        parent = process.parent()
        return parent is not None and "queue-worker" in parent.cmdline()
    except psutil.Error:
        return False


def clean_up(queue: LocalCeleryQueue, entry: QueueEntry) -> None:
    """End an experiment that outlived its worker, and remove the copy of the project that it ran in."""
    asked: set[psutil.Process] = set()
    while process := find_process(queue, entry):
        if not asked:
            print(f"{entry.name}: stopping process {process.pid}, which outlived its worker")
        stop_stages(process, asked)
        time.sleep(0.5)
    infofile = queue.get_infofile_path(entry.stash_rev)
    if os.path.exists(infofile):  # not if the worker was killed before it had made the copy
        remove(ExecutorInfo.load_json(infofile).root_dir)


def queue_again(queue: LocalCeleryQueue, message: Message, entry: QueueEntry) -> None:
    """Replace a task that was started by one that was not."""
    # The old task is removed last: if this is interrupted, a task is there twice, until the next time, and not gone.
    if entry.stash_rev not in {queued.stash_rev for queued in queue.iter_queued()}:
        _stash_again(queue, entry)
        arguments, keywords = arguments_of(message)
        run_exp.apply_async(arguments, keywords)
    with suppress(FileNotFoundError):  # a task whose worker was killed has no result
        queue.celery.AsyncResult(message.headers["id"]).forget()
    queue.celery.purge(message.delivery_tag)


def arguments_of(message: Any) -> tuple[list[Any], dict[str, Any]]:
    """Those with which a task calls `run_exp`; the first is its `QueueEntry`."""
    arguments, keywords, _ = message.decode()
    return arguments, keywords


def _stash_again(queue: LocalCeleryQueue, entry: QueueEntry) -> None:
    """Move a commit of parameters and code to the stash of the queue, from where the next worker gets it."""
    end = time.monotonic() + 180  # as DVC itself: others have the lock for moments
    while True:
        try:
            with get_exp_rwlock(queue.repo, writes=[queue.ref]):
                stashed = queue.stash.format_message(entry.head_rev, entry.baseline_rev, entry.name, entry.branch)
                queue.scm.set_ref(queue.ref, entry.stash_rev, message=f"commit: {stashed}")
                if queue.failed_stash and (old := queue.failed_stash.stash_revs.get(entry.stash_rev)):
                    queue.failed_stash.remove_revs([old])
                return
        except LockError:
            if time.monotonic() > end:
                raise
            time.sleep(1)


if __name__ == "__main__":
    command.run(main)
