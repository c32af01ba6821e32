"""The memory of this machine."""

from pathlib import Path

import psutil


def memory_limit(own: Path = Path("/proc/self/cgroup"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory of this machine, or of the control group in which a job or a container runs."""
    total = psutil.virtual_memory().total
    try:
        names = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return int(total)
    for _, controllers, path in names:
        if controllers not in ("", "memory"):
            continue
        top = cgroups / controllers
        directory = top / path.lstrip("/")
        # A limit of one above counts as well: Slurm sets it for the job, above the step and the task.
        for each in (directory, *directory.parents):
            if not each.is_relative_to(top):
                break
            for name in ("memory.max", "memory.limit_in_bytes"):
                try:
                    total = min(total, int((each / name).read_text()))
                except (OSError, ValueError):  # there is none, or it is "max"
                    continue
    return int(total)
