"""Several nodes of Slurm: whether they see the same files and locks, have the same packages, and agree on the time.

All is exchanged through files in a directory that the nodes must share anyway; no connection is opened. The node of
index 0 makes the directory, holds a lock in it, and answers the others:

    node 0    facts.json, lock       what it has, written while it holds the lock
    node 1    1.asks                 that it has looked at its clock
    node 0    1.answer               its own time, as soon as it has seen the question
    node 1    1.done                 node 0 removes the directory when all nodes have written that
"""

import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from stages.artifacts import publish
from stages.artifacts.file_lock import flock, open_lock
from stages.artifacts.shared_disk import refresh
from stages.checks.findings import Finding, error, ok, warning

_FACTS = "facts.json"
_SAME_FILES = ("params.yaml", "dvc.yaml", "dvc.lock", "data/model.json", "data/tokens/train/state.json",
               "data/tokens/validation/state.json")  # fmt: skip
_POLL_SECONDS = 0.05
MAX_CLOCK_SECONDS = 1.0
"""By which clocks may differ."""


@dataclass(frozen=True)
class Node:
    """This node, of those on which srun has started the doctor."""

    name: str
    index: int
    num_nodes: int
    step: str
    """Of Slurm: unique among all that run, with the start of the job."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Node":
        """From the variables of Slurm. In a batch script, and without Slurm, there is one node."""
        name = environment.get("SLURMD_NODENAME", os.uname().nodename)
        num_nodes = int(environment.get("SLURM_STEP_NUM_NODES", 1))
        if num_nodes == 1:
            return cls(name, 0, 1, "")
        parts = (environment.get(f"SLURM_{part}", "0") for part in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
        return cls(name, int(environment["SLURM_NODEID"]), num_nodes, ".".join(parts))


def facts(project: Path = Path()) -> dict[str, str]:
    """What must be the same on all nodes, by name."""
    packages = sorted(f"{each.name}=={each.version}" for each in distributions())
    found = {"Python": sys.version.split()[0], "packages": hashlib.sha256("\n".join(packages).encode()).hexdigest()}
    code = hashlib.sha256()
    for path in sorted((project / "stages").rglob("*.py")):
        code.update(path.relative_to(project).as_posix().encode() + b"\0" + path.read_bytes())
    found["stages/"] = code.hexdigest()
    for name in _SAME_FILES:
        with suppress(FileNotFoundError, NotADirectoryError):
            found[name] = publish.sha256_file(project / name)
    return found


def check_nodes(
    node: Node, own: Mapping[str, str], shared: Path, seconds: float, clock: Callable[[], float] = time.time
) -> Iterator[Finding]:
    """Compare the nodes; called on each of them.

    Args:
        node: This one.
        own: Its facts.
        shared: A directory that all nodes must see.
        seconds: To wait for the others.
        clock: Seconds since 1970, as this node has them.
    """
    directory = shared / f".doctor-{node.step}"
    end = time.monotonic() + seconds
    if node.index == 0:
        yield from _answer(node, own, directory, end, clock)
    else:
        yield from _ask(node, own, directory, end, clock)


def _answer(
    node: Node, own: Mapping[str, str], directory: Path, end: float, clock: Callable[[], float]
) -> Iterator[Finding]:
    waiting = set(range(1, node.num_nodes))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with open_lock(directory / "lock") as lock:
            flock(lock, fcntl.LOCK_EX)
            publish.write_json(directory / _FACTS, {"node": node.name, "facts": own})  # who sees it finds the lock held
            while waiting and time.monotonic() < end:
                refresh([directory])
                for index in sorted(waiting):
                    if (directory / f"{index}.done").exists():
                        waiting.discard(index)
                    elif (directory / f"{index}.asks").exists() and not (directory / f"{index}.answer").exists():
                        publish.write_json(directory / f"{index}.answer", clock())
                time.sleep(_POLL_SECONDS)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if waiting:
        indices = ", ".join(map(str, sorted(waiting)))
        yield error(
            f"{len(waiting)} of {node.num_nodes} nodes (SLURM_NODEID {indices}) were not seen in {directory.parent}",
            "put the project, or CHECKPOINT_ROOT, on a disk that all nodes share; or raise --wait if they start slowly",
        )
    else:
        yield ok(f"all {node.num_nodes} nodes see the same {directory.parent}")


def _ask(
    node: Node, own: Mapping[str, str], directory: Path, end: float, clock: Callable[[], float]
) -> Iterator[Finding]:
    if not _wait(directory / _FACTS, end):
        yield error(
            f"this node does not see what the node of SLURM_NODEID 0 writes into {directory.parent}",
            "put the project, or CHECKPOINT_ROOT, on a disk that all nodes share",
        )
        return
    try:
        yield from _compare(node, own, directory, end, clock)
    except FileNotFoundError:  # what is written here makes no directory, so none stays
        yield error("this node is late: the check of the node of SLURM_NODEID 0 has ended", "raise --wait")
    finally:
        with suppress(FileNotFoundError):
            (directory / f"{node.index}.done").touch()


def _compare(
    node: Node, own: Mapping[str, str], directory: Path, end: float, clock: Callable[[], float]
) -> Iterator[Finding]:
    """Compare this node with the first one.

    Raises:
        FileNotFoundError: that has waited long enough, and removed the directory.
    """
    first = publish.read_json(directory / _FACTS)
    name, theirs = first["node"], first["facts"]
    with (directory / "lock").open("r+") as lock:
        if flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield error(
                f"this node does not see a lock that {name} holds in {directory.parent}",
                "mount its file system with locks that all nodes see (docs/shared-disks.md)",
            )
        else:
            yield ok(f"this node sees files and locks of {name} in {directory.parent}")
    different = sorted(fact for fact in {*own, *theirs} if own.get(fact) != theirs.get(fact))
    if different:
        yield error(
            f"not the same as on {name}: {', '.join(different)}",
            "use one directory on a shared disk for the project and .venv, or copy them again",
        )
    else:
        yield ok(f"the same packages, code and manifests as on {name}")
    yield from _check_clock(node, name, directory, end, clock)


def _check_clock(node: Node, name: str, directory: Path, end: float, clock: Callable[[], float]) -> Iterator[Finding]:
    asked = clock()
    (directory / f"{node.index}.asks").touch()
    if not _wait(directory / f"{node.index}.answer", end):
        yield warning(f"{name} has not answered, so the clocks are not compared", "raise --wait")
        return
    answered = publish.read_json(directory / f"{node.index}.answer")
    # The other node has looked at its clock between two moments of this one, so the difference has these bounds.
    least, most = asked - answered, clock() - answered
    difference = max(least, -most)
    if difference > MAX_CLOCK_SECONDS:
        direction = "ahead of" if least > 0 else "behind"
        yield warning(
            f"the clock is {difference:.1f} s {direction} that of {name}",
            "start chrony or ntpd on both: logs would be out of order, and after minutes munge refuses jobs",
        )
    else:
        yield ok(f"the clock agrees with that of {name}")


def _wait(path: Path, end: float) -> bool:
    """Whether this node sees a file at the latest at `end`."""
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
        refresh([path.parent])
    return True
