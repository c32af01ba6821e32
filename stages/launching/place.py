"""Where a training runs: what the report says of hardware and commit, since no other stage was there."""

import os
import platform
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist

from stages.checkpointing.state import Place


def find_place() -> Place:
    """That of this launch, as its rank 0 sees it; the date follows with each checkpoint."""
    ranks = dist.get_world_size()
    return Place(
        device=device(),
        ranks=ranks,
        nodes=ranks // int(os.environ["LOCAL_WORLD_SIZE"]),
        commit=_commit(),
    )


def device() -> str:
    """The name of the GPU, or of the processor."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu()


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, f"{platform.machine()} CPU")  # ARM states none


def _commit() -> str | None:
    try:
        found = subprocess.run(("git", "rev-parse", "HEAD"), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None
