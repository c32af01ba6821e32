"""Whether the ranks of a training agree: on what they train, and on the directory of its checkpoints and its locks."""

import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from stages.base.errors import StageError
from stages.base.file_lock import exclusive, open_lock, try_exclusive
from stages.base.identity import RunIdentity
from stages.base.shared_disk import wait_for_file
from stages.checkpointing.run import Run, differences, packages
from stages.forward.distributed import run_on_all_ranks, run_on_rank0
from stages.launching.runtime import TrainRuntime

_PREFIX = ".shared-"


@dataclass(frozen=True)
class _Facts(RunIdentity):
    """What must be the same on all ranks."""

    runtime: TrainRuntime
    packages: dict[str, str]


def refuse_different_ranks(run: Run, runtime: TrainRuntime) -> None:
    """Compare what the ranks train, and with which packages; a collective.

    Raises:
        StageError: naming the ranks and what differs from rank 0.
    """
    own = _Facts(**vars(run.identity), runtime=runtime, packages=packages())
    first, *others = run_on_all_ranks(lambda: own)
    lines = [
        f"rank {rank} differs from rank 0: {line}"
        for rank, theirs in enumerate(others, start=1)
        if theirs != first
        for line in differences(first, theirs)
    ]
    if lines:
        raise StageError(*lines)


def check_shared(directory: Path, seconds: float = 3) -> list[str]:
    """Check that all nodes see a file that rank 0 makes in `directory`, within `seconds`; a collective.

    Nodes that have a directory each would save a part of each checkpoint, which none of them could load.

    Returns:
        Warnings: of nodes that could lock what rank 0 has locked.

    Raises:
        StageError: naming the nodes that do not see the file.
    """
    if dist.get_world_size() == int(os.environ["LOCAL_WORLD_SIZE"]):
        return []
    with ExitStack() as stack:

        def make() -> Path:
            for leftover in directory.glob(f"{_PREFIX}*"):  # of a killed training
                leftover.unlink(missing_ok=True)
            path = directory / f"{_PREFIX}{secrets.token_hex(4)}"  # a new name: no node remembers that it was missing
            stack.callback(path.unlink, missing_ok=True)
            exclusive(stack.enter_context(open_lock(path)))
            return path

        path = run_on_rank0(make)
        nodes = run_on_all_ranks(lambda: _look(path, seconds) if os.environ["LOCAL_RANK"] == "0" else None)
    found = [node for node in nodes if node is not None]
    if blind := [name for name, is_seen, _ in found if not is_seen]:
        raise StageError(
            f"node {', '.join(blind)} does not see what rank 0, on node {found[0][0]}, writes into {directory}: put "
            "the checkpoints on a disk that all nodes share (set CHECKPOINT_ROOT)"
        )
    unlocked = ", ".join(name for name, _, is_locked in found if not is_locked)
    return [
        f"warning: node {unlocked} does not see locks that node {found[0][0]} holds in {directory}: never start this "
        "run twice at once, or mount its file system with locks that all nodes see (docs/shared-disks.md)"
    ] if unlocked else []  # fmt: skip


def _look(path: Path, seconds: float) -> tuple[str, bool, bool]:
    """The name of this node, whether it sees a file, and whether it sees that it is locked."""
    node = os.environ.get("SLURMD_NODENAME", os.uname().nodename)
    if not wait_for_file(path, 0, seconds):
        return node, False, False
    with open_lock(path) as lock:
        return node, True, not try_exclusive(lock)
