"""Measure the trained and the initial model, or find what an earlier run has measured; a collective of the ranks."""

import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from stages.base import code, publish
from stages.base.command import format_gib
from stages.base.errors import StageError
from stages.base.publish import read_json
from stages.evaluation import generation
from stages.evaluation.request import free_memory, stored_dtype
from stages.forward.distributed import all_reduce_sum, run_on_rank0
from stages.model import headers
from stages.model.files import CONFIG, GENERATION_CONFIG
from stages.ranks.watchdog import Heartbeat
from stages.scoring import harness, tasks
from stages.scoring.packages import VERSION
from stages.scoring.request import Answer, Found, Measured, Measurements, Model, Request
from stages.work import reuse

_MEMORY_SHARE = 0.8
"""Of the free memory, that copies of the weights may take."""
_ANSWERS = TypeAdapter(list[Answer])


def measure(request: Request, heartbeat: Heartbeat, cache: Path) -> Measurements:
    """Ask both models all tasks; a collective.

    Args:
        request: What to measure.
        heartbeat: Of this rank.
        cache: A directory for the data of tasks, as they are now, of this rank.

    Returns:
        What was found, on rank 0; the others have nothing that counts.

    Raises:
        StageError: a task cannot be asked, or a copy of a model does not fit into the memory of a rank.
    """
    heartbeat.note("loading tasks")
    loaded = tasks.load(request.tasks, cache)
    directory = Path(request.trained.directory)
    tokenizer = generation.load_tokenizer(directory)
    if request.chat and not tokenizer.chat_template:
        raise StageError(
            "task_chat is true, and the model has no chat template: set chat_template, or task_chat: false"
        )
    on_gpu = torch.cuda.is_available()
    dtype: torch.dtype = getattr(torch, stored_dtype(directory)) if on_gpu else torch.float32
    store = reuse.Store(Path(request.store), list[Measured])
    eos_token_id = find_eos(directory)
    decides = [
        "score", VERSION, code.digest_with_packages("stages.scoring.harness"), request.tokenizer, request.limit,
        request.chat, str(dtype), on_gpu, eos_token_id,
    ]  # fmt: skip
    num_reused = 0

    def find(model: Model | None) -> dict[str, Found]:
        nonlocal num_reused
        if model is None:
            return {entry: Found([], []) for entry in loaded}
        keys = {entry: publish.sha256_json([*decides, model.digest, loaded[entry].digest]) for entry in loaded}
        found: dict[str, Found] = run_on_rank0(
            lambda: {e: kept for e, key in keys.items() if (kept := fetch(store, key))}
        )
        num_reused += len(found)
        if len(found) < len(keys):
            heartbeat.note("loading the model")
            check_memory(model, dtype)
            network, _ = generation.load(Path(model.directory), dtype)
            asked = harness.SharedModel(network, tokenizer, eos_token_id, heartbeat)
            for entry, key in keys.items():  # in the same order on all ranks
                if entry not in found:
                    found[entry] = harness.ask(asked, entry, loaded[entry], request.limit, request.chat)
                    run_on_rank0(partial(keep, store, key, found[entry]))
        return {entry: found[entry] for entry in keys}

    trained, initial = find(request.trained), find(request.initial)
    return Measurements(trained, initial, num_reused)


def find_eos(directory: Path) -> Any:
    """The tokens that end a text of a model, also one that started from it: turns end with them."""
    path = directory / GENERATION_CONFIG
    return read_json(path if path.is_file() else directory / CONFIG).get("eos_token_id")


def check_memory(model: Model, dtype: torch.dtype) -> None:
    """Raise StageError, on all ranks, where a copy of the weights for each rank does not fit; a collective."""
    stored = headers.read(Path(model.directory), model.weights)
    needed = dtype.itemsize * sum(math.prod(tensor.shape) for tensor in stored.values())
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
    else:
        needed, free = needed * dist.get_world_size(), free_memory()
    (votes,) = all_reduce_sum(needed > _MEMORY_SHARE * free)
    if votes:
        raise StageError(
            f"the weights of {model.directory} need {format_gib(needed)}, and {format_gib(free)} are free: each rank "
            "of score holds all of them, so use fewer ranks (runtime.nproc_per_node), or more memory"
        )


def fetch(store: reuse.Store[list[Measured]], key: str) -> Found | None:
    """What the store has under a key: the numbers, and a file of the answers."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "answers.json")
        measured = store.fetch(key, path)
        return None if measured is None else Found(measured, _ANSWERS.validate_json(path.read_bytes()))


def keep(store: reuse.Store[list[Measured]], key: str, found: Found) -> None:
    """Put it there."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "answers.json")
        path.write_bytes(_ANSWERS.dump_json(found.answers))
        store.put(key, path, publish.sha256_file(path), found.measured)
