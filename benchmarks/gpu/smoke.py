"""Whether a machine can train at all: device, allocator, communication, one step; the parent process runs it.

    torchrun --nproc-per-node 1 -m benchmarks.gpu.smoke JOB.json

It needs torch and transformers, and no other package. Each check ends with a line `result {...}` of rank 0.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.results import Row, print_result
from benchmarks.train.job import BETAS, LR, llama
from stages.forward import attention
from stages.forward.batch import make_batch
from stages.forward.loss import fuse, loss_sum
from stages.forward.transfer import to_device
from stages.launching import flops
from stages.ranks import handoff

_DOCUMENT = 600
"""Tokens of a document, on average."""
_WARM_UP, _STEPS = 2, 4


def main() -> None:
    handoff.die_with_torchrun(signal.SIGKILL)
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # before a GPU is used
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    for name in job["settings"]:
        result = CHECKS[name](device, job)
        if int(os.environ["RANK"]) == 0:
            print_result(name, result)


def products(device: torch.device, job: Any) -> Row:
    """Matrix products in bf16, and copies."""
    size = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return {
        "TFLOP/s": 2 * size**3 / _seconds(lambda: left @ right) / 1e12,
        "GB/s": 2 * left.nbytes / _seconds(left.clone) / 1e9,
    }


def allocator(device: torch.device, job: Any) -> Row:
    """Most of the memory, where blocks of other sizes were freed: segments that can grow leave no holes."""
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 2**26
    blocks = [torch.empty(free // 10, dtype=torch.uint8, device=device) for _ in range(8)]
    del blocks[::2]
    blocks.append(torch.empty(free // 2, dtype=torch.uint8, device=device).zero_())
    del blocks
    if device.type != "cuda":
        return {"peak GiB": 0.9 * free / 2**30}
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    return {"peak GiB": peak / 2**30}


def communication(device: torch.device, job: Any) -> Row:
    """A sum over all ranks, by NCCL or gloo."""
    on_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        values = torch.ones(2**26 if on_gpu else 2**18, device=device)
        dist.all_reduce(values)
        assert values.eq(dist.get_world_size()).all(), "a sum over all ranks is wrong"
        return {"GB/s": values.nbytes / _seconds(lambda: dist.all_reduce(values)) / 1e9}
    finally:
        dist.destroy_process_group()


def step(device: torch.device, job: Any) -> Row:
    """Steps of each rank for itself, with weights in the precision of the computation."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if job["precision"] == "bf16" else torch.float32
    config = AutoConfig.for_model("llama", **llama(job["shape"], job["seq_length"]))
    attention.activate_kernels()
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="varlen")
    fuse(model)
    rows = torch.randint(1, config.vocab_size, (job["batch_size"], job["seq_length"]))
    rows[torch.rand(rows.shape) < 1 / _DOCUMENT] = 0
    batch = to_device(make_batch(rows, 0, document_mask=True, lengths=True), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, fused=device.type == "cuda")

    def one() -> None:
        (loss_sum(model, batch) / rows.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = _seconds(one)
    assert all(param.isfinite().all() for param in model.parameters()), "the weights are not finite after some steps"
    rate = rows.numel() / seconds
    result: Row = {"ms": 1000 * seconds, "tokens/s": rate}
    if device.type == "cuda":
        peak = flops.peak_flops(torch.cuda.get_device_name(), job["precision"])
        per_token = flops.flops_per_token(model, job["seq_length"])
        result["MFU"] = rate * per_token / peak if peak and per_token else None
        result["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def _seconds(compute: Callable[[], object]) -> float:
    """Of one call."""
    start = 0.0
    for number in range(_WARM_UP + _STEPS):
        if number == _WARM_UP:
            _synchronize()
            start = time.perf_counter()
        compute()
    _synchronize()
    return (time.perf_counter() - start) / _STEPS


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


CHECKS = {"products": products, "allocator": allocator, "communication": communication, "one step": step}

if __name__ == "__main__":
    main()
