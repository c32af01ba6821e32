"""GPUs, their driver, the build of torch, and how ranks exchange tensors."""

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from stages.artifacts.command import format_gib
from stages.artifacts.errors import StageError
from stages.checks.findings import Finding, error, ok, warning
from stages.training.devices import DEVICES, num_devices
from stages.training.distributed import check_devices, interface_towards, loopback_interface, use_gpu
from stages.training.memory_plan import USABLE, PeakMemory


def check_gpus(nproc_per_node: int | None, devices: Path = DEVICES) -> Iterator[Finding]:
    """The build of torch, and each GPU: it must compute."""
    build = f"torch {torch.__version__}"
    if num_usable := check_devices(nproc_per_node, devices):
        names = {torch.cuda.get_device_name(index) for index in range(num_usable)}
        for index in range(num_usable):
            use_gpu(index)
        yield ok(f"{build} computes on {num_usable} GPUs ({', '.join(sorted(names))})")
    elif num_found := num_devices(devices):  # `check_devices` accepts that only where somebody has hidden them
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        yield warning(
            f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides {num_found} GPUs",
            "unset it to train on them; in a job of Slurm, ask for GPUs (--gpus-per-node)",
        )
    elif torch.version.cuda is not None:
        yield warning(
            f"{build} is a CUDA build, and this machine has no GPU",
            "here it trains on CPUs; for GPUs, run the doctor on their node (`srun --gpus=1 make doctor`)",
        )
    else:
        yield ok(f"{build} is the CPU build, and this machine has no GPU: it trains on CPUs")


def find_driver() -> int | None:
    """The newest CUDA that the driver supports, as in 12080 for 12.8; None: there is no library of a driver."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else number.value


def check_driver(
    devices: Path = DEVICES, build: str | None = torch.version.cuda, driver: Callable[[], int | None] = find_driver
) -> Iterator[Finding]:
    """Whether the driver of the GPUs can run what torch was built with."""
    if not num_devices(devices) or build is None:
        return
    found = driver()
    if found is None:
        yield error(
            "this machine has GPUs, but libcuda.so.1 of their driver cannot be loaded",
            "install the driver; in a container, start it with GPUs (apptainer --nv, docker --gpus all)",
        )
    # Within a major version of CUDA, an older driver runs what was built with a newer minor version.
    elif found // 1000 < int(build.partition(".")[0]):
        yield error(
            f"the driver supports CUDA {found // 1000}.{found % 1000 // 10}, and torch was built with CUDA {build}",
            "update the driver, or install a torch for the older CUDA",
        )
    else:
        yield ok(f"the driver supports CUDA {found // 1000}.{found % 1000 // 10}; torch was built with {build}")


def usable_memory() -> list[int]:
    """Bytes of memory of each GPU that torch can use; none where one does not work, which `check_gpus` reports."""
    try:
        return [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    except RuntimeError:
        return []


def check_memory(peak: PeakMemory, memory: int) -> Iterator[Finding]:
    """What the plan needs of each GPU, compared with the `memory` in bytes of the smallest."""
    what = f"each rank needs {peak.total / 2**30:.3f} of the {format_gib(memory)} of a GPU"
    remedy = "`python -m stages.plan` prints which batch_size and activation_checkpointing fit"
    if peak.total > memory and not peak.is_upper_bound:
        yield error(what, remedy)
    elif peak.total > USABLE * memory:
        yield warning(what, remedy)
    else:
        yield ok(what)


def check_backends(needs_nccl: bool, available: Mapping[str, Callable[[], bool]] | None = None) -> Iterator[Finding]:
    """Whether torch has what exchanges tensors: gloo, and NCCL for GPUs."""
    available = available or {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    needed = ["gloo", "nccl"] if needs_nccl else ["gloo"]
    if missing := [name for name in needed if not available[name]()]:
        yield error(
            f"torch {torch.__version__} has no {' and no '.join(missing)}", "install the lock with `make setup`"
        )
    else:
        version = f" {'.'.join(map(str, torch.cuda.nccl.version()))}" if needs_nccl else ""
        yield ok(f"torch has {' and '.join(needed)}{version}")


def check_interface(num_nodes: int, needs_nccl: bool, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the network interface exists and is up through which ranks reach each other, as the training chooses it.

    Args:
        num_nodes: On one node the training always uses loopback.
        needs_nccl: Whether there are GPUs.
        environment: With GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and the address of the launcher's node.
    """
    loopback = loopback_interface()
    interfaces = psutil.net_if_stats()
    listed = f"the interfaces here are {', '.join(sorted(interfaces))}"
    if num_nodes == 1:
        chosen = [loopback]
    else:
        nccl, gloo = environment.get("NCCL_SOCKET_IFNAME"), environment.get("GLOO_SOCKET_IFNAME")
        if needs_nccl and nccl and not _matches_nccl(nccl, list(interfaces)):
            yield error(
                f"NCCL_SOCKET_IFNAME is {nccl!r}, which matches no interface", f"{listed}; unset it or name one"
            )
        found = gloo or interface_towards(environment.get("SLURM_LAUNCH_NODE_IPADDR", ""))
        if not found:
            yield error(
                "no interface towards the node of the launcher was found",
                f"set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to one that all nodes share; {listed}",
            )
            return
        chosen = found.split(",")  # gloo uses all of them
        if loopback in chosen:
            name = "GLOO_SOCKET_IFNAME names" if gloo else "the interface towards the launcher is"
            yield error(f"{name} {loopback}, which other nodes do not reach", f"set it to another one; {listed}")
            return
    for name in chosen:
        if name not in interfaces:
            yield error(
                f"GLOO_SOCKET_IFNAME names {name!r}, which does not exist", f"{listed}; unset it or name one of them"
            )
        elif not interfaces[name].isup:
            yield error(f"the interface {name} is down", f"`ip link set {name} up`")
        else:
            _open_gloo(name)
            yield ok(f"ranks reach each other through {name}")


def _matches_nccl(pattern: str, names: list[str]) -> bool:
    """Whether one of the interfaces is among those that NCCL_SOCKET_IFNAME selects.

    That is a list of prefixes, after `=` of whole names, after `^` or `^=` of those that are not to be used.
    """
    is_negated, pattern = pattern.startswith("^"), pattern.removeprefix("^")
    is_exact, parts = pattern.startswith("="), tuple(pattern.removeprefix("=").split(","))
    return any((name in parts if is_exact else name.startswith(parts)) != is_negated for name in names)


def _open_gloo(interface: str) -> None:
    try:
        dist.ProcessGroupGloo.create_device(interface=interface)  # binds to its address
    except RuntimeError as problem:
        reason = " ".join(str(problem).split())[-200:]
        raise StageError(
            f"gloo cannot use the interface {interface} ({reason}): give it an address, or name another one in "
            "GLOO_SOCKET_IFNAME"
        ) from None
