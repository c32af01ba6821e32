"""One rank of the training: what it does around the loop, which alone decides the weights."""

import dataclasses
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stages.base.errors import StageError
from stages.base.history import HISTORY, SPEED, History, Table
from stages.base.identity import Adoption
from stages.base.packed import REMEDY, TRAIN, VALIDATION, PackedTokens
from stages.checkpointing import decision, layout, retention, saver
from stages.checkpointing.layout import FORMAT, CheckpointManifest, latest_valid, list_checkpoints, step_name
from stages.checkpointing.lock import rank_lock, writer_lock
from stages.checkpointing.run import Run, packages
from stages.checkpointing.state import ScalerState, TrainState
from stages.forward.distributed import device_type, is_rank0, run_on_rank0
from stages.launching import flops, trackers
from stages.launching.agreement import (
    VERIFIED,
    check_once,
    check_shared,
    check_together,
    refuse_different_ranks,
    verify_weights,
)
from stages.launching.console import Console, log_to, never_silent, print_line
from stages.launching.metrics import SPEED_COLUMNS, MetricsLogger
from stages.launching.place import differences, find_place, fix_threads, start_line
from stages.launching.profiler import Profiler
from stages.launching.remedies import remedies
from stages.launching.runtime import TrainRuntime, how_to_resume, read_launch
from stages.launching.timers import Timers, memory_gib
from stages.model.manifest import ROUTER_LOSS_OFF, ModelManifest
from stages.ranks import handoff
from stages.ranks.process_group import device_mesh, process_group
from stages.ranks.signals import StopSignal
from stages.ranks.torch_errors import explain_torch_errors
from stages.ranks.watchdog import Heartbeat, watched
from stages.training.environment import set_environment
from stages.training.loop import Trainer
from stages.training.precision import (
    check_precision,
    load_scaler_state,
    scaler_state,
    set_float32_precision,
    use_deterministic_algorithms,
)
from stages.training.step import StepResult

T = TypeVar("T")

_LOG = logging.getLogger("stages.train")


