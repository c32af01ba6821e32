"""GPUs, and what a training needs of them and of the memory of this machine."""

import os
import tempfile
from pathlib import Path

import torch

from stages.base import outputs
from stages.base.command import format_gib
from stages.checks.findings import Found, error, ok, warning
from stages.forward.distributed import device_type
from stages.forward.document_mask import choose_attention
from stages.forward.loss_probe import choose_loss
from stages.launching.runtime import TrainRuntime
from stages.model.manifest import ModelManifest
from stages.plan import SLOW_FP32, Plan
from stages.planning.memory_plan import USABLE, check_fits
from stages.ranks.gpus import DEVICES, num_devices
from stages.ranks.memory import memory_limit
from stages.ranks.process_group import check_devices, use_gpu
from stages.ranks.torch_errors import explain_torch_errors
from stages.training.params import TrainParams
from stages.training.precision import check_precision, compute_dtype


def check_gpus(nproc_per_node: int | None, devices: Path = DEVICES) -> Found[None]:
    """The build of torch, and each GPU: it must compute."""
    build = f"torch {torch.__version__}"
    num_usable = check_devices(nproc_per_node, devices)
    for index in range(num_usable):
        use_gpu(index)
    if num_usable:
        names = {torch.cuda.get_device_name(index) for index in range(num_usable)}
        yield ok(f"{build} computes on {num_usable} GPUs ({', '.join(sorted(names))})")
    elif torch.version.cuda is None and not num_devices(devices):
        yield ok(f"{build} is the CPU build, and this machine has no GPU: it trains on CPUs")
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        yield warning(
            f"{build} finds no GPU, of {num_devices(devices)} (CUDA_VISIBLE_DEVICES is {visible!r}): it trains on CPUs",
            "for GPUs, run the doctor on their node (`srun --gpus=1 make doctor`), without that variable",
        )


def num_gpus() -> int:
    """Those that torch can use."""
    return torch.cuda.device_count()


def check_training(params: TrainParams, seq_length: int, model: ModelManifest) -> Found[None]:
    """What a rank refuses on this machine, of what params.yaml names; `auto` is decided by the training."""
    check_precision(params, seq_length)
    dtype, directory = compute_dtype(params.precision), model.directory()
    if params.attention != "auto":
        choose_attention(params.attention, directory, params.document_mask, seq_length, dtype, device_type())
    if params.loss != "auto":
        choose_loss(params.loss, directory)
    if params.compile:
        yield from check_compiler()
    yield ok(f"precision {params.precision}, attention {params.attention} and loss {params.loss} work here")
    if params.precision == "fp32" and device_type() == "cuda":
        yield warning(SLOW_FP32, "set precision to bf16")


def check_compiler() -> Found[None]:
    """Compile a small function, in an empty cache: what is already compiled needs no compiler."""
    compiled = torch.compile(lambda x: x.sin() + 1, fullgraph=True)
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory() as cache, explain_torch_errors("the doctor", "end other processes"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        try:
            compiled(torch.ones(8, device=device_type()))
        finally:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            if before is not None:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
    yield ok("the compiler of torch works here")


def check_memory(plan: Plan, params: TrainParams, runtime: TrainRuntime, num_ranks: int, num_nodes: int) -> Found[None]:
    """What the plan needs of GPUs and CPUs, if it is of as many ranks as a launch here starts, on so many nodes."""
    peak = plan.peak
    if num_ranks != plan.num_ranks or peak is None:
        yield warning(
            f"{outputs.PLAN} has the memory of {plan.num_ranks if peak else 'no'} ranks, and a launch here starts "
            f"{num_ranks}",
            f"set plan.num_ranks to {num_ranks}",
        )
        return
    local = num_ranks // num_nodes
    if params.fsdp.mesh_shape(num_ranks, local) != params.fsdp.mesh_shape(num_ranks, num_ranks):
        yield warning(
            f"{outputs.PLAN} has the memory of ranks on one node, and HYBRID_SHARD shards the model over those of each",
            f"set fsdp.size to {local}",
        )
        return
    on_cpu = peak.staging * runtime.async_checkpoint
    if params.fsdp.resolved().cpu_offload:
        on_cpu += peak.weights + peak.gradients + peak.optimizer
    if num_gpus():
        memory = min(torch.cuda.get_device_properties(index).total_memory for index in range(num_gpus()))
        check_fits(peak, plan.peaks or {}, memory, "of this machine")
        what = f"each rank needs {format_gib(peak.total)} of the {format_gib(memory)} of a GPU"
        if peak.total > USABLE * memory:
            yield warning(what, "`python -m stages.plan` prints which batch_size and activation_checkpointing fit")
        else:
            yield ok(what)
    else:
        on_cpu += peak.total
    needed, total = local * on_cpu, memory_limit()
    what = f"the ranks of this machine need {format_gib(needed)} of its {format_gib(total)} of memory"
    if needed > USABLE * total:
        yield (error if needed > total else warning)(
            what,
            "fewer ranks on each node (runtime.nproc_per_node), a smaller batch_size, runtime.async_checkpoint: false, "
            "or more memory for the job (`sbatch --mem=0`)",
        )
    else:
        yield ok(what)
