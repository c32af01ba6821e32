"""Time steps of the training with one setting after another, or predict their memory; the parent process runs it.

    torchrun --nproc-per-node 1 -m benchmarks.gpu.steps measure JOB.json
    python -m benchmarks.gpu.steps predict JOB.json

It runs the model, the loader and the step of the training in one process, so that a setting costs seconds and not a
launch. Each setting ends with a line `result {...}` of rank 0.
"""

import dataclasses
import gc
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from benchmarks.gpu.results import print_result
from stages.base.packed import TRAIN
from stages.base.params_file import load_params
from stages.building import sharded_model
from stages.building.lora import initialize_adapters
from stages.building.nf4 import Nf4Linear, quantize
from stages.building.sharding import materialize
from stages.building.weights import rebuild_buffers
from stages.forward.attention import activate_kernels
from stages.forward.batch import make_batch
from stages.forward.distributed import all_reduce_sum, device_type
from stages.forward.rows import TokenRows
from stages.launching import flops
from stages.launching.timers import Timers, memory_gib, reset_peak_memory
from stages.model import meta
from stages.model.manifest import ModelManifest
from stages.planning import peak_memory
from stages.ranks import handoff
from stages.ranks.process_group import device_mesh, process_group
from stages.training.environment import set_environment
from stages.training.loader import BatchLoader
from stages.training.optimizer import make_optimizer
from stages.training.params import TrainParams
from stages.training.precision import (
    check_precision,
    make_grad_scaler,
    set_float32_precision,
    use_deterministic_algorithms,
)
from stages.training.step import UnreadStep, train_step

WARM_UP = 3
"""Steps that are not timed: the first ones compile, and set up libraries and the optimizer."""


def main() -> None:
    kind, path = sys.argv[1:]
    job = json.loads(Path(path).read_text())
    if kind == "predict":
        for name, values in job["settings"].items():
            print_result(name, predict(with_settings(values, job["num_ranks"]), job))
        return
    handoff.die_with_torchrun(signal.SIGKILL)  # which starts its ranks in process groups of their own
    params = with_settings(next(iter(job["settings"].values())), job["num_ranks"])
    set_environment(params)  # before a GPU is used
    with process_group(timeout_minutes=10):
        if params.deterministic:  # as are all of this job
            use_deterministic_algorithms()
        for name, values in job["settings"].items():
            result = measure(with_settings(values, job["num_ranks"]), job["steps"])
            if dist.get_rank() == 0:
                print_result(name, result)
            gc.collect()
            torch.compiler.reset()
            torch.cuda.empty_cache()


def with_settings(values: dict[str, Any], num_ranks: int) -> TrainParams:
    """The parameters of the project with those of a setting, and one forward pass per step."""
    params = load_params(TrainParams)
    fsdp = dataclasses.replace(params.fsdp, **values.get("fsdp", {}))
    rows = values["batch_size"] * num_ranks
    return dataclasses.replace(params, **{"document_mask": True, **values, "fsdp": fsdp, "total_batch_size": rows})


def predict(params: TrainParams, job: dict[str, Any]) -> dict[str, Any]:
    """The peak of a step as `plan` computes it, in GiB: that of a GPU where its memory is given."""
    manifest, memory = ModelManifest.read(), job["gpu_memory"]
    chosen, kind = peak_memory.choose(manifest, params), "cuda" if memory else "cpu"
    peak = peak_memory.measure(manifest, chosen, job["num_ranks"], job["seq_length"], kind, device_memory=memory)
    return {"predicted GiB": peak.total / 2**30, "is_upper_bound": peak.is_upper_bound}


@torch.no_grad()
def build_random(manifest: ModelManifest, params: TrainParams, mesh: DeviceMesh) -> PreTrainedModel:
    """The model with random weights as those of a new Llama, made on the GPU: the CPU takes a minute for 8 billion.

    Under adapters, too, whose training wants the weights of files, and quantized where it would quantize those.
    """
    model = sharded_model.prepare(dataclasses.replace(manifest, weights=["made here"]), params, mesh)
    materialize(model, params, mesh)
    rebuild_buffers(model, meta.build(manifest.directory()), params.seed)
    quantized = {module.weight: module for module in model.modules() if isinstance(module, Nf4Linear)}
    for param in model.parameters():
        own = param.to_local() if isinstance(param, DTensor) else param
        if module := quantized.get(param):
            values = torch.empty(len(own), module.in_features, device=own.device).normal_(std=0.02)
            own.copy_(quantize(values).view(own.dtype))
        elif param.dim() > 1:
            own.normal_(std=0.02)
        else:
            own.fill_(1)
    initialize_adapters(model, params.seed)
    return model


