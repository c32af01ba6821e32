"""Interrupts `dvc repro` at random, again and again; its results must be those of a run that nothing interrupted.

    python -m tests.random_faults --cycles 200 --seed 1
    python -m tests.random_faults --cycles 20 --slurm    # the training is a job on two nodes

Each cycle starts in a project without results. A random signal goes to a random process of `dvc repro` at a random
moment: dvc, a stage, a worker, the launcher, torchrun or a rank. Then `dvc repro` runs to its end. Lost is a cycle
after which data, history, last checkpoint (weights and optimizer state) or model directory have other bytes, a
checkpoint is incomplete or not valid, a process is left, DVC finds a stage to run, or a training that had a checkpoint
began again at step 0. The table at the end counts what was injected, survived and lost.
"""

import argparse
import collections
import hashlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from stages.base.errors import StageError
from stages.checkpointing.layout import CheckpointManifest, list_checkpoints, list_incomplete, verify
from stages.checkpointing.retention import DAMAGED, list_leftovers
from tests.project import Project, is_alive, make_pipeline

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGSTOP)
"""After SIGSTOP comes SIGCONT, a second later: a pause."""

RESULTS = ("data/splits", "data/corpus", "data/tokens", "data/model.json", "outputs/test/model", "outputs/history.tsv")
"""What does not tell when, where and how fast it was made."""

NONE = "none"
"""The role of a signal that came too late."""

_SECONDS_TO_END = 60
"""A training that was asked to stop saves first."""


