"""What start, save, resume and export do with many ranks, measured without having them.

A model on the meta device is sharded by the training's own code over a process group that exists in name only, the
`fake` one of torch's own tests. So the plans are real ones. What rank 0 does with the reports of all ranks is done
here, with as many reports; rates (hashing, random numbers) are measured, and the rest is counted.
"""

import hashlib
import math
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from stages.artifacts.garbage import paused_collector
from stages.training import sharding
from stages.training.params import TrainParams
from stages.training.random_weights import fill_rows, record
from stages.training.rng import rng_state
from stages.training.save_plan import Planner, Report, make_metadata
from stages.training.verification import ROUND_BYTES

_FP32 = 4
_ARCHIVE_BYTES = 1100
"""That torch.save adds to a tensor."""


@dataclass(frozen=True)
class Costs:
    """Of one number of ranks. Seconds are of this machine, without network and disks."""

    num_ranks: int
    num_params: int
    model_bytes: int
    """Weights and optimizer state, in fp32."""
    rank_bytes: int
    """Of them, those of each rank."""
    hash_seconds: float
    """Of each rank, for its share of a checkpoint: after a save, and before a resume."""
    hash_rounds: int
    """After each, the ranks meet, so that none looks like one that hangs."""
    random_seconds: float
    """Of each rank, for its rows of random weights."""
    plan_seconds: float
    """Of each rank, for the plan of its part of a checkpoint."""
    report_bytes: int
    """That rank 0 receives about files, at the first save."""
    metadata_seconds: float
    """Of rank 0 alone, at the first save: to make `.metadata`. Later ones write it again."""
    metadata_bytes: int
    rng_bytes: int
    """That rank 0 receives at each save: random number generators."""
    model_files: int
    """Of a checkpoint; `consolidate` opens each once."""
    files: int
    """With those of rank 0."""
    read_metadata_seconds: float
    """Of each rank, to resume: to read `.metadata`."""
    load_plan_seconds: float
    """Of each rank, to resume: to find its rows in it."""
    export_reads: int
    """Parts of tensors that `consolidate` reads."""
    step_bytes: int = 5 * 8
    """Of the one collective of numbers in a step."""
    save_collectives: tuple[int, int] = (15, 6)
    """In the first save, or each where they are synchronous, and in later ones."""


def llama(num_params: float) -> LlamaConfig:
    """A Llama of about as many parameters, with the proportions and the vocabulary of those of Meta."""
    candidates = (
        LlamaConfig(
            vocab_size=128256, hidden_size=size, intermediate_size=size * 7 // 2, num_hidden_layers=max(2, size // 102),
            num_attention_heads=size // 128, num_key_value_heads=max(1, size // 1024), tie_word_embeddings=False,
        )
        for size in range(256, 32768, 256)
    )  # fmt: skip
    return min(candidates, key=lambda config: abs(_num_params(config) - num_params))


def _num_params(config: LlamaConfig) -> int:
    size, kv = config.hidden_size, (config.num_key_value_heads or 1) * 128
    layer = 2 * size * size + 2 * size * kv + 3 * size * config.intermediate_size + 2 * size
    return int(2 * config.vocab_size * size + config.num_hidden_layers * layer + size)


