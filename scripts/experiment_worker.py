"""Work on DVC's queue of experiments until it is empty: what each job of slurm/experiments.sbatch runs.

    python -m scripts.experiment_worker

Any number of them, on any machines that share the disk of the project, work on one queue. A worker of `dvc queue start`
is a process in the background of one machine, and forgets what it was doing when it ends. This one, on a signal (TERM,
USR1, Ctrl-C), has the training save, queues the experiment again for whoever is first, and exits with status 75. If it
is killed, the next worker that starts does that: an experiment without a worker is known by its lock, which the kernel
releases, on all machines.
"""

import fcntl
import re
import signal
import sys
import threading
from pathlib import Path
from queue import Empty

import psutil
from dvc.exceptions import DvcException
from dvc.repo import Repo
from dvc.repo.experiments.queue.base import QueueEntry
from dvc.repo.experiments.queue.celery import LocalCeleryQueue
from dvc.repo.experiments.queue.tasks import run_exp
from kombu.message import Message

from scripts.resume_experiments import arguments_of, clean_up, find_process, queue_again, stop_stages, worker_lock
from stages.artifacts import command
from stages.artifacts.errors import StageError
from stages.artifacts.file_lock import flock, open_lock, read_status, set_status

INTERRUPTED = 75
"""Exit status of a worker, and of a training, that was asked to stop."""


def main() -> None:
    """Run the command."""
    command.parser(__doc__).parse_args()
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopping.set())
    try:
        with Repo() as repo:
            status = work(repo.experiments.celery_queue, stopping)
    except DvcException as error:  # such as no git repository
        raise StageError(str(error)) from None
    sys.exit(status)


def work(queue: LocalCeleryQueue, stopping: threading.Event) -> int:
    """Run experiments until the queue is empty, or `stopping` is set; returns an exit status."""
    queue.celery.loader.import_default_modules()  # as workers of celery do: it registers the tasks that `run_exp` calls
    queue_lost_again(queue)
    failed = []
    while not stopping.is_set() and (message := take(queue)):
        entry = QueueEntry.from_dict(arguments_of(message)[0][0])
        with open_lock(worker_lock(queue, entry)) as lock:
            flock(lock, fcntl.LOCK_EX)
            set_status(lock, message.headers["id"])
            print(f"{entry.name}: started; `dvc queue logs {entry.name}` shows its output", flush=True)
            log = Path(queue.get_infofile_path(entry.stash_rev)).with_suffix(".out")
            size = log.stat().st_size if log.exists() else 0  # what earlier attempts have printed
            if _run(queue, message, entry, stopping):
                print(f"{entry.name}: finished", flush=True)
                continue
            output = log.read_bytes()[size:].decode(errors="replace") if log.exists() else ""
            # As in slurm/job.sh: all ranks have saved, because of a signal that only they received, or a node is gone.
            if stopping.is_set() or re.search(r"exited with 75|^error: node .* was lost", output, re.MULTILINE):
                queue_again(queue, message, entry)
                print(f"{entry.name}: interrupted, and queued again", flush=True)
                return INTERRUPTED
            print(f"{entry.name}: failed", flush=True)
            failed.append(entry.name)
    if failed:
        print(f"error: failed: {', '.join(failed)}; `python -m scripts.resume_experiments` runs them again",
              file=sys.stderr)  # fmt: skip
    return INTERRUPTED if stopping.is_set() else int(bool(failed))


def take(queue: LocalCeleryQueue) -> Message | None:
    """The next task of the queue, which no other worker gets; None if it is empty."""
    with queue.celery.connection_for_read() as connection, connection.channel() as channel:
        try:
            # A rename of the task's file: it succeeds once, on a shared disk, too.
            message: Message = channel.Message(channel._get(queue.celery.conf.task_default_queue), channel=channel)
        except Empty:
            return None
        return message


def queue_lost_again(queue: LocalCeleryQueue) -> None:
    """Queue the experiments again whose worker was one of these, and was killed."""
    for message, entry in list(queue._iter_processed()):
        task = message.headers["id"]
        if queue.celery.AsyncResult(task).ready() or not worker_lock(queue, entry).exists():
            continue
        with open_lock(worker_lock(queue, entry)) as lock:
            is_free = flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Of an earlier attempt: this one has not locked it yet, or is the business of a worker of DVC.
            is_own = read_status(lock).startswith(task)
            # Meanwhile another worker may have done it.
            if is_free and is_own and task in {each.headers["id"] for each, _ in queue._iter_processed()}:
                clean_up(queue, entry)
                queue_again(queue, message, entry)
                print(f"{entry.name}: queued again, because its worker is gone", flush=True)


def _run(queue: LocalCeleryQueue, message: Message, entry: QueueEntry, stopping: threading.Event) -> bool:
    """Run an experiment as the workers of DVC do; returns whether it has a result."""
    done = threading.Event()
    stopper = threading.Thread(target=_stop, args=(queue, entry, stopping, done))
    stopper.start()
    arguments, keywords = arguments_of(message)
    task, backend = message.headers["id"], queue.celery.backend
    try:
        run_exp(*arguments, **keywords)
        backend.mark_as_done(task, None)
    except Exception as error:  # whatever it is, as a worker of celery does: the other experiments are not affected
        print(f"error: {entry.name}: {error}", file=sys.stderr, flush=True)
        backend.mark_as_failure(task, error)
    finally:
        done.set()
        stopper.join()
    return entry.stash_rev not in {failed.stash_rev for failed, _ in queue.iter_failed()}


def _stop(queue: LocalCeleryQueue, entry: QueueEntry, stopping: threading.Event, done: threading.Event) -> None:
    """Once `stopping` is set, ask the stages of an experiment to stop, until it is `done`."""
    asked: set[psutil.Process] = set()
    while not done.wait(0.5):
        if stopping.is_set() and (process := find_process(queue, entry)):
            stop_stages(process, asked)


if __name__ == "__main__":
    command.run(main)
