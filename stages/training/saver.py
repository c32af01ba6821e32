"""Saving and loading sharded checkpoints: published by rename, verified before they are trusted, never overwritten.

The layout is described in stages/checkpointing/layout.py. A save writes into `step-N.tmp`, a new directory, and renames
it once its manifest is on the disk. torch.distributed.checkpoint alone gives no such guarantee: saved over an older
checkpoint and interrupted, it loads as a mix of both, and it does not notice a flipped bit.
"""

import copy
import dataclasses
import io
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stages.artifacts import publish
from stages.artifacts.errors import StageError, Unavailable, naming
from stages.artifacts.garbage import paused_collector
from stages.artifacts.record import FileEntry
from stages.artifacts.shared_disk import MAY_PASS, refresh, wait_for_file
from stages.checkpointing import retention
from stages.checkpointing.layout import SCHEDULER, CheckpointManifest, TensorEntry
from stages.training.console import print_line
from stages.training.distributed import gather_on_rank0, run_on_all_ranks, run_on_rank0
from stages.training.optimizer import set_lr
from stages.training.params import TrainRuntime
from stages.training.rng import rng_state, set_rng_state
from stages.training.save_plan import PARTS, Planner, Writer, file_name
from stages.training.shard_file import ShardFile
from stages.training.state import STATE, TrainState

_SWITCH_INTERVAL = 0.0005
"""Seconds after which the interpreter passes from the thread that saves to the one that trains; by default 5 ms, which
the training would wait after each of its operations while a checkpoint is being written."""


_SHARED_SECONDS = 60
"""After so long at most, NFS shows a node what another one has written."""


class _Small(NamedTuple):
    """What a checkpoint contains beside tensors; immutable, or a copy."""

    lr_scheduler: dict[str, Any]
    state: TrainState
    rng: dict[str, Any]
    """Of this rank."""
    tables: dict[str, str]
    manifest: CheckpointManifest