def measure(params: TrainParams, num_steps: int) -> dict[str, Any]:
    """Time the steps of a training; numbers by the column of the table, and the losses of all steps."""
    manifest, rows = ModelManifest.read(), TokenRows(TRAIN)
    check_precision(params, rows.seq_length)
    set_float32_precision(params.tf32)
    num_ranks = dist.get_world_size()
    mesh = device_mesh(params.fsdp.mesh_shape(num_ranks, int(os.environ["LOCAL_WORLD_SIZE"])), timeout_minutes=10)
    torch.manual_seed(params.seed)
    on_gpu = device_type() == "cuda"
    # As the training: `sdpa` never calls cuDNN, nor what `varlen` called at the setting before.
    activate_kernels(None if params.attention == "varlen" else ())
    has_to_be_made = not manifest.weights and (on_gpu or params.lora_r)
    build = build_random if has_to_be_made else partial(sharded_model.build, initialize=True)
    model = build(manifest, params, mesh).train()
    optimizer = make_optimizer(model, params)
    scaler = make_grad_scaler(params.precision, next(model.parameters()).device)
    assert manifest.eos_token_id is not None
    loader = BatchLoader(rows, params, manifest.eos_token_id)
    timers = Timers(lambda phase: None)

    unread: deque[UnreadStep] = deque()
    max_unread = 1 if on_gpu else 0
    losses, times = [], [time.perf_counter()]

    def exchange(num_labels: int, max_unread: int) -> int:
        """As the training: one exchange a step, and what a GPU has computed is read when it has the next step to do."""
        step = unread.popleft() if len(unread) > max_unread else None
        num_labels_of_all, loss = all_reduce_sum(num_labels, step.read()[0] if step else 0.0)
        if step:
            losses.append(step.result(loss, None).loss)
            times.append(time.perf_counter())
        return int(num_labels_of_all)

    for step in range(WARM_UP + num_steps):
        batches, num_labels = loader.step_batches(step)
        num_labels_of_all = exchange(num_labels, max_unread)
        if step == WARM_UP:
            reset_peak_memory()
        numbers = train_step(model, optimizer, scaler, batches, num_labels_of_all, params, timers.phase)
        unread.append(UnreadStep(step + 1, num_labels_of_all, numbers))
    while unread:
        exchange(0, max_unread=0)
    peak = memory_gib()[1]

    # For each token the number of tokens that it attends to, itself included.
    batches_timed = (
        make_batch(torch.from_numpy(rows.rows(indices)), manifest.eos_token_id, params.document_mask, lengths=True)
        for step in range(WARM_UP, WARM_UP + num_steps)
        for indices in loader.step_indices(step)
    )
    attended = statistics.mean((batch["position_ids"] + 1).double().mean().item() for batch in batches_timed)
    loader.close()
    seconds = statistics.median(after - before for before, after in itertools.pairwise(times[WARM_UP:]))
    rate = params.total_batch_size * rows.seq_length / seconds
    without, per_token = (flops.flops_per_token(model, length) for length in (0, 1))
    assert without is not None and per_token is not None, "the model is a Llama"

    def mfu(context: float, more: int = 0) -> float | None:
        return flops.utilization(rate, round(without + (per_token - without) * context) + more, params.precision)

    return {
        "ms": 1000 * seconds,
        "tokens/s": rate,
        "MFU": mfu(rows.seq_length),
        "MFU, embeddings too": mfu(rows.seq_length, 6 * manifest.num_parameters - without),
        "MFU, causal": mfu((rows.seq_length + 1) / 2),
        "MFU, unmasked attention only": mfu(attended),
        "peak GiB": peak,
        "first step, s": times[1] - times[0],
        "tokens attended to": attended,
        "losses": losses,
    }


if __name__ == "__main__":
    main()
