"""Several nodes of Slurm: whether they see the same files and locks, and have the same packages.

All is exchanged through files in a directory that the nodes must share anyway; no connection is opened. The node of
index 0 makes the directory, writes what it has while it holds a lock there, and removes the directory when all other
nodes have compared themselves with that.
"""

import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from stages.artifacts import publish
from stages.artifacts.file_lock import flock, open_lock
from stages.artifacts.shared_disk import refresh
from stages.checks.findings import Found, error, ok

_FACTS = "facts.json"
_SAME_FILES = ("params.yaml", "dvc.yaml", "dvc.lock", "data/model.json", "data/tokens/train/state.json",
               "data/tokens/validation/state.json")  # fmt: skip
_POLL_SECONDS = 0.05


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


def check_nodes(node: Node, own: Mapping[str, str], shared: Path, seconds: float) -> Found[None]:
    """Compare the nodes; called on each of them.

    Args:
        node: This one.
        own: Its facts.
        shared: A directory that all nodes must see.
        seconds: To wait for the others.
    """
    directory = shared / f".doctor-{node.step}"
    end = time.monotonic() + seconds
    yield from (_answer if node.index == 0 else _compare)(node, own, directory, end)


def _answer(node: Node, own: Mapping[str, str], directory: Path, end: float) -> Found[None]:
    waiting = set(range(1, node.num_nodes))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with open_lock(directory / "lock") as lock:
            flock(lock, fcntl.LOCK_EX)
            publish.write_json(directory / _FACTS, {"node": node.name, "facts": own})  # who sees it finds the lock held
            while waiting and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
                refresh([directory])
                waiting = {index for index in waiting if not (directory / f"{index}.done").exists()}
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


def _compare(node: Node, own: Mapping[str, str], directory: Path, end: float) -> Found[None]:
    while not (directory / _FACTS).exists():
        if time.monotonic() > end:
            yield error(
                f"this node does not see what the node of SLURM_NODEID 0 writes into {directory.parent}",
                "put the project, or CHECKPOINT_ROOT, on a disk that all nodes share; or raise --wait",
            )
            return
        time.sleep(_POLL_SECONDS)
        refresh([directory])
    first = publish.read_json(directory / _FACTS)
    name, theirs = first["node"], first["facts"]
    with (directory / "lock").open("r+") as lock:
        is_locked = not flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (directory / f"{node.index}.done").touch()
    if is_locked:
        yield ok(f"this node sees files and locks of {name} in {directory.parent}")
    else:
        yield error(
            f"this node does not see a lock that {name} holds in {directory.parent}",
            "mount its file system with locks that all nodes see (docs/shared-disks.md)",
        )
    different = sorted(fact for fact in {*own, *theirs} if own.get(fact) != theirs.get(fact))
    if different:
        yield error(
            f"not the same as on {name}: {', '.join(different)}",
            "use one directory on a shared disk for the project and .venv, or copy them again",
        )
    else:
        yield ok(f"the same packages, code and manifests as on {name}")