@contextmanager
def fake_group(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """A process group of which this process is one rank, and the others do not exist; its collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def plan_of(config: LlamaConfig, params: TrainParams, num_ranks: int, rank: int = 0) -> tuple[Planner, float]:
    """The plan of a rank for a checkpoint, and the seconds that it needed."""
    with fake_group(num_ranks, rank):
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("fsdp",))
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        sharding.shard(model, ["LlamaDecoderLayer"], params, mesh)
        weights = dict(model.named_parameters())
        state = {
            name: {"step": torch.zeros(()), "exp_avg": torch.empty_like(param), "exp_avg_sq": torch.empty_like(param)}
            for name, param in weights.items()
        }
        planner = Planner()
        start = time.process_time()
        planner.set_up_planner({"model": weights, "optimizer": state}, None, rank == 0)
        planner.create_local_plan()
        return planner, time.process_time() - start


def reports_of(items: list[WriteItem], num_ranks: int) -> list[Report]:
    """What the ranks would report of their files, where each tensor is sharded over all of them."""
    rows: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    places = [0] * num_ranks
    num_plain = 0
    for number, item in enumerate(items):
        assert item.tensor_data is not None
        size = item.tensor_data.size
        if not size:  # all ranks have it: they write such in turn
            parts = [(num_plain % num_ranks, 0, 1)]
            num_plain += 1
        else:
            part = -(-size[0] // num_ranks)
            parts = [(n, first, min(part, size[0] - first)) for n, first in enumerate(range(0, size[0], part))]
        for rank, first, count in parts:
            num_bytes = count * math.prod(size[1:]) * _FP32 + _ARCHIVE_BYTES
            rows[rank].append((number, first, count, places[rank], num_bytes))
            places[rank] += num_bytes
    return [np.array(part, np.int64).reshape(-1, 5) for part in rows]


@dataclass(frozen=True)
class Rates:
    """What one core of this machine does; to be measured once, so that numbers of ranks can be compared."""

    seconds_per_hashed_byte: float
    seconds_per_random_number: float


def measure(config: LlamaConfig, params: TrainParams, rates: Rates, num_ranks: int) -> Costs:
    """Measure and count what a training of a model costs with a number of ranks."""
    planner, plan_seconds = plan_of(config, params, num_ranks)
    items = planner.items
    reports = reports_of(items, num_ranks)
    num_bytes = sum(item.tensor_data.size.numel() * _FP32 for item in items if item.tensor_data)
    rank_bytes = -(-num_bytes // num_ranks)
    with paused_collector():
        metadata, make_seconds = _timed(lambda: make_metadata(items, reports))
        metadata.planner_data = planner.mappings
        content, pickle_seconds = _timed(lambda: pickle.dumps(metadata))
        read, read_seconds = _timed(lambda: pickle.loads(content))
    with fake_group(num_ranks), paused_collector():
        _, load_plan_seconds = _timed(lambda: create_default_local_load_plan(planner.state_dict, read))
    weights = [item for item in items if item.index.fqn.startswith("model.")]
    reads = sum(len(read.state_dict_metadata[item.index.fqn].chunks) for item in weights)
    return Costs(
        num_ranks=num_ranks,
        num_params=_num_params(config),
        model_bytes=num_bytes,
        rank_bytes=rank_bytes,
        hash_seconds=rank_bytes * rates.seconds_per_hashed_byte,
        hash_rounds=-(-rank_bytes // ROUND_BYTES),
        random_seconds=_num_params(config) / num_ranks * rates.seconds_per_random_number,
        plan_seconds=plan_seconds,
        report_bytes=sum(len(pickle.dumps(report)) for report in reports),
        metadata_seconds=make_seconds + pickle_seconds,
        metadata_bytes=len(content),
        rng_bytes=num_ranks * len(pickle.dumps(rng_state())),
        model_files=sum(bool((report[:, 0] < len(weights)).any()) for report in reports),
        files=2 * num_ranks + 6,  # .metadata, lr_scheduler.pt, state.json, history.tsv, speed.tsv, manifest.json
        read_metadata_seconds=read_seconds,
        load_plan_seconds=load_plan_seconds,
        export_reads=reads,
    )


def measure_rates() -> Rates:
    """Measure what one core of this machine does."""
    return Rates(_seconds_per_hashed_byte(), _seconds_per_random_number())


def _seconds_per_hashed_byte() -> float:
    content = bytes(32 << 20)
    return _timed(lambda: hashlib.sha256(content).digest())[1] / len(content)


def _seconds_per_random_number() -> float:
    config = LlamaConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=8
    )
    with torch.device("meta"):
        operations = record(LlamaForCausalLM(config))["model.embed_tokens.weight"]
    values = torch.empty(1024, 1024)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = _timed(lambda: fill_rows(values, 0, values.shape, operations, "seed"))[1]
    torch.set_num_threads(threads)
    return seconds / values.numel()


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    # Of the CPU: the figures are also right on a machine that is busy.
    start = time.process_time()
    result = function()
    return result, time.process_time() - start