def digests(project: Project) -> dict[str, str]:
    """SHA-256 of each file of the results, and of what the last checkpoint contains."""
    roots = [project / name for name in RESULTS]
    files = [path for root in roots for path in (root, *root.rglob("*")) if path.is_file()]
    found = {str(path.relative_to(project.path)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    last = newest(project)
    return found if last is None else {**found, "the last checkpoint": last.result_sha256}


def newest(project: Project) -> CheckpointManifest | None:
    """The manifest of the checkpoint with the most steps."""
    published = [path for directory in _runs(project) for path in list_checkpoints(directory)]
    last = max(published, key=lambda path: path.name, default=None)
    return last and CheckpointManifest.read(last)


def _runs(project: Project) -> list[Path]:
    return [path for path in (project / "outputs/test/checkpoints").glob("*") if path.is_dir()]


def find_lost(project: Project, reference: dict[str, str]) -> list[str]:
    """What differs from the results of a run that nothing interrupted, and what is no valid checkpoint."""
    found = digests(project)
    lost = [name for name in sorted({*found, *reference}) if found.get(name) != reference.get(name)]
    for directory in _runs(project):
        # Not what a save left half-deleted: after the last one, nothing deletes it.
        quarantined = [path for path in list_leftovers(directory) if path.suffix == DAMAGED]
        lost += [f"{path} is left" for path in [*list_incomplete(directory), *quarantined]]
        for checkpoint in list_checkpoints(directory):
            try:
                verify(checkpoint)
            except StageError as error:
                lost.append(str(error))
    return lost


def find_processes(project: Project) -> list[str]:
    """The processes that run in the directory of a project."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if Path(process.cwd()) == project.path and is_alive(process):
                found.append(f"{process.cmdline()} is left")
    return found


def delete_empty(project: Project) -> list[str]:
    """Delete what DVC writes in place and left empty when it was killed, as slurm/job.sh does; returns the names."""
    found = [name for name in (".dvc/tmp/rwlock", "dvc.lock") if (project / name).exists()]
    empty = [name for name in found if not (project / name).stat().st_size]
    for name in empty:
        (project / name).unlink()
    return empty


def began_again(project: Project, before: CheckpointManifest | None) -> list[str]:
    """What was lost of a training that had checkpoint `before`, and has ended now."""
    is_unfinished = before is not None and before.step < before.total_steps
    launches = project.json("outputs/train_metrics.json")["cost"]["launches"]
    return ["the training began again, although it had a checkpoint"] * bool(is_unfinished and launches < 2)


def role(process: psutil.Process) -> str:
    """What a process is: `dvc`, the name of a stage, `rank`, `torchrun`, `worker` of a stage, `other`."""
    command = " ".join(process.cmdline())
    if re.search(r"\bdvc\b.* repro", command):
        return "dvc"
    if "torchrun" in command or "torch.distributed.run" in command:
        return "torchrun"
    if match := re.search(r"-m stages\.(\w+)$", command):
        return "rank" if "RANK" in process.environ() else match[1]
    return "worker" if "multiprocessing" in command else "other"


class Cycle:
    """One interruption of one `dvc repro`."""

    def __init__(self, project: Project, where: "Where", chance: random.Random, seconds: float) -> None:
        self.project, self.where = project, where
        self.number = chance.choice(SIGNALS)
        self.delay = chance.uniform(0, seconds)
        self.chance = chance
        self.role = NONE

    def interrupt(self) -> str:
        """Start `dvc repro`, send the signal, and return what was printed until all ended.

        Raises:
            AssertionError: a process of it is left.
        """
        with tempfile.NamedTemporaryFile("r") as output:  # not a pipe, which what is left would hold open
            command = ("sh", "-c", 'exec dvc repro > "$0" 2>&1', output.name)
            process = self.project.popen(*command, **self.where.environment)
            with suppress(subprocess.TimeoutExpired):
                process.wait(self.delay)
            tree = [psutil.Process(process.pid)] if process.poll() is None else []
            with suppress(psutil.NoSuchProcess):
                tree += [child for top in tree for child in top.children(recursive=True)]
            if targets := [one for one in [*tree, *self.where.jobs()] if is_alive(one)]:
                self._send(self.chance.choice(targets))
            process.wait(600)
            _, left = psutil.wait_procs([one for one in tree if is_alive(one)], timeout=_SECONDS_TO_END)
            printed = output.read()
        assert not left, f"{[one.cmdline() for one in left]} did not end\n{printed}"
        return printed

    def _send(self, target: psutil.Process) -> None:
        with suppress(psutil.NoSuchProcess):  # it ended in this moment
            name = role(target)
            target.send_signal(self.number)
            self.role = name
            if self.number == signal.SIGSTOP:
                time.sleep(1)
                target.send_signal(signal.SIGCONT)


class Where(NamedTuple):
    """Where the training runs."""

    environment: dict[str, str]
    """Of `dvc repro`."""
    jobs: Callable[[], list[psutil.Process]]
    """Processes of the training that `dvc repro` has not started itself."""


@contextmanager
def on_this_machine() -> Iterator[Where]:
    """The training is a child of `dvc repro`."""
    yield Where({}, list)


@contextmanager
def on_slurm() -> Iterator[Where]:
    """The training is a job on a cluster of two nodes."""
    from tests.slurm.cluster import Cluster
    from tests.slurm.test_submission import VARIABLES, jobs

    with Cluster() as cluster:
        environment = {**VARIABLES, "SLURM_CONF": str(cluster.conf)}
        yield Where(environment, lambda: [task for job in jobs(cluster) for task in cluster.tasks(job)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random_faults", description=__doc__.split("\n")[0])
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slurm", action="store_true", help="train on a Slurm cluster of two nodes")
    args = parser.parse_args()
    with on_slurm() if args.slurm else on_this_machine() as where:
        return run(where, args.cycles, args.seed)


def run(where: Where, cycles: int, seed: int) -> int:
    """Print each cycle and the table; returns the exit status."""
    chance = random.Random(seed)
    injected: collections.Counter[tuple[str, str]] = collections.Counter()
    lost: collections.Counter[tuple[str, str]] = collections.Counter()
    with tempfile.TemporaryDirectory() as root:
        fresh = Project(Path(root) / "fresh")
        make_pipeline(fresh)
        fresh.run("git", "init", "-q")
        project = fresh.copy(Path(root) / "project")
        started = time.monotonic()
        project.run("dvc", "repro", timeout=600, **where.environment)
        seconds = time.monotonic() - started
        reference = digests(project)
        print(f"{len(reference)} files of results; dvc repro needed {seconds:.0f} s", flush=True)
        with suppress(KeyboardInterrupt):  # the table of those until then
            while sum(injected.values()) < cycles:
                shutil.rmtree(project.path)
                project = fresh.copy(Path(root) / "project")
                cycle, emptied = Cycle(project, where, chance, seconds), list[str]()
                try:
                    printed = cycle.interrupt()
                    if cycle.role == NONE:  # the machine is faster now
                        seconds = cycle.delay
                        continue
                    before, emptied = newest(project), delete_empty(project)
                    printed += project.run("dvc", "repro", timeout=600, **where.environment)
                    problems = [*find_lost(project, reference), *began_again(project, before), *find_processes(project)]
                    if "up to date" not in (status := project.run("dvc", "status")):
                        problems.append(status)
                except (AssertionError, StageError, OSError, subprocess.TimeoutExpired) as error:
                    problems, printed = [str(error)], ""
                key = (cycle.role, cycle.number.name)
                injected[key] += 1
                lost[key] += bool(problems)
                deleted = f", without the empty {' and '.join(emptied)}" if emptied else ""
                result = "; ".join(problems) or f"same bytes{deleted}"
                number = sum(injected.values())
                print(f"{number:4} {cycle.number.name} to {cycle.role} after {cycle.delay:.1f} s: {result}", flush=True)
                if problems:
                    print(printed, flush=True)
    print(table(injected, lost))
    return 1 if sum(lost.values()) else 0


def table(injected: "collections.Counter[tuple[str, str]]", lost: "collections.Counter[tuple[str, str]]") -> str:
    """Process, signal, and how many were injected, survived and lost, as Markdown."""
    lines = ["| process | signal | injected | survived | lost |", "|---|---|---|---|---|"]
    for key in sorted(injected):
        lines.append(f"| {key[0]} | {key[1]} | {injected[key]} | {injected[key] - lost[key]} | {lost[key]} |")
    number, number_lost = sum(injected.values()), sum(lost.values())
    return "\n".join([*lines, f"| all | | {number} | {number - number_lost} | {number_lost} |"])


if __name__ == "__main__":
    sys.exit(main())
