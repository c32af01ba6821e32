"""What the operating system, or a container or job, allows: shared memory, limits of processes, memory."""

import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from stages.artifacts.command import format_gib
from stages.checks.findings import Finding, error, ok, warning

_GIB = 2**30


def check_shared_memory(path: Path = Path("/dev/shm"), wanted: int = _GIB) -> Iterator[Finding]:
    """/dev/shm, in which the ranks of NCCL on one node exchange tensors; containers often have 64 MiB of it."""
    if not path.is_dir():
        yield error(f"{path} is missing", f"`mount -t tmpfs tmpfs {path}`")
        return
    free = shutil.disk_usage(path).free
    if free < wanted:
        yield warning(
            f"{path} has {format_gib(free)} free, and NCCL may need {format_gib(wanted)}",
            "remove what others have left in it, or start the container with --shm-size=8g or --ipc=host",
        )
    else:
        yield ok(f"{path} has {format_gib(free)} free")


def check_limits(
    checkpoint_bytes: int | None = None,
    limits: Callable[[int], tuple[int, int]] = resource.getrlimit,
    infiniband: Path = Path("/sys/class/infiniband"),
) -> Iterator[Finding]:
    """The limits of this process (`ulimit`), which what it starts inherits.

    Args:
        checkpoint_bytes: Of a checkpoint; None where there is no plan.
        limits: The soft and the hard limit of a resource.
        infiniband: A directory of its adapters, which use locked memory.
    """
    has_infiniband = infiniband.is_dir() and any(infiniband.iterdir())
    found = []
    for option, number, needed, name in (
        ("-n", resource.RLIMIT_NOFILE, 4096, "open files"),
        ("-u", resource.RLIMIT_NPROC, 4096, "processes and threads of the user"),
        ("-f", resource.RLIMIT_FSIZE, checkpoint_bytes or 0, "bytes of a file"),
        ("-v", resource.RLIMIT_AS, None, "bytes of addresses, of which CUDA reserves many times its memory"),
        *([("-l", resource.RLIMIT_MEMLOCK, None, "bytes of locked memory, which InfiniBand needs")] * has_infiniband),
    ):
        soft, hard = limits(number)
        if soft == resource.RLIM_INFINITY or (needed is not None and soft >= needed):
            found.append(name.partition(",")[0])
            continue
        wanted = "unlimited" if needed is None or option == "-f" else str(needed)
        can_raise = hard == resource.RLIM_INFINITY or (wanted.isdecimal() and hard >= int(wanted))
        remedy = f"`ulimit {option} {wanted}`" + (
            "" if can_raise else " by the administrator (limits.conf, or LimitNOFILE and the like of slurmd)"
        )
        # A limit on addresses does not stop a training on CPUs, and few files are enough for a small one.
        is_error = option in ("-f", "-l") or soft < 1024
        yield (error if is_error else warning)(f"the limit is {soft:,} {name}", remedy)
    if found:
        yield ok(f"the limits are high enough: {', '.join(found)}")


def check_memory(needed: int, total: int) -> Iterator[Finding]:
    """What the plan needs of the memory of this machine, or of its job, both in bytes."""
    what = f"the ranks of this machine need {format_gib(needed)} of its {format_gib(total)} of memory"
    remedy = (
        "fewer ranks on each node (runtime.nproc_per_node), a smaller batch_size, runtime.async_checkpoint: false, or "
        "more memory for the job (`sbatch --mem=0`)"
    )
    if needed > total:
        yield error(what, remedy)
    elif needed > 0.9 * total:
        yield warning(what, remedy)
    else:
        yield ok(what)
