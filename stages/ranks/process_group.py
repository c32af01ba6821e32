"""The process group of the training: one rank per device, NCCL on GPUs, gloo on CPUs."""

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stages.base.errors import StageError
from stages.forward.distributed import device_type
from stages.ranks.gpus import DEVICES, num_devices


@contextmanager
def process_group(timeout_minutes: float, directory: str | None = None) -> Iterator[None]:
    """Join the process group that the environment describes.

    On one machine all its sockets are bound to the loopback interface, and no name is looked up; on several, those of
    gloo to the interface through which this one reaches the first, and NCCL's to those that it finds.

    Args:
        timeout_minutes: After this time without an answer another rank counts as lost.
        directory: Where the ranks of one machine find each other through a file; None: through a socket of torchrun.
    """
    timeout = timedelta(minutes=timeout_minutes)
    store: dist.Store | None = None  # torch then makes the one that torchrun has put into the environment
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == int(os.environ["LOCAL_WORLD_SIZE"]):  # gloo would ask the nameserver for the name of this machine
        loopback = loopback_interface()
        # To NCCL, a name is the beginning of a name, unless it follows `=`.
        os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
        if directory is not None:
            # A TCPStore would listen on all interfaces, and ask the nameserver for the name of 127.0.0.1.
            store = dist.FileStore(os.path.join(directory, "store"), world_size)
            store.set_timeout(timeout)  # else five minutes, also to wait for a rank that starts later
    elif interface := interface_towards(os.environ["MASTER_ADDR"]):
        # gloo would take the address that the name of this machine has, which may be that of loopback. NCCL finds the
        # interfaces itself: there may be several for data, beside that of the addresses.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if check_devices(int(os.environ["LOCAL_WORLD_SIZE"])):
        device = use_gpu(int(os.environ["LOCAL_RANK"]))
        # gloo beside NCCL: checkpoints and decisions are exchanged on the CPU, where they do not wait for the GPU.
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = None, "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device)
    yield
    # Not after an error: NCCL would wait here for ranks that in turn wait for this one.
    dist.destroy_process_group()


def device_mesh(shape: tuple[int, int], timeout_minutes: float) -> DeviceMesh:
    """The mesh of all ranks; a collective.

    It has one axis, `fsdp`, over which the model is sharded, and before it, where there are several copies of the
    model, the axis `replicate`.

    Args:
        shape: Copies of the model, ranks that share each.
        timeout_minutes: Of its groups.
    """
    copies, size = shape
    # Of a mesh with two axes, fully_shard replicates over the first and shards over the second.
    sizes, names = ((size,), ("fsdp",)) if copies == 1 else (shape, ("replicate", "fsdp"))
    mesh = init_device_mesh(device_type(), sizes, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        _set_timeout(timedelta(minutes=timeout_minutes), group)
    return mesh


def context_group(size: int, timeout_minutes: float) -> dist.ProcessGroup:
    """The `size` consecutive ranks that share each row with this one; a collective of all ranks.

    Args:
        size: A divisor of the ranks of a node.
        timeout_minutes: As for `device_mesh`.
    """
    group, _ = dist.new_subgroups(size, timeout=timedelta(minutes=timeout_minutes))
    assert isinstance(group, dist.ProcessGroup)
    return group


# The groups of a mesh get torch's default of 10 or 30 minutes. Before torch 2.15 it has another name.
_set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


def check_devices(num_ranks: int | None, devices: Path = DEVICES) -> int:
    """The GPUs of this machine that `num_ranks` ranks (None: any number) can use; 0: they train on the CPU.

    Raises:
        StageError: there are fewer GPUs than ranks, or none works of those in `devices` or CUDA_VISIBLE_DEVICES.
    """
    if not torch.cuda.is_available():
        # Whoever hides the GPUs wants to train on the CPU. Otherwise a broken driver would only be noticed by the time.
        # NoDevFiles is what Slurm sets for a job without GPUs.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        has_gpus = num_devices(devices) > 0
        if visible not in ("", "-1", "NoDevFiles") and (visible or has_gpus):
            found = f"CUDA_VISIBLE_DEVICES is {visible}" if visible else "this machine has GPUs"
            if torch.version.cuda is None:
                remedy = "install the CUDA build with `make setup`"
            elif visible:
                remedy = "check with `nvidia-smi -L` that the driver works and has these GPUs"
            else:
                remedy = "check the driver with `nvidia-smi`"
            on_cpu = "to train on the CPU, set the environment variable CUDA_VISIBLE_DEVICES to -1"
            remedies = f"{remedy}; {on_cpu}" if has_gpus else f"{on_cpu}; to train on GPUs, {remedy}"
            raise StageError(f"{found}, but torch {torch.__version__} cannot use a GPU: {remedies}")
        return 0
    num_gpus = torch.cuda.device_count()
    if num_ranks is not None and num_ranks > num_gpus:
        raise StageError(
            f"{num_ranks} ranks need {num_ranks} GPUs, but torch can use {num_gpus} here: set "
            f"runtime.nproc_per_node to {num_gpus} or less, or to null for one rank per GPU"
        )
    return num_gpus


def use_gpu(index: int) -> torch.device:
    """Make a GPU the one of this process, after it has shown that it computes.

    Raises:
        StageError: it does not, for example because torch was built for other GPUs, or another process has locked it.
    """
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)
        torch.ones((), device=device).add_(1).item()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise StageError(
            f"GPU {index} does not work ({reason}): check it with `nvidia-smi`, or leave it out of the environment "
            "variable CUDA_VISIBLE_DEVICES"
        ) from None
    return device


def loopback_interface() -> str:
    # `lo` on Linux; found by its address, because a name that does not exist would be an obscure error of gloo.
    if name := _interface_of("127.0.0.1"):
        return name
    raise StageError("this machine has no loopback interface with the address 127.0.0.1: `ip link set lo up`")


def _interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return str(name)
    return None


def own_address(host: str) -> str:
    """The address that this machine has on the way to `host`; an OSError where there is no way."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of UDP: it chooses the route, and sends nothing
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """The interface through which this machine reaches `host`, or at which it is `host`; None: not to be trusted."""
    try:
        own = own_address(host)
    except OSError:
        return None
    # A name of this machine may have the address of loopback here, and another one on the other machines.
    if ipaddress.ip_address(own).is_loopback and host not in (own, "localhost"):
        return None
    return _interface_of(own)
