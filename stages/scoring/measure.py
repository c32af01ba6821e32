"""Measure the trained and the initial model, or find what an earlier run has measured; a collective of the ranks."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from transformers import PreTrainedModel

from stages.base import code, publish
from stages.base.errors import StageError
from stages.base.publish import read_json
from stages.building import frozen_model
from stages.evaluation import generation
from stages.evaluation.request import computed_dtype, weight_bytes
from stages.evaluation.sharing import must_shard
from stages.forward.attention import activate_kernels
from stages.forward.distributed import run_on_rank0
from stages.model.files import CONFIG, GENERATION_CONFIG
from stages.ranks.process_group import device_mesh
from stages.ranks.watchdog import Heartbeat
from stages.scoring import harness, tasks
from stages.scoring.packages import VERSION
from stages.scoring.request import Answer, Found, Measured, Measurements, Model, Request
from stages.work import reuse

_ANSWERS = TypeAdapter(list[Answer])


def measure(request: Request, heartbeat: Heartbeat, cache: Path, is_sharded: bool | None = None) -> Measurements:
    """Ask both models all tasks; a collective.

    Args:
        request: What to measure.
        heartbeat: Of this rank.
        cache: A directory for the data of tasks, as they are now, of this rank.
        is_sharded: Whether to shard the models over the ranks; None: where copies would not fit into memory.

    Returns:
        What was found, on rank 0; the others have nothing that counts.

    Raises:
        StageError: a task cannot be asked.
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
    activate_kernels(())  # not cuDNN, as each batch has another length
    dtype = computed_dtype(directory)
    store = reuse.Store(Path(request.store), list[Measured])
    eos_token_id = find_eos(directory)
    decides = [
        "score", VERSION, code.digest_with_packages(__name__), request.tokenizer, request.limit,
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
            asked = harness.SharedModel(*load(model, request, dtype, is_sharded), tokenizer, eos_token_id, heartbeat)
            for entry, key in keys.items():  # in the same order on all ranks
                if entry not in found:
                    found[entry] = harness.ask(asked, entry, loaded[entry], request.limit, request.chat)
                    run_on_rank0(partial(keep, store, key, found[entry]))
        return {entry: found[entry] for entry in keys}

    trained, initial = find(request.trained), find(request.initial)
    passages = {}
    for entry, found in trained.items():
        for name, task in loaded[entry].tasks.items():
            rows = [*task.eval_docs]
            passages[name] = [tasks.passage(task, rows[each.row]) for each in found.answers if each.task == name]
    return Measurements(trained, initial, num_reused, passages)


def find_eos(directory: Path) -> Any:
    """The tokens that end a text of a model, also one that started from it: turns end with them."""
    path = directory / GENERATION_CONFIG
    return read_json(path if path.is_file() else directory / CONFIG).get("eos_token_id")


def load(model: Model, request: Request, dtype: torch.dtype, is_sharded: bool | None) -> tuple[PreTrainedModel, bool]:
    """A model, and whether it is sharded, where copies would not fit; a collective."""
    directory = Path(model.directory)
    if is_sharded is None:
        is_sharded = must_shard(weight_bytes(directory, model.weights, dtype))
    if not is_sharded:
        return generation.load(directory, dtype)[0], False
    mesh = device_mesh((1, dist.get_world_size()), request.timeout_minutes)
    return frozen_model.load(directory, model.weights, request.layer_classes, dtype, "plain", mesh), True


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
