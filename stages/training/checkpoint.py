"""Sharded checkpoints: published by rename, verified before they are trusted, never overwritten.

The layout is described in `stages.artifacts.checkpoint`. A save writes into `step-N.tmp`, a directory of its own, and
renames it when its manifest is on the disk: torch's checkpoints, saved over an older one, would be loaded as a mix
after a crash, and they notice no damaged bit.
"""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stages.artifacts import publish
from stages.artifacts.checkpoint import MANIFEST, find
from stages.artifacts.command import StageError
from stages.training import distributed

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    directory: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, state: dict[str, Any],
    history: str, manifest: dict[str, Any],
) -> None:  # fmt: skip
    """Publish the state of all ranks as `directory`, or raise the same `StageError` on all of them.

    Args:
        directory: `.../<run_id>/step-N`.
        state: What `state.json` shall hold, beside the states of the random number generators.
        history: Content of `history.tsv`.
        manifest: What the manifest shall hold, beside the list of files.
    """
    temporary = directory.with_name(directory.name + ".tmp")

    def prepare() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    distributed.from_main(prepare)
    tensors = {"model": _model_state(model), "optimizer": get_optimizer_state_dict(model, optimizer, options=_FLAT)}
    try:
        # One thread a rank: with two, a failed write is reported as a good one.
        writer = dcp.FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True, thread_count=1)
        dcp.save(tensors, storage_writer=writer)
    except CheckpointException as error:
        raise _save_error(directory, error) from None

    # Each rank hashes what it wrote, before rank 0 writes the rest.
    rank = dist.get_rank()
    entries = distributed.on_all(lambda: _entries(sorted(temporary.glob(f"__{rank}_*.distcp"))))
    generators = distributed.on_all(_rng_state)

    def finish() -> None:
        torch.save(scheduler.state_dict(), temporary / "lr_scheduler.pt")
        publish.write_json(temporary / "state.json", {**state, "rng": generators})
        publish.write_text(temporary / "history.tsv", history)
        others = [path for path in temporary.iterdir() if not path.name.endswith(".distcp")]
        files = {name: entry for part in [*entries, _entries(others)] for name, entry in part.items()}
        shapes = {
            name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in tensors["model"].items()
        }
        content = {"format": 1, **manifest, "files": dict(sorted(files.items())), "tensors": shapes}
        publish.write_json(temporary / MANIFEST, content)
        publish.sync_tree(temporary)
        temporary.rename(directory)
        publish.sync_directory(directory.parent)

    distributed.from_main(finish)


def load(directory: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> dict[str, Any]:
    """Fill model, optimizer, scheduler and random number generators from a verified checkpoint; returns its state.

    The number of ranks may be another than that which saved it.
    """
    model_state = _model_state(model)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, storage_reader=dcp.FileSystemReader(directory))
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=_FLAT)
    scheduler.load_state_dict(torch.load(directory / "lr_scheduler.pt", weights_only=True))
    state: dict[str, Any] = publish.read_json(directory / "state.json")
    generators = state.pop("rng")
    if len(generators) == dist.get_world_size():
        _set_rng_state(generators[dist.get_rank()])
    return state


def prune(run_directory: Path, keep: int) -> None:
    """Delete all but the `keep` newest published checkpoints of a run, and what a crash left half-written."""
    for path in find(run_directory)[keep:]:
        # Renamed first: a deletion that is cut short leaves no checkpoint with a manifest and without its files.
        path.rename(path.with_name(path.name + ".tmp"))
    for path in run_directory.glob("step-*.tmp"):
        shutil.rmtree(path)


def _model_state(model: nn.Module) -> dict[str, Any]:
    """Parameters, a tied one once, and the buffers that belong to the state of the model."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def _entries(paths: list[Path]) -> dict[str, dict[str, Any]]:
    return {path.name: {"size": path.stat().st_size, "sha256": publish.sha256_file(path)} for path in paths}


def _rng_state() -> dict[str, Any]:
    """The state of every random number generator of this rank, as JSON."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(state["torch"]))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _save_error(directory: Path, error: CheckpointException) -> StageError:
    rank, (cause, _) = next(iter(error.failures.items()))
    return StageError(f"rank {rank} could not save {directory}: {cause}; the checkpoint before it still stands")
