"""The line that a training starts with: where it runs, and which of the possible ways it has chosen."""

import os

import psutil
import torch
from torch.distributed.device_mesh import DeviceMesh

from stages.launching.timers import memory_gib
from stages.training.params import TrainParams


def start_line(params: TrainParams, mesh: DeviceMesh) -> str:
    """Describe a training whose model and optimizer are in memory.

    Args:
        params: Those of the training, with the attention and the loss that were chosen.
        mesh: The ranks of each copy of the model are its last axis.
    """
    if torch.cuda.is_available():
        device, total = torch.cuda.get_device_name(), torch.cuda.get_device_properties().total_memory
    else:
        device, total = "CPU", psutil.virtual_memory().total
    num_ranks, size = mesh.size(), mesh.size(mesh.ndim - 1)
    fsdp = params.fsdp.resolved()
    strategy = "none" if num_ranks == 1 else "ddp" if size == 1 else f"fsdp {fsdp.sharding_strategy}"
    if 1 < size < num_ranks:
        strategy += f" in groups of {size}"
    accumulated = params.grad_accum_steps(num_ranks)
    batch = (
        f"{params.total_batch_size} = {num_ranks} ranks x {params.batch_size} rows x {accumulated} accumulation steps"
    )
    if params.attention == "padded":
        batch = f"{params.total_batch_size} rows in passes of up to {params.batch_size} rows"
    chosen = {
        f"precision {params.precision}": True,
        "TF32": params.tf32 and mesh.device_type == "cuda",
        f"attention {params.attention}": True,
        f"loss {params.loss}": True,
        f"strategy {strategy}": True,
        f"batch {batch}": True,
        "CPU offload": fsdp.cpu_offload,
        f"optimizer {params.optimizer}": params.optimizer != "adamw",
        f"activation checkpointing {params.activation_checkpointing}": params.activation_checkpointing != "none",
        "compiled": params.compile,
        "deterministic": params.deterministic,
        f"memory {memory_gib()[0]:.2f} of {total / 2**30:.2f} GiB before the first step": True,
    }
    ranks = f"{num_ranks} ranks" if num_ranks > 1 else "1 rank"
    num_nodes = num_ranks // int(os.environ["LOCAL_WORLD_SIZE"])
    if num_nodes > 1:
        interface = os.environ.get("NCCL_SOCKET_IFNAME" if mesh.device_type == "cuda" else "GLOO_SOCKET_IFNAME")
        ranks += f" on {num_nodes} nodes"
        device += f", network {interface}" if interface else ""
    return f"training with {ranks} ({device}): " + ", ".join(name for name, applies in chosen.items() if applies)
