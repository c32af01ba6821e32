"""The start of a rank: what it joins and locks, and with which weights its training begins."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from stages.base.packed import REMEDY, TRAIN, VALIDATION, PackedTokens
from stages.checkpointing import decision, layout, retention, saver
from stages.checkpointing.decision import Decision
from stages.checkpointing.layout import CheckpointManifest, latest_valid, list_checkpoints
from stages.checkpointing.lock import rank_lock, writer_lock
from stages.checkpointing.run import Run
from stages.checkpointing.state import Place, TrainState
from stages.forward.context import RankContext
from stages.forward.distributed import device_type, is_rank0, run_on_rank0
from stages.launching import trackers
from stages.launching.agreement import (
    VERIFIED,
    check_once,
    check_shared,
    check_together,
    refuse_different_ranks,
    verify_weights,
)
from stages.launching.console import log_to, never_silent, print_line
from stages.launching.hooks import RankHooks
from stages.launching.place import differences, find_place, fix_threads, start_line
from stages.launching.remedies import remedies
from stages.launching.runtime import TrainRuntime, check_ranks, how_to_resume
from stages.model.manifest import ModelManifest
from stages.ranks import handoff
from stages.ranks.process_group import context_group, device_mesh, process_group
from stages.ranks.signals import StopSignal
from stages.ranks.torch_errors import explain_torch_errors
from stages.ranks.watchdog import Heartbeat, watched
from stages.training.loop import Trainer
from stages.training.precision import (
    check_precision,
    load_scaler_state,
    set_float32_precision,
    use_deterministic_algorithms,
)


def train(run: Run, runtime: TrainRuntime, decided: Decision | None, stop_signal: StopSignal) -> bool:
    """Train as one of the ranks; False where a signal asked to stop before the last step.

    Args:
        run: What is trained.
        runtime: As it was launched.
        decided: What the launcher has decided; None: there is none, so rank 0 decides.
        stop_signal: That of this process.
    """
    # Before the process group come the errors that every rank finds by itself: none waits for another that has ended.
    rank, world_size, ranks_of_node = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    set_float32_precision(run.params.tf32)
    if run.params.deterministic:
        use_deterministic_algorithms()
    check_precision(run.params, run.seq_length)
    trackers.check(runtime.tracker)
    run.params.check_packages()
    mesh_shape = check_ranks(run, world_size, ranks_of_node)
    if runtime.debug:
        log_to(run.log_directory / "logs" / run.run_id / f"rank-{rank}.log")
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
            mesh = device_mesh(mesh_shape, runtime.timeout_minutes)
            if is_rank0() and not sys.stderr.isatty():  # a terminal has a bar
                locks.enter_context(never_silent(lambda: heartbeat.activity))
            heartbeat.note("choosing the checkpoint to start from")
            chosen = decided or run_on_rank0(lambda: decision.begin(run, how_to_resume(runtime)))
            if decided is None and is_rank0():
                print_line(chosen.reason)
            hooks = start(run, runtime, chosen.checkpoints, mesh, stop_signal, heartbeat, confirm_lock)
            return hooks.train()


def lock(run: Run, locks: ExitStack) -> None:
    """Lock the directory of a run, unless a launcher of ours has done so. Called on rank 0 alone.

    Raises:
        StageError: another training writes into it.
    """
    if not handoff.has_launcher():
        locks.enter_context(writer_lock(run.directory, print_line))


def start(
    run: Run, runtime: TrainRuntime, candidates: list[Path], mesh: DeviceMesh, stop_signal: StopSignal,
    heartbeat: Heartbeat, confirm_lock: Callable[[], None],
) -> RankHooks:  # fmt: skip
    """Build the training, at the first of `candidates` that is valid, or at step 0 where there are none; a collective.

    Args:
        run: What is trained.
        runtime: As it was launched.
        candidates: Checkpoints of the run, the newest first.
        mesh: The ranks of each copy of the model are its last axis.
        stop_signal: That of this process.
        heartbeat: That of this rank.
        confirm_lock: Raises an error where the lock of the run's directory is lost.
    """
    model = ModelManifest.read()
    # Before they are opened: pyarrow may fail in any way at damaged ones.
    digests = PackedTokens.read(TRAIN).digests | PackedTokens.read(VALIDATION).digests
    check_once(digests, run.directory / VERIFIED, REMEDY, lambda: heartbeat.note("verifying the tokens"))
    # Before the model is built: where there is a checkpoint, the weights of the model files are not read.
    checkpoint = find_valid(candidates, run, runtime, heartbeat)
    state = TrainState.of(checkpoint) if checkpoint else None
    step = CheckpointManifest.read(checkpoint).step if checkpoint else 0
    fix_threads(state.place if state else None)
    if checkpoint is None or run.params.lora_r:
        verify_weights(model, lambda: heartbeat.note("verifying the weights"))
    context, size = None, run.params.context_parallel
    if size > 1:
        context = RankContext(context_group(size, runtime.timeout_minutes))
    trainer = Trainer(
        run.params, model, run.seq_length, run.total_steps, mesh, initialize=checkpoint is None, note=heartbeat.note,
        context=context,
    )  # fmt: skip
    place = find_place(step, trainer.attention) if is_rank0() else None
    saves = saver.Saver(runtime, runtime.timeout_minutes, print_line, confirm_lock, heartbeat.goes_on)
    if checkpoint and state:
        heartbeat.note(f"reading {checkpoint.name}")
        saver.load(checkpoint, trainer.model, trainer.optimizer, heartbeat.goes_on)
        load_scaler_state(trainer.scaler, state.loss_scaler.scale, state.loss_scaler.good_steps)
        trainer.step = step
        if place:
            print_line(f"resuming from step {step} of {run.total_steps}: {checkpoint}")
            others = differences(CheckpointManifest.read(checkpoint), state.place, place)
            if others and (device_type() == "cpu" or run.params.deterministic):
                print_line(f"the last bits may not be those of a training without interruption: {'; '.join(others)}")
    hooks = RankHooks(run, runtime, trainer, saves, checkpoint, place, stop_signal, heartbeat)
    if place:
        print_choices(run, runtime, trainer, place, model, mesh)
    return hooks


def find_valid(candidates: list[Path], run: Run, runtime: TrainRuntime, heartbeat: Heartbeat) -> Path | None:
    """The first of `candidates` that is valid, or None to start at step 0; all ranks verify them together."""

    def verify(checkpoint: Path) -> None:
        manifest = run_on_rank0(lambda: layout.verify(checkpoint, contents=False))
        files = {checkpoint / name: entry.sha256 for name, entry in manifest.files.items()}
        check_together(files, layout.REMEDY, lambda: heartbeat.note(f"verifying {checkpoint.name}"))

    def clean_up() -> None:
        for newer in list_checkpoints(run.directory):
            # Damaged: the run will publish this step again, and a rename cannot replace a directory.
            if path is None or newer.name > path.name:
                retention.quarantine(newer)
        retention.prune(run.directory, runtime.keep_checkpoints, print_line)

    path = latest_valid(candidates, print_line if is_rank0() else lambda _: None, verify)
    run_on_rank0(clean_up)
    return path


def print_choices(
    run: Run, runtime: TrainRuntime, trainer: Trainer, place: Place, model: ModelManifest, mesh: DeviceMesh
) -> None:
    """Print where the training runs, and what was chosen for it."""
    if warning := model.router_warning(run.params.lora_r):
        print_line(warning)
    attention, loss = trainer.attention, trainer.loss
    if attention.name == "padded":
        share = trainer.train_loader.padding(mesh.size()).share
        reason = f", because {attention.reason}" if attention.reason else ""
        print_line(f"attention: padded{reason}; {share:.0%} of the tokens that are computed are padding")
    elif attention.reason:
        print_line(f"attention: varlen with torch's own kernels, because {attention.reason}")
    if loss.reason:
        print_line(f"loss: {loss.name}, because {loss.reason}")
    if (steps := runtime.profile_steps) and steps[0] > run.total_steps:
        print_line(
            f"warning: runtime.profile_steps: there are no steps {steps[0]} to {steps[1]}, the last one is "
            f"{run.total_steps}"
        )
    print_line(start_line(trainer.chosen, place, mesh))
