"""Sharded checkpoints: published by rename, verified before they are trusted, never overwritten.

The layout is described in `stages.artifacts.checkpoint`. A save writes into `step-N.tmp`, a directory of its own, and
renames it when its manifest is on the disk: torch's checkpoints, saved over an older one, would be loaded as a mix
after a crash, and they notice no damaged bit.
"""

import copy
import io
import random
import shutil
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.torch_version import TorchVersion

from stages.artifacts import publish
from stages.artifacts.checkpoint import write_manifest
from stages.artifacts.command import StageError
from stages.training import distributed, retention
from stages.training.optimizer import set_lr
from stages.training.params import TrainRuntime

_STAGER_LASTS = TorchVersion(torch.__version__) >= "2.13"
"""Older ones are closed by their first use."""


class Saver:
    """Publishes the state of all ranks, one checkpoint at a time; a context manager that ends when all is published.

    Asynchronous, training waits only for a copy of the state in memory, which is pinned where there is a GPU and kept
    for the next save. The rest happens in a thread, whose collectives go through a group of their own.
    """

    def __init__(self, runtime: TrainRuntime, asynchronous: bool) -> None:
        self._keep = runtime.keep_checkpoints
        self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=runtime.timeout_minutes))
        cuda = torch.cuda.is_available()
        # A thread begins with the first GPU, whichever is this rank's.
        setup = (torch.cuda.set_device, (torch.cuda.current_device(),)) if cuda else (None, ())
        self._thread = ThreadPoolExecutor(1, "saver", *setup) if asynchronous else None
        if asynchronous:
            # Seconds: after each operation training takes the interpreter back, and would wait 5 ms for it each time.
            sys.setswitchinterval(0.0005)
        self._stager = _new_stager()
        self._pending: Future[None] | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.wait()
        elif self._pending is not None:
            wait([self._pending])

    @property
    def failed(self) -> bool:
        """Whether the save under way has failed, as far as this rank knows."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def wait(self) -> None:
        """Wait until the save under way is published; if it fails, all ranks raise the same `StageError`."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def save(
        self, directory: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, state: dict[str, Any],
        history: str, manifest: dict[str, Any],
    ) -> None:  # fmt: skip
        """Publish the state of all ranks as `directory`, now or by and by, after the save before it.

        Args:
            directory: `.../<run_id>/step-N`.
            model: The weights.
            optimizer: Its state.
            scheduler: Its state.
            state: What `state.json` shall hold, beside the states of the random number generators.
            history: Content of `history.tsv`.
            manifest: What the manifest shall hold, beside the lists of files and tensors.

        Raises:
            StageError: this save, or the one before it, failed; on all ranks alike.
        """
        self.wait()
        # Not its groups: the learning rate is in the scheduler's state, the rest in the parameters of the run.
        optimizer_state = get_optimizer_state_dict(model, optimizer)["state"]
        tensors = {"model": _model_state(model), "optimizer": optimizer_state}
        rest = {"lr_scheduler": copy.deepcopy(scheduler.state_dict()), "state": copy.deepcopy(state),
                "generators": _rng_state(), "history": history, "manifest": copy.deepcopy(manifest)}  # fmt: skip
        if self._thread is None:
            self._publish(directory, tensors, rest)
        else:
            if not _STAGER_LASTS:
                self._stager = _new_stager()
            staged = cast(dict[str, Any], self._stager.stage(tensors))
            self._pending = self._thread.submit(self._publish, directory, staged, rest)

    def _publish(self, directory: Path, tensors: dict[str, Any], rest: dict[str, Any]) -> None:
        temporary = directory.with_name(directory.name + retention.TEMPORARY)

        def prepare() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

        distributed.from_main(prepare, self._group)
        torch.serialization.set_crc32_options(False)  # in this thread; the manifest has the SHA-256 of each file
        try:
            writer = dcp.FileSystemWriter(
                temporary,
                single_file_per_rank=True,
                sync_files=True,
                thread_count=1,  # with two, a failed write is reported as a good one
                # A staged copy is read as it is; by default each tensor would wait for the work of the GPU.
                per_thread_copy_ahead=0 if self._thread else 10_000_000,
            )
            dcp.save(tensors, storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            raise _save_error(directory, error) from None

        # Each rank hashes what it wrote, before rank 0 writes the rest.
        rank = dist.get_rank()
        entries = distributed.on_all(lambda: _entries(sorted(temporary.glob(f"__{rank}_*.distcp"))), self._group)
        generators = distributed.on_all(lambda: rest["generators"], self._group)

        def finish() -> None:
            buffer = io.BytesIO()  # torch, given a path, would not raise OSError
            torch.save(rest["lr_scheduler"], buffer)
            (temporary / "lr_scheduler.pt").write_bytes(buffer.getvalue())
            publish.write_json(temporary / "state.json", {**rest["state"], "rng": generators})
            publish.write_text(temporary / "history.tsv", rest["history"])
            others = [path for path in temporary.iterdir() if not path.name.endswith(".distcp")]
            files = {name: entry for part in [*entries, _entries(others)] for name, entry in part.items()}
            shapes = {
                name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
                for name, tensor in tensors["model"].items()
            }
            content = {"format": 1, **rest["manifest"], "files": dict(sorted(files.items())), "tensors": shapes}
            write_manifest(temporary, content)
            publish.sync_tree(temporary)
            temporary.rename(directory)
            publish.sync_directory(directory.parent)
            retention.prune(directory.parent, self._keep)

        distributed.from_main(finish, self._group)


def load(directory: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> dict[str, Any]:
    """Fill model, optimizer, scheduler and random number generators from a verified checkpoint; returns its state.

    The number of ranks may be another than that which saved it.
    """
    optimizer_state = get_optimizer_state_dict(model, optimizer)
    tensors = {"model": _model_state(model), "optimizer": optimizer_state["state"]}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(directory))
    set_optimizer_state_dict(model, optimizer, optimizer_state)
    scheduler.load_state_dict(torch.load(directory / "lr_scheduler.pt", weights_only=True))
    for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        set_lr(group, lr)
    state: dict[str, Any] = publish.read_json(directory / "state.json")
    generators = state.pop("rng")
    if len(generators) == dist.get_world_size():
        _set_rng_state(generators[dist.get_rank()])
    return state


def _new_stager() -> DefaultStager:
    cuda = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
        )
    )


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
    # After a write that failed, torch's zip writer may only complain of a wrong position in the file.
    hint = "" if isinstance(cause, OSError) else " (is the disk full, or a limit of the file size reached?)"
    return StageError(f"rank {rank} could not save {directory}: {cause}{hint}; the checkpoint before it still stands")