class Saver:
    """Publishes the state of all ranks, one checkpoint at a time; a context manager that exits when all is published.

    Asynchronous saves exchange memory for time: training waits only for a copy of the state in CPU memory
    (stages/training/shard_file.py), which is kept for the next save. The rest happens in a thread that hardly uses the
    interpreter; docs/benchmarks.md has what it costs. The collectives of the thread use a process group of their own:
    the collectives of one group must come in the same order on all ranks, and the thread runs in no order with the
    training.
    """

    def __init__(self, runtime: TrainRuntime, confirm_lock: Callable[[], None] = lambda: None) -> None:
        """A collective.

        Args:
            runtime: When and how to save.
            confirm_lock: Raises an error where the lock of the run's directory is lost; called on rank 0.
        """
        self._keep, self._confirm_lock = runtime.keep_checkpoints, confirm_lock
        # The same on all ranks, and soon over, as nothing is noted for the watchdog meanwhile.
        self._pauses = [*_pauses(60 * runtime.timeout_minutes / 4)]
        # A collective itself: every rank must create its groups in the same order.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=runtime.timeout_minutes))
        cuda = torch.cuda.is_available()
        # A new thread uses the first GPU, whichever is this rank's.
        setup = (torch.cuda.set_device, (torch.cuda.current_device(),)) if cuda else (None, ())
        self._thread = ThreadPoolExecutor(1, "saver", *setup) if runtime.async_checkpoint else None
        self._shard_file: ShardFile | None = None  # in asynchronous mode, from the first save on
        self._writer = Writer("", sync_files=True)  # in synchronous mode; it keeps `.metadata` for the next save
        self._pending: Future[None] | None = None
        self._switch_interval = sys.getswitchinterval()

    def __enter__(self) -> "Saver":
        if self._thread is not None:
            sys.setswitchinterval(_SWITCH_INTERVAL)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self.wait()
            elif self._pending is not None:
                wait([self._pending])  # the training failed; the checkpoint from before is still worth having
        finally:
            sys.setswitchinterval(self._switch_interval)

    @property
    def failed(self) -> bool:
        """Whether the pending save has failed, as far as this rank knows."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def wait(self) -> None:
        """Wait until the pending save is published; if it fails, all ranks raise the same `StageError`."""
        pending, self._pending = self._pending, None  # first, so that a failure is raised once
        if pending is not None:
            pending.result()

    def save(
        self, directory: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, state: TrainState,
        tables: dict[str, str], manifest: CheckpointManifest,
    ) -> None:  # fmt: skip
        """Publish the state of all ranks as `directory`, now or in the background, after the save before it.

        Args:
            directory: `.../<run_id>/step-N`.
            model: Its parameters and persistent buffers are saved.
            optimizer: Its state is saved.
            scheduler: Its state is saved.
            state: Its `rng` is filled in here.
            tables: Content of `history.tsv` and `speed.tsv`, by their names.
            manifest: Its `files` and `tensors` are filled in here.

        Raises:
            StageError: this save, or the one before it, failed; on all ranks alike.
        """
        self.wait()
        model_state = _model_state(model)
        shapes = {
            name: TensorEntry(list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in model_state.items()
        }
        manifest = dataclasses.replace(manifest, tensors=shapes)
        tensors = {"model": model_state, "optimizer": _optimizer_state(model, optimizer)}
        # Now, not in the thread: by then the training has drawn more random numbers and changed the scheduler.
        small = _Small(copy.deepcopy(scheduler.state_dict()), state, rng_state(), tables, manifest)
        if self._thread is None:
            self._publish(directory, tensors, small)
        else:
            self._pending = self._thread.submit(self._publish, directory, self._copy(directory, tensors), small)

    def _copy(self, directory: Path, tensors: dict[str, Any]) -> ShardFile:
        torch.serialization.set_crc32_options(False)  # of this thread; the manifest has the SHA-256 of each file
        if self._shard_file is not None:
            self._shard_file.fill(tensors)
            return self._shard_file
        try:
            self._shard_file = ShardFile(directory.parent, tensors, self._group)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise StageError(
                f"rank {rank} could not copy the weights and the optimizer state for an asynchronous save: {cause!r}; "
                "set runtime.async_checkpoint to false, which needs no copy"
            ) from None
        return self._shard_file

    def _publish(self, directory: Path, tensors: dict[str, Any] | ShardFile, small: _Small) -> None:
        """Publish a checkpoint, again where the file system fails in a way that may pass."""
        for pause in self._pauses:
            try:
                return self._publish_once(directory, tensors, small)
            except Unavailable as error:  # on all ranks alike
                if dist.get_rank() == 0:
                    print_line(f"{directory.name} is not saved yet: {error}; trying again in {pause:.0f} s")
                time.sleep(pause)
        self._publish_once(directory, tensors, small)

    def _publish_once(self, directory: Path, tensors: dict[str, Any] | ShardFile, small: _Small) -> None:
        temporary = directory.with_name(directory.name + retention.TEMPORARY)

        def prepare() -> bool:
            self._confirm_lock()
            if directory.exists():  # renamed at the last try, which failed after that
                publish.sync_directory(directory.parent)
                return True
            shutil.rmtree(temporary, ignore_errors=True)  # a crash at this step may have left files of more ranks
            temporary.mkdir(parents=True)
            return False

        # A barrier as well: no rank may write into the directory before rank 0 has emptied it.
        if run_on_rank0(prepare, self._group):
            return
        refresh([temporary])
        if not isinstance(tensors, ShardFile):
            self._write_tensors(temporary, directory, tensors)

        def write() -> tuple[dict[str, FileEntry], dict[str, Any]]:
            if isinstance(tensors, ShardFile):
                return tensors.write(temporary), small.rng
            # Each rank hashes what it wrote: its files are still in its page cache, and all of them do it at once.
            return _entries([temporary / file_name(dist.get_rank(), part) for part in PARTS]), small.rng

        # A barrier as well: rank 0 lists the directory only when all ranks have written their files.
        written = gather_on_rank0(write, self._group)

        def finish() -> None:
            shards, rng = zip(*written(), strict=True)
            for rank, part in enumerate(shards):
                for name, entry in part.items():
                    if not wait_for_file(temporary / name, entry.size, _SHARED_SECONDS):
                        raise StageError(
                            f"{temporary / name}, which rank {rank} has written, is not on the node of rank 0: put the "
                            "checkpoints on a disk that all nodes share (set CHECKPOINT_ROOT)"
                        )
            _write_small(temporary, small, list(rng))
            files = {name: entry for part in shards for name, entry in part.items()}
            files |= _entries([path for path in temporary.iterdir() if path.name not in files])
            manifest = dataclasses.replace(small.manifest, files=dict(sorted(files.items())))
            # The order is what makes it safe against a power cut: all files are on the disk before the manifest names
            # them, and the manifest is before the rename makes the checkpoint exist. The rename itself is on the disk
            # before an older checkpoint is deleted.
            manifest.write(temporary)
            publish.sync_tree(temporary)
            self._confirm_lock()
            publish.rename(temporary, directory)
            publish.sync_directory(directory.parent)
            retention.prune(directory.parent, self._keep, print_line)

        # All ranks wait for it: a rank that trained on and crashed would otherwise have the launcher kill rank 0 while
        # it publishes, and a failure here must end all of them.
        run_on_rank0(finish, self._group)

    def _write_tensors(self, temporary: Path, directory: Path, tensors: dict[str, Any]) -> None:
        torch.serialization.set_crc32_options(False)  # of this thread; the manifest has the SHA-256 of each file
        try:
            dcp.save(
                tensors, checkpoint_id=temporary, storage_writer=self._writer, planner=Planner(),
                process_group=self._group,
            )  # fmt: skip
        except CheckpointException as error:
            raise _save_error(directory, error) from None


def load(directory: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> TrainState:
    """Fill model, optimizer, scheduler and random number generators from a verified checkpoint; returns its state.

    The number of ranks may differ from the one that saved it; the generators are then left as they are, as there is
    no state for each rank.
    """
    optimizer_state = get_optimizer_state_dict(model, optimizer)
    tensors = {"model": _model_state(model), "optimizer": optimizer_state["state"]}
    run_on_all_ranks(lambda: _read_tensors(directory, tensors))
    set_optimizer_state_dict(model, optimizer, optimizer_state)
    scheduler.load_state_dict(torch.load(directory / SCHEDULER, weights_only=True))
    # The optimizer's groups are not in the checkpoint, and a scheduler sets its rate only when it steps.
    for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        set_lr(group, lr)
    state = TrainState.read(directory / STATE)
    if len(state.rng) == dist.get_world_size():
        set_rng_state(state.rng[dist.get_rank()])
    return state


def _read_tensors(directory: Path, tensors: dict[str, Any]) -> None:
    """Read into `tensors` in place; each rank reads the parts that it needs, whoever saved them.

    Each by itself: otherwise torch has rank 0 collect what all ranks want to read, and send it back unchanged.
    """
    try:
        with warnings.catch_warnings(), paused_collector():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise StageError(f"could not read {directory}: {cause}") from None


def _write_small(temporary: Path, small: _Small, rng: list[dict[str, Any]]) -> None:
    buffer = io.BytesIO()  # torch.save to a path would raise RuntimeError, not OSError, on a full disk
    torch.save(small.lr_scheduler, buffer)
    with naming(temporary / SCHEDULER):
        (temporary / SCHEDULER).write_bytes(buffer.getvalue())
    dataclasses.replace(small.state, rng=rng).write(temporary / STATE)
    for name, text in small.tables.items():
        publish.write_text(temporary / name, text)


def _model_state(model: nn.Module) -> dict[str, Any]:
    """Parameters, a tied one once, and the buffers that belong to the state of the model."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state of each parameter by its name, as `get_optimizer_state_dict` returns it, but in a tenth of the time.

    Without the parameter groups: the learning rate is in the scheduler's state, the rest in the run's parameters.
    """
    return {name: optimizer.state[param] for name, param in model.named_parameters() if param in optimizer.state}


def _entries(paths: list[Path]) -> dict[str, FileEntry]:
    return {path.name: FileEntry.of(path) for path in paths}


def _save_error(directory: Path, error: CheckpointException) -> StageError:
    rank, (cause, _) = next(iter(error.failures.items()))
    # After a failed write, torch's zip writer may only complain about a wrong position in the file.
    hint = "" if isinstance(cause, OSError) else " (is the disk full, or a limit of the file size reached?)"
    kind = Unavailable if isinstance(cause, OSError) and cause.errno in MAY_PASS else StageError
    return kind(f"rank {rank} could not save {directory}: {cause}{hint}; the checkpoint before it is still valid")


def _pauses(seconds: float) -> Iterator[float]:
    """Pauses between tries, doubling from one second to half a minute: together at most `seconds`."""
    pause = 1.0
    while pause <= seconds:
        yield pause
        seconds -= pause
        pause = min(2 * pause, 30)
