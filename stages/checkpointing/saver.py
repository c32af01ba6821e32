"""Saving and loading sharded checkpoints: published by rename, verified before they are trusted, never overwritten.

The layout is described in stages/checkpointing/layout.py. A save writes into `step-N.tmp`, a new directory, and renames
it once its manifest is on the disk. torch.distributed.checkpoint alone gives no such guarantee: saved over an older
checkpoint and interrupted, it loads as a mix of both, and it does not notice a flipped bit.
"""

import dataclasses
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stages.base import publish
from stages.base.errors import StageError, Unavailable, as_stage_error
from stages.base.files import FileEntry
from stages.base.process import paused_collector
from stages.base.shared_disk import refresh, wait_for_file
from stages.checkpointing import retention
from stages.checkpointing.layout import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    CheckpointManifest,
    TensorEntry,
)
from stages.checkpointing.metadata import Reader
from stages.checkpointing.retention import CheckpointRuntime
from stages.checkpointing.state import STATE, TrainState
from stages.forward.distributed import gather_on_rank0, run_on_all_ranks, run_on_rank0
from stages.forward.transfer import own_thread
from stages.model.adapters import is_adapter

_SWITCH_INTERVAL = 0.0005
"""Seconds after which the interpreter passes from the thread that saves to the one that trains; by default 5 ms, which
the training would wait after each of its operations while a checkpoint is being written."""


_SHARED_SECONDS = 60
"""After so long at most, NFS shows a node what another one has written."""

_Tensors = dict[str, dict[str, Any]]
"""Of the model and of the optimizer, by their names."""


class _Planner(dcp.DefaultSavePlanner):
    """torch's planner, which says before each tensor that the save goes on."""

    def __init__(self, goes_on: Callable[[], None]) -> None:
        super().__init__(enable_plan_caching=True)
        self._goes_on = goes_on

    def resolve_data(self, write_item: Any) -> Any:
        """The tensor that is written next."""
        self._goes_on()
        return super().resolve_data(write_item)


class _ModelPlanner(_Planner):
    """torch keeps the plan of a save for the next one by the name of the planner's class."""