class Rank:
    """A rank of a training: its trainer, its checkpoints and what it reports. These are the `Hooks` of the loop."""

    def __init__(
        self, run: Run, runtime: TrainRuntime, chosen: decision.Decision, mesh: DeviceMesh, stop_signal: StopSignal,
        heartbeat: Heartbeat, confirm_lock: Callable[[], None],
    ) -> None:  # fmt: skip
        """Build the model, or load the checkpoint that `chosen` names; a collective."""
        self.run, self.params, self.runtime = run, run.params, runtime
        self.stop_signal, self.heartbeat = stop_signal, heartbeat
        model = ModelManifest.read()
        # Before they are opened: pyarrow may fail in any way at damaged ones.
        digests = PackedTokens.read(TRAIN).digests | PackedTokens.read(VALIDATION).digests
        check_once(digests, run.directory / VERIFIED, REMEDY, lambda: heartbeat.note("verifying the tokens"))
        self.adopted: Adoption | None = None
        self.saved_step: int | None = None
        self.saved_at = time.monotonic()
        # Before the model is built: where there is a checkpoint, the weights of the model files are not read.
        start = self.find_start(chosen.checkpoints)
        before = TrainState.of(start) if start else None
        fix_threads(before.place if before else None)
        self.place = find_place(before.step if before else 0) if is_rank0() else None
        self.launches = 1 + (before.launches if before else 0)
        if start is None:
            verify_weights(model, lambda: heartbeat.note("verifying the weights"))
        self.trainer = Trainer(
            self.params, model, run.seq_length, run.total_steps, mesh, initialize=start is None, note=heartbeat.note
        )
        self.saver = saver.Saver(runtime, runtime.timeout_minutes, print_line, confirm_lock, heartbeat.goes_on)
        if start:
            self.resume(start)
        history, speed = ((start / name).read_text(encoding="utf-8") if start else "" for name in (HISTORY, SPEED))
        self.tracker = trackers.start_tracker(runtime.tracker if is_rank0() else "none", run, self.trainer.step)
        self.profiler = Profiler(runtime.profile_steps if is_rank0() else None,
                                 run.log_directory / "profile" / run.run_id)  # fmt: skip
        self.timers = Timers(lambda phase: heartbeat.note(f"step {self.trainer.step + 1}, {phase}"))
        self.phase: Callable[[str], AbstractContextManager[None]] = self.timers.phase
        self.note = heartbeat.note
        self.metrics = MetricsLogger(
            run, runtime.log_freq, Console(dist.get_rank(), self.trainer.step, run.total_steps), self.tracker,
            self.timers, flops.flops_per_token(self.trainer.model, run.seq_length), History(history, self.sources),
            Table(SPEED_COLUMNS, speed), before.skipped_steps if before else 0,
        )  # fmt: skip
        if is_rank0():
            self.print_choices(model, mesh)

    def train(self) -> bool:
        """Train to the last step; False where a signal asked to stop before. Either way the state is saved."""
        with closing(self.tracker):
            with self.saver, self.profiler:
                is_finished = self.trainer.train(self)
            self.metrics.console.close()
        return is_finished

    def print_choices(self, model: ModelManifest, mesh: DeviceMesh) -> None:
        """Print where the training runs, and what was chosen for it."""
        if model.router_loss_coef == 0:
            print_line(ROUTER_LOSS_OFF)
        if self.trainer.attention.name == "padded":
            share = self.trainer.train_loader.padding(mesh.size()).share
            reason = f", because {self.trainer.attention.reason}" if self.trainer.attention.reason else ""
            print_line(f"attention: padded{reason}; {share:.0%} of the tokens that are computed are padding")
        elif self.trainer.attention.reason:
            print_line(f"attention: varlen with torch's own kernels, because {self.trainer.attention.reason}")
        if self.trainer.loss.reason:
            print_line(f"loss: {self.trainer.loss.name}, because {self.trainer.loss.reason}")
        if (steps := self.runtime.profile_steps) and steps[0] > self.run.total_steps:
            print_line(
                f"warning: runtime.profile_steps: there are no steps {steps[0]} to {steps[1]}, the last one is "
                f"{self.run.total_steps}"
            )
        print_line(start_line(self.trainer.chosen, mesh))

    # The hooks that are not those of the heartbeat and the timers:

    def before_step(self, step: int) -> None:
        """A step starts, which a signal to stop waits for; before the first one there was nothing to save."""
        self.stop_signal.training_starts()
        self.profiler.before_step(step)

    @contextmanager
    def explained(self, step: int) -> Iterator[None]:
        """Have errors name the step, and the checkpoint from which the next launch resumes."""
        try:
            yield
        except StageError as error:
            saved = self.saved_step
            newest = f"the newest checkpoint is of step {saved}" if saved else "no checkpoint is saved yet"
            raise StageError(f"step {step}: {error}; {newest}") from None

    @property
    def sources(self) -> list[str]:
        """That are validated by themselves."""
        return [source for source in self.trainer.validation_loader.validation_rows if source]

    def progress(self, batches: Iterable[T], total: int) -> Iterable[T]:
        """Show a bar for the batches of a validation."""
        return self.metrics.console.progress(batches, total, "validation")

    def wishes(self) -> tuple[bool, bool]:
        """To stop after a signal or a failed save; to save where rank 0, whose clock counts, finds it due."""
        return self.stop_signal.received or self.saver.failed, is_rank0() and self.is_time_to_save()

    def report(self, step: int, result: StepResult, is_validated: bool) -> None:
        """Report a step, and the validation after it."""
        validation_loss = self.trainer.validation_loss if is_validated else None
        if validation_loss is not None:
            num_rows = sum(map(len, self.trainer.validation_loader.validation_rows.values()))
            losses = self.trainer.source_losses
            of_source = "".join(f"  {name} {math.nan if loss is None else loss:.4f}" for name, loss in losses.items())
            self.metrics.console.line(
                f"step {step}: validation loss {validation_loss:.4f} ({num_rows:,} rows)" + of_source
            )
            if step == 0 and not math.isfinite(validation_loss):  # on all ranks; no lr, which the next error would name
                raise StageError(
                    f"the validation loss is {validation_loss} before the first step: the initial weights are not "
                    f"finite, or too large for precision {self.params.precision}: use other weights, or precision bf16 "
                    "or fp32"
                )
        if self.runtime.debug and step:
            rows = self.trainer.train_loader.step_indices(step - 1).tolist()
            now, peak = memory_gib()
            _LOG.debug(
                f"step {step} done: rows {rows}, loss {result.loss!r}, grad norm {result.grad_norm!r}, "
                f"memory {now:.3f} GiB, peak {peak:.3f} GiB"
            )
        self.metrics.log(step, result, validation_loss, is_validated, self.trainer.source_losses)

    def save(self) -> None:
        """Publish a checkpoint of this step, unless there is one, or nothing was trained yet.

        Raises:
            StageError: this step, or one before it, has failed; or the save, or the one before it.
        """
        trainer = self.trainer
        trainer.catch_up()  # the checkpoint has their history, and none that is not finite
        if trainer.step in (0, self.saved_step):
            return
        self.heartbeat.note(f"saving step {trainer.step}")
        self.metrics.time_steps(trainer.step)
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
        state = TrainState(
            step=trainer.step,
            loss_scaler=ScalerState(*scaler_state(trainer.scaler)),
            skipped_steps=self.metrics.skipped_steps,
            launches=self.launches,
            place=self.place and dataclasses.replace(self.place, date=date),
            sources=trainer.train_loader.order.epochs(trainer.step),
        )
        manifest = CheckpointManifest(
            format=FORMAT,
            run_id=self.run.run_id,
            step=trainer.step,
            total_steps=self.run.total_steps,
            identity=self.run.identity,
            validation_loss=trainer.validation_loss,
            adopted=self.adopted,
            packages=packages(),
            files={},
            tensors={},
        )
        path = self.run.directory / step_name(trainer.step)
        tables = {HISTORY: self.metrics.history.text(), SPEED: self.metrics.speed.text()}
        with self.timers.phase("saving"):
            self.saver.save(path, trainer.model, trainer.optimizer, state, tables, manifest)
        self.saved_step, self.saved_at = trainer.step, time.monotonic()

    def is_time_to_save(self) -> bool:
        """Whether a checkpoint of this step is due."""
        if self.is_best():
            return True
        freq, minutes = self.runtime.ckpt_freq, self.runtime.ckpt_minutes
        by_step = freq is not None and self.trainer.step % freq == 0
        return by_step or (minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes)

    def is_best(self) -> bool:
        """Whether this step is the one to export, unless a later one is better.

        Then it is saved, whatever `runtime` says of checkpoints, so that the result does not depend on that.
        """
        is_measured = self.params.export_from == "best" and self.trainer.validation_loss is not None
        return is_measured and self.metrics.history.best_step(self.adopted) == self.trainer.step

    def find_start(self, candidates: list[Path]) -> Path | None:
        """The first of `candidates` that is valid, or None to start at step 0; all ranks verify them together."""
        directory = self.run.directory

        def clean_up() -> None:
            for newer in list_checkpoints(directory):
                # Damaged: the run will publish this step again, and a rename cannot replace a directory.
                if path is None or newer.name > path.name:
                    retention.quarantine(newer)
            retention.prune(directory, self.runtime.keep_checkpoints, print_line)

        report = print_line if is_rank0() else lambda _: None
        path = latest_valid(candidates, report, self.verify)
        run_on_rank0(clean_up)
        return path

    def verify(self, checkpoint: Path) -> None:
        """Compare every file of a checkpoint with its manifest, a share on each rank; all ranks raise the same."""
        manifest = run_on_rank0(lambda: layout.verify(checkpoint, contents=False))
        files = {checkpoint / name: entry.sha256 for name, entry in manifest.files.items()}
        check_together(files, layout.REMEDY, lambda: self.heartbeat.note(f"verifying {checkpoint.name}"))

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint."""
        trainer = self.trainer
        self.heartbeat.note(f"reading {path.name}")
        saver.load(path, trainer.model, trainer.optimizer, self.heartbeat.goes_on)
        state = TrainState.of(path)
        manifest = CheckpointManifest.read(path)
        load_scaler_state(trainer.scaler, state.loss_scaler.scale, state.loss_scaler.good_steps)
        trainer.step, trainer.validation_loss, self.adopted = state.step, manifest.validation_loss, manifest.adopted
        self.saved_step = trainer.step  # nothing to publish before the next step
        if self.place:
            print_line(f"resuming from step {trainer.step} of {self.run.total_steps}: {path}")
            others = differences(manifest, state.place, self.place)
            if others and (device_type() == "cpu" or self.params.deterministic):
                print_line(f"the last bits may not be those of a training without interruption: {'; '.join(others)}")


def run(stop_signal: StopSignal) -> bool:
    """Train as one of the ranks; False where a signal asked to stop before the last step."""
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    if handoff.DIRECTORY not in os.environ:  # else the ranks of one machine find each other through a file there
        names += ["MASTER_ADDR", "MASTER_PORT"]
    if missing := [name for name in names if name not in os.environ]:
        raise StageError(
            f"{', '.join(missing)} must be set, as torchrun does: `python -m stages.launch` starts the ranks, also "
            "on several nodes of Slurm"
        )
    # Before the process group come the errors that every rank finds by itself: none waits for another that has ended.
    run, runtime, decided = read_launch()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    set_environment(run.params, num_nodes=world_size // int(os.environ["LOCAL_WORLD_SIZE"]))
    set_float32_precision(run.params.tf32)
    if run.params.deterministic:
        use_deterministic_algorithms()
    check_precision(run.params, run.seq_length)
    trackers.check(runtime.tracker)
    run.params.check_packages()
    run.params.grad_accum_steps(world_size)
    mesh_shape = run.params.fsdp.mesh_shape(world_size, int(os.environ["LOCAL_WORLD_SIZE"]))
    if runtime.debug:
        logs = run.log_directory / "logs" / run.run_id
        log_to(logs / f"rank-{rank}.log")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(logs / "nccl-rank-"))
    heartbeat = Heartbeat()
    if_out_of_memory = (
        f"use {remedies(run.params, world_size)}. The next launch resumes from the latest valid checkpoint, if there "
        "is one; another seq_length is a new run"
    )
    with (
        # Outermost: held until the process group has ended and the last checkpoint is published.
        ExitStack() as locks,
        explain_torch_errors(f"rank {rank}", if_out_of_memory),
        process_group(runtime.timeout_minutes, os.environ.get(handoff.DIRECTORY)),
    ):
        refuse_different_ranks(run, runtime)  # before the mesh, which each rank makes from its own parameters
        run_on_rank0(lambda: lock(run, locks))
        for warning in check_shared(run.directory):
            if is_rank0():
                print_line(warning)
        confirm_lock = locks.enter_context(rank_lock(run.directory))
        with watched(heartbeat, runtime.timeout_minutes, runtime.debug):
            # NCCL then writes what each rank was doing before the watchdog ends all, after 0.9 of the time.
            mesh = device_mesh(mesh_shape, runtime.timeout_minutes, nccl_share=0.8 if runtime.debug else 1)
            if is_rank0() and not sys.stderr.isatty():  # a terminal has a bar
                locks.enter_context(never_silent(lambda: heartbeat.activity))
            heartbeat.note("choosing the checkpoint to start from")
            chosen = decided or run_on_rank0(lambda: decision.begin(run, how_to_resume(runtime)))
            if decided is None and is_rank0():
                print_line(chosen.reason)
            one = Rank(run, runtime, chosen, mesh, stop_signal, heartbeat, confirm_lock)
            return one.train()


def lock(run: Run, locks: ExitStack) -> None:
    """Lock the directory of a run, unless a launcher of ours has done so. Called on rank 0 alone.

    Raises:
        StageError: another training writes into it.
    """
    if not handoff.has_launcher():
        locks.enter_context(writer_lock(run.directory, print_line))
