"""Where a training runs, for its first line and the report, and what of that decides the last bits of its result.

Code, parameters and data name the run. The rest of what decides bits is recorded with each checkpoint, and compared
when a training goes on from it: device, ranks, packages, the attention, the threads of a rank, and some environment
variables.
"""

import dataclasses
import os
import platform
import re
import subprocess
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stages.base.summary import counted
from stages.checkpointing.layout import CheckpointManifest
from stages.checkpointing.run import compare, packages
from stages.checkpointing.state import Place
from stages.forward.attention_choice import AttentionChoice
from stages.forward.distributed import run_on_rank0
from stages.launching.console import print_line
from stages.launching.timers import memory_gib
from stages.training.params import TrainParams

_VARIABLES = re.compile(
    r"ATEN_CPU_CAPABILITY|MKL_(CBWR|ENABLE_INSTRUCTIONS|DEBUG_CPU_TYPE)|OPENBLAS_CORETYPE|NVIDIA_TF32_OVERRIDE|"
    r"(ONEDNN|DNNL)_(MAX_CPU_ISA|DEFAULT_FPMATH_MODE)|CUBLAS_WORKSPACE_CONFIG|TORCH_(ALLOW|BLAS|LINALG|CUDNN|ROCM)_\w+|"
    r"TORCHDYNAMO_\w+|TORCHINDUCTOR_(?!CACHE_DIR|COMPILE_THREADS)\w+|NCCL_(ALGO|PROTO|\w+_ENABLE|M(IN|AX)_NCHANNELS|NTHREADS)"
)
"""Those that choose instructions, kernels, the compiler's optimizations, or the order in which ranks add."""


def find_place(since: int, attention: AttentionChoice) -> Place:
    """That of this launch, which goes on from step `since`, as its rank 0 sees it; the date follows with each save."""
    ranks = dist.get_world_size()
    return Place(
        device=device(),
        ranks=ranks,
        nodes=ranks // int(os.environ["LOCAL_WORLD_SIZE"]),
        commit=_commit(),
        threads=torch.get_num_threads(),
        variables=variables(),
        since=since,
        attention=" ".join((attention.name, *attention.kernels)),
    )


def variables() -> dict[str, str]:
    """The environment variables that are set and may change the last bits of a result."""
    return {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)}


def fix_threads(before: Place | None) -> None:
    """Compute with as many threads as the checkpoint before did, on all ranks alike; a collective.

    At the start of a run, and on another number of ranks, whose bits differ anyway, it is that of OMP_NUM_THREADS,
    which the launcher sets. On GPUs, where it decides no bits, it stays what it is.

    Args:
        before: Of the checkpoint from which the training goes on; None: it starts.
    """
    if torch.cuda.is_available():
        return

    def choose() -> int:
        wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # of the outermost level
        number = int(wanted) if wanted.isdecimal() and int(wanted) else torch.get_num_threads()
        if not (before and before.threads and before.ranks == dist.get_world_size()):
            return number
        if before.threads != number:
            print_line(f"each rank computes with {before.threads} threads, as until now, and not with {number}")
        return before.threads

    torch.set_num_threads(run_on_rank0(choose))  # of MKL too, which would use fewer than OpenMP on few cores


def differences(manifest: CheckpointManifest, before: Place | None, here: Place) -> list[str]:
    """What of the training before a checkpoint would make other bits here, such as `threads: 4 there, 2 here`."""
    if before is None:
        return ["it is not recorded where it was trained"]
    there, ours = (
        {**dataclasses.asdict(dataclasses.replace(place, commit=None, date="", since=0)), "packages": versions}
        for place, versions in ((before, manifest.packages), (here, packages(manifest.identity.params)))
    )
    return [f"{name}: {old} there, {new} here" for name, old, new in compare(there, ours)]


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


def start_line(params: TrainParams, place: Place, mesh: DeviceMesh) -> str:
    """Describe a training whose model and optimizer are in memory.

    Args:
        params: Those of the training, with the attention and the loss that were chosen.
        place: That of this launch.
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
        f"{params.total_batch_size} = {params.describe_ranks(num_ranks)} x {counted(params.batch_size, 'row')} x "
        f"{counted(accumulated, 'accumulation step')}"
    )
    if params.attention == "padded":
        batch = f"{params.total_batch_size} rows in passes of up to {params.batch_size} rows"
    chosen = {
        f"precision {params.precision}": True,
        "TF32": params.tf32 and mesh.device_type == "cuda",
        f"attention {place.attention}": True,
        f"loss {params.loss}": True,
        f"strategy {strategy}": True,
        f"LoRA of rank {params.lora_r}" + " on NF4" * bool(params.lora_base): params.lora_r is not None,
        f"batch {batch}": True,
        "CPU offload": fsdp.cpu_offload,
        f"optimizer {params.optimizer}": params.optimizer != "adamw",
        f"activation checkpointing {params.activation_checkpointing}": params.activation_checkpointing != "none",
        "compiled": params.compile,
        "deterministic": params.deterministic,
        f"memory {memory_gib()[0]:.2f} of {total / 2**30:.2f} GiB before the first step": True,
    }
    ranks = counted(num_ranks, "rank")
    if place.nodes > 1:
        interface = os.environ.get("NCCL_SOCKET_IFNAME" if mesh.device_type == "cuda" else "GLOO_SOCKET_IFNAME")
        ranks += f" on {place.nodes} nodes"
        device += f", network {interface}" if interface else ""
    return f"training with {ranks} ({device}): " + ", ".join(name for name, applies in chosen.items() if applies)