class _OptimizerPlanner(_Planner):
    """The same for the other save of a checkpoint."""


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """torch's planner, which says after each tensor that the load goes on."""

    def __init__(self, goes_on: Callable[[], None]) -> None:
        super().__init__()
        self._goes_on = goes_on
        self._in_full: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """Quantized tensors that are read in parts which divide a block, and their values: by their names."""

    def create_local_plan(self) -> LoadPlan:
        """What to read. A plain tensor as a part of a quantized one is a copy: what is read there would be lost."""
        plan = super().create_local_plan()
        for item in plan.items:
            tensor = self.lookup_tensor(item.dest_index)
            part = self.transform_tensor(item, tensor)
            if is_traceable_wrapper_subclass(tensor) and not is_traceable_wrapper_subclass(part):
                self._in_full[item.dest_index.fqn] = tensor, torch.empty(tensor.shape)
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Where a tensor is read to."""
        if index.fqn in self._in_full:
            return self._in_full[index.fqn][1]
        return super().lookup_tensor(index)

    def finish(self) -> None:
        """Quantize what was read in full."""
        for tensor, values in self._in_full.values():
            tensor.copy_(values.to(tensor.device))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        """The tensor has been read."""
        self._goes_on()
        super().commit_tensor(read_item, tensor)


_PLANNERS = {MODEL: _ModelPlanner, OPTIMIZER: _OptimizerPlanner}


class _Small(NamedTuple):
    """What a checkpoint contains beside tensors."""

    state: TrainState
    tables: dict[str, str]
    manifest: CheckpointManifest


class Saver:
    """Publishes the state of all ranks, one checkpoint at a time; a context manager that exits when all is published.

    Asynchronous saves exchange memory for time: training waits only until torch's stager has copied the state of this
    rank into CPU memory, which is kept for the next save. The rest happens in a thread; docs/benchmarks.md has what it
    costs. The collectives of the thread use a process group of their own: the collectives of one group must come in the
    same order on all ranks, and the thread runs in no order with the training.
    """

    def __init__(
        self, runtime: CheckpointRuntime, timeout_minutes: float, report: Callable[[str], None] = print,
        confirm_lock: Callable[[], None] = lambda: None, goes_on: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """A collective.

        Args:
            runtime: When and how to save.
            timeout_minutes: Of the process group.
            report: Called on rank 0 with what goes wrong and does not end the training.
            confirm_lock: Raises an error where the lock of the run's directory is lost; called on rank 0.
            goes_on: Called as bytes are written and hashed.
        """
        self._keep, self._report, self._confirm_lock = runtime.keep_checkpoints, report, confirm_lock
        self._goes_on = goes_on
        # The same on all ranks, and soon over, as nothing is noted for the watchdog meanwhile.
        self._pauses = [*_pauses(60 * timeout_minutes / 4)]
        # A collective itself: every rank must create its groups in the same order.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
        self._thread = own_thread("saver") if runtime.async_checkpoint else None
        # Private, until torch 2.11 is no longer supported: its public `DefaultStager` closes this one after each save,
        # so the second one fails.
        self._stager = StateDictStager(pin_memory=torch.cuda.is_available())
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
                if (problem := self._pending.exception()) and dist.get_rank() == 0:
                    self._report(str(problem))
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
        self, directory: Path, model: nn.Module, optimizer: Optimizer, state: TrainState,
        tables: dict[str, str], manifest: CheckpointManifest,
    ) -> None:  # fmt: skip
        """Publish the state of all ranks as `directory`, now or in the background, after the save before it.

        Args:
            directory: `.../<run_id>/step-N`.
            model: Its parameters and persistent buffers are saved.
            optimizer: Its state is saved.
            state: Where the training is.
            tables: Content of `history.tsv` and `speed.tsv`, by their names.
            manifest: Its `files` and `tensors` are filled in here.

        Raises:
            StageError: this save, or the one before it, failed; on all ranks alike.
        """
        self.wait()
        # Contiguous: `consolidate` takes the bytes in the files for the elements in their order.
        model_state = {name: tensor.contiguous() for name, tensor in _model_state(model).items()}
        shapes = {name: TensorEntry.of(tensor) for name, tensor in model_state.items()}
        manifest = dataclasses.replace(manifest, tensors=shapes)
        tensors = {MODEL: model_state, OPTIMIZER: _optimizer_state(model, optimizer)}
        small = _Small(state, tables, manifest)
        if self._thread is None:
            self._publish(directory, tensors, small)
        else:
            self._pending = self._thread.submit(self._publish_copy, directory, *self._copy(tensors), small)

    def _copy(self, tensors: _Tensors) -> tuple[_Tensors, StageError | None]:
        try:
            copied = cast(_Tensors, self._stager.stage(tensors, non_blocking=torch.cuda.is_available()))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return copied, None
        except Exception as error:  # of whatever class: the ranks that have their copy would wait for this one
            return {}, StageError(
                f"could not copy the weights and the optimizer state for an asynchronous save: {error!r}; set "
                "runtime.async_checkpoint to false, which needs no copy"
            )

    def _publish_copy(self, directory: Path, tensors: _Tensors, problem: StageError | None, small: _Small) -> None:
        def check() -> None:
            if problem:
                raise problem

        run_on_all_ranks(check, self._group)  # in the thread, so that the training does not wait for other ranks
        self._publish(directory, tensors, small)

    def _publish(self, directory: Path, tensors: _Tensors, small: _Small) -> None:
        """Publish a checkpoint, again where the file system fails in a way that may pass."""
        for pause in self._pauses:
            try:
                return self._publish_once(directory, tensors, small)
            except Unavailable as error:  # on all ranks alike
                if dist.get_rank() == 0:
                    self._report(f"{directory.name} is not saved yet: {error}; trying again in {pause:.0f} s")
                time.sleep(pause)
            except StageError:
                with suppress(StageError):  # without the lock, another training may write there
                    if dist.get_rank() == 0:  # no other rank writes any longer
                        with suppress(OSError):  # of a full disk, which says nothing of the lock
                            self._confirm_lock()
                        shutil.rmtree(_temporary(directory), ignore_errors=True)  # the disk may be full of it
                raise
        self._publish_once(directory, tensors, small)

    def _publish_once(self, directory: Path, tensors: _Tensors, small: _Small) -> None:
        temporary = _temporary(directory)

        def prepare() -> bool:
            self._confirm_lock()
            if (directory / MANIFEST).is_file():  # renamed at the last try, which failed after that
                publish.sync_directory(directory.parent)
                return True
            retention.quarantine(directory)  # it may be a part of a checkpoint
            shutil.rmtree(temporary, ignore_errors=True)  # a crash at this step may have left files of more ranks
            temporary.mkdir(parents=True)
            return False

        # A barrier as well: no rank may write into the directory before rank 0 has emptied it.
        if run_on_rank0(prepare, self._group):
            return
        refresh([temporary])
        for kind, part in tensors.items():
            self._write_tensors(temporary / kind, part)

        def write() -> dict[str, FileEntry]:
            # Each rank hashes what it wrote: its files are still in its page cache, and all of them do it at once.
            own = temporary.glob(f"*/__{dist.get_rank()}_*.distcp")
            return _entries(temporary, own, self._goes_on)

        # A barrier as well: rank 0 lists the directory only when all ranks have written their files.
        written = gather_on_rank0(write, self._group)

        def finish() -> None:
            shards = written()
            for rank, part in enumerate(shards):
                for name, entry in part.items():
                    if not wait_for_file(temporary / name, entry.size, _SHARED_SECONDS):
                        raise StageError(
                            f"{temporary / name}, which rank {rank} has written, is not on the node of rank 0: put the "
                            "checkpoints on a disk that all nodes share (set CHECKPOINT_ROOT)"
                        )
            small.state.write(temporary / STATE)
            for name, text in small.tables.items():
                publish.write_text(temporary / name, text)
            files = {name: entry for part in shards for name, entry in part.items()}
            rest = (path for path in temporary.rglob("*") if str(path.relative_to(temporary)) not in files)
            files |= _entries(temporary, rest, self._goes_on)
            manifest = dataclasses.replace(small.manifest, files=dict(sorted(files.items())))
            # The order is what makes it safe against a power cut: all files are on the disk before the manifest names
            # them, and the manifest is before the rename makes the checkpoint exist. The rename itself is on the disk
            # before an older checkpoint is deleted.
            manifest.write(temporary)
            publish.sync_tree(temporary)
            self._confirm_lock()
            publish.rename(temporary, directory)
            retention.prune(directory.parent, self._keep, self._report)

        # All ranks wait for it: a rank that trained on and crashed would otherwise have the launcher kill rank 0 while
        # it publishes, and a failure here must end all of them.
        run_on_rank0(finish, self._group)

    def _write_tensors(self, directory: Path, tensors: dict[str, Any]) -> None:
        torch.serialization.set_crc32_options(False)  # of this thread; the manifest has the SHA-256 of each file
        # Nothing is copied ahead, so that the tensors are in the same order whether they are on a GPU or staged.
        writer = dcp.FileSystemWriter(directory, sync_files=True, per_thread_copy_ahead=0)
        planner = _PLANNERS[directory.name](self._goes_on)
        try:
            dcp.save(tensors, storage_writer=writer, planner=planner, process_group=self._group)
        except CheckpointException as error:
            raise _save_error(directory, error) from None


def load(directory: Path, model: nn.Module, optimizer: Optimizer, goes_on: Callable[[], None] = lambda: None) -> None:
    """Fill model and optimizer, whose state is allocated, from a verified checkpoint.

    The number of ranks may differ from the one that saved it. `goes_on` is called as bytes are read.
    """
    tensors = {MODEL: _model_state(model), OPTIMIZER: _optimizer_state(model, optimizer)}
    run_on_all_ranks(lambda: _read_tensors(directory, tensors, goes_on))


def _read_tensors(checkpoint: Path, tensors: dict[str, Any], goes_on: Callable[[], None]) -> None:
    """Read into `tensors` in place; each rank reads the parts that it needs, whoever saved them.

    Each by itself: otherwise torch has rank 0 collect what all ranks want to read, and send it back unchanged.
    """
    try:
        with warnings.catch_warnings(), paused_collector():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            for kind, part in tensors.items():
                planner = _LoadPlanner(goes_on)
                dcp.load(part, storage_reader=Reader(checkpoint / kind), planner=planner, no_dist=True)
                planner.finish()
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise StageError(f"could not read {checkpoint}: {cause}") from None


def _model_state(model: nn.Module) -> dict[str, Any]:
    """What is saved of a model: its adapters alone, if it has some.

    Else its parameters, a tied one once, and the buffers that belong to the state of the model.
    """
    params = dict(model.named_parameters())
    if adapters := {name: param for name, param in params.items() if is_adapter(name)}:
        return adapters
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**params, **buffers}


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state of each parameter by its name, in the tensors of the optimizer themselves.

    Without the parameter groups, which the parameters of the run decide.
    """
    return {name: optimizer.state[param] for name, param in model.named_parameters() if param in optimizer.state}


def _temporary(directory: Path) -> Path:
    """Where a checkpoint is until it is published."""
    return directory.with_name(directory.name + retention.TEMPORARY)


def _entries(checkpoint: Path, paths: Iterable[Path], goes_on: Callable[[], None]) -> dict[str, FileEntry]:
    return {str(path.relative_to(checkpoint)): FileEntry.of(path, goes_on) for path in paths if path.is_file()}


def _save_error(directory: Path, error: CheckpointException) -> StageError:
    rank, (cause, _) = next(iter(error.failures.items()))
    if isinstance(cause, OSError):
        cause.filename = cause.filename or str(directory)
        problem = as_stage_error(cause)
    else:  # after a failed write, torch's zip writer may only complain about a wrong position in the file
        problem = StageError(f"{directory}: {cause} (is the disk full, or a limit of the file size reached?)")
    return type(problem)(f"rank {rank} could not save a checkpoint; earlier ones are still valid: {problem}")


def _pauses(seconds: float) -> Iterator[float]:
    """Pauses between tries, doubling from one second to half a minute: together at most `seconds`."""
    pause = 1.0
    while pause <= seconds:
        yield pause
        seconds -= pause
        pause = min(2 * pause, 30)
