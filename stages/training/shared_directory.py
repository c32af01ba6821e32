"""Whether the nodes of a training share the directory of its checkpoints, and the locks in it."""

import fcntl
import os
import secrets
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from stages.artifacts.errors import StageError
from stages.artifacts.file_lock import flock, open_lock
from stages.artifacts.shared_disk import wait_for_file
from stages.training.distributed import run_on_all_ranks, run_on_rank0

_PREFIX = ".shared-"


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
            flock(stack.enter_context(open_lock(path)), fcntl.LOCK_EX)
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
        return node, True, not flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
