"""The loop of the training: one rank of it, from the process group to the last checkpoint."""

import dataclasses
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR

from stages.artifacts.errors import StageError
from stages.artifacts.history import HISTORY, SPEED, History, Table
from stages.artifacts.identity import Adoption
from stages.checkpointing import layout, retention
from stages.checkpointing.layout import FORMAT, CheckpointManifest, latest_valid, list_checkpoints, step_name
from stages.checkpointing.lock import rank_lock, read_lock, writer_lock
from stages.model.manifest import ROUTER_LOSS_OFF, ModelManifest
from stages.tokens.attention_names import NEED_LENGTHS
from stages.tokens.document_mask import choose_attention
from stages.tokens.loss_probe import choose_loss
from stages.tokens.packed import REMEDY, TRAIN, VALIDATION, PackedTokens
from stages.tokens.rows import TokenRows
from stages.training import flops, handoff, saver, sharded_model, trackers
from stages.training.agreement import check_shared, refuse_different_ranks
from stages.training.console import Console, log_to, print_line
from stages.training.determinism import use_deterministic_algorithms
from stages.training.distributed import (
    all_reduce_sum,
    device_mesh,
    device_type,
    is_rank0,
    process_group,
    run_on_rank0,
)
from stages.training.environment import set_environment
from stages.training.loader import BatchLoader
from stages.training.memory import remedies
from stages.training.metrics import SPEED_COLUMNS, MetricsLogger
from stages.training.optimizer import make_optimizer, set_lr
from stages.training.params import TrainRuntime
from stages.training.precision import (
    check_precision,
    compute_dtype,
    load_scaler_state,
    make_grad_scaler,
    scaler_state,
    set_float32_precision,
)
from stages.training.profiler import Profiler
from stages.training.run import (
    Run,
    adoption,
    packages,
    read_run,
    resume_candidates,
    start_over,
    validates_same_rows,
)
from stages.training.schedule import lr_ratio
from stages.training.signals import StopSignal
from stages.training.start_line import start_line
from stages.training.state import Cost, TrainState
from stages.training.step import StepResult, UnreadStep, train_step, validation_loss
from stages.training.timers import Timers, memory_gib
from stages.training.torch_errors import explain_torch_errors
from stages.training.verification import check_together
from stages.training.watchdog import Heartbeat, watched

_LOG = logging.getLogger("stages.train")


class Trainer:
    """The state of a training, and its loop."""

    def __init__(
        self, run: Run, runtime: TrainRuntime, mesh: DeviceMesh, stop_signal: StopSignal, heartbeat: Heartbeat,
        confirm_lock: Callable[[], None],
    ) -> None:  # fmt: skip
        self.run, self.params, self.runtime = run, run.params, runtime
        self.stop_signal, self.heartbeat = stop_signal, heartbeat
        model_manifest = ModelManifest.read()
        if is_rank0() and model_manifest.router_loss_coef == 0:
            print_line(ROUTER_LOSS_OFF)
        eos_token_id = model_manifest.eos_token_id
        assert eos_token_id is not None, "pack refuses a model without one"
        # Before the seeds are set, because the tests seed torch itself; on one rank, as the answer is the same on all.
        attention = run_on_rank0(
            lambda: choose_attention(
                self.params.attention, model_manifest.directory(), self.params.document_mask, run.seq_length,
                compute_dtype(self.params.precision), device_type(),
            )
        )  # fmt: skip
        loss = run_on_rank0(
            lambda: choose_loss(
                self.params.loss, model_manifest.directory(), compute_dtype(self.params.precision), device_type()
            )
        )
        if is_rank0() and loss.reason:
            print_line(f"loss: {loss.name}, because {loss.reason}")
        # Dropout must differ between ranks, which train on different rows. Times the number of ranks: seed + rank would
        # give rank 1 of seed 0 the masks of rank 0 of seed 1.
        torch.manual_seed(self.params.seed * dist.get_world_size() + dist.get_rank())

        self.verify_tokens()  # before they are opened: pyarrow may fail in any way at damaged ones
        train_rows = TokenRows(TRAIN)
        lengths = attention in NEED_LENGTHS
        self.train_loader = BatchLoader(train_rows, self.params, eos_token_id, lengths)
        self.validation_loader = BatchLoader(TokenRows(VALIDATION), self.params, eos_token_id, lengths)
        heartbeat.note("choosing the checkpoint to start from")
        candidates = run_on_rank0(self.list_candidates)
        # Another run may be training: what this one adopts must stay until it is loaded.
        with read_lock({path.parent for path in candidates} - {run.directory}):
            # Before the model is built: where there is a checkpoint, the weights of the model files are not read.
            start = self.find_start(candidates)
            heartbeat.note("building the model")
            chosen = dataclasses.replace(self.params, attention=attention, loss=loss.name)
            self.model = sharded_model.build(
                model_manifest, chosen, mesh, initialize=start is None,
                note=lambda: heartbeat.note("building the model, verifying its weights"),
            )  # fmt: skip
            self.optimizer = make_optimizer(self.model, self.params)
            self.scaler = make_grad_scaler(self.params.precision, next(self.model.parameters()).device)
            self.scheduler = LambdaLR(self.optimizer, lambda step: lr_ratio(self.params, run.total_steps, step))
            self.saver = saver.Saver(runtime, confirm_lock)

            self.step = 0
            self.unread: deque[UnreadStep] = deque()
            """The newest steps, whose numbers are not read yet."""
            # On a GPU the numbers of a step are read when the next one is queued: the GPU always has something to do.
            self.max_unread = 1 if device_type() == "cuda" else 0
            self.adopted: Adoption | None = None
            self.validation_loss: float | None = None
            """Of this very step, if this run has validated it."""
            self.saved_step: int | None = None
            self.saved_at = time.monotonic()
            state, history, speed = (None, History(), "") if start is None else self.resume(start)
        self.tracker = trackers.start_tracker(runtime.tracker if is_rank0() else "none", run, self.step)
        profile_steps = runtime.profile_steps if is_rank0() else None
        if profile_steps and profile_steps[0] > run.total_steps:
            steps = f"{profile_steps[0]} to {profile_steps[1]}"
            print_line(f"warning: runtime.profile_steps: there are no steps {steps}, the last one is {run.total_steps}")
        self.profiler = Profiler(profile_steps, run.log_directory / "profile" / run.run_id)
        self.timers = Timers(lambda phase: heartbeat.note(f"step {self.step + 1}, {phase}"))
        self.metrics = MetricsLogger(
            run, runtime.log_freq, Console(dist.get_rank(), self.step, run.total_steps), self.tracker, self.timers,
            flops.flops_per_token(self.model, train_rows.seq_length), history, Table(SPEED_COLUMNS, speed),
            state.metrics if state else None,
        )  # fmt: skip
        if is_rank0():
            print_line(start_line(chosen, mesh))

    def train(self) -> bool:
        """Train to the last step; False where a signal asked to stop before. Either way the state is saved."""
        self.model.train()
        with self.saver, closing(self.train_loader), self.profiler:
            if self.step == 0:  # the loss before training, with which `evaluate` compares
                self.report(0, StepResult(loss=None, grad_norm=None))
            while self.step < self.run.total_steps:
                self.profiler.before_step(self.step + 1)
                batches, num_labels, must_stop, must_save = self.next_batches()
                if must_stop:
                    break
                if must_save:  # the step before this one; its batches are already there, but draw no random numbers
                    self.save()
                self.train_step(batches, num_labels)
                if self.is_time_to_validate(self.step):
                    self.catch_up()  # and validate
            self.save()  # where a save has failed on any rank, all raise here, as they left the loop at the same step
        self.metrics.console.close()
        return self.step == self.run.total_steps

    def next_batches(self) -> tuple[list[dict[str, Tensor]], int, bool, bool]:
        """This rank's batches, the labels of all ranks in this step, and whether to stop or to save before it.

        What one rank knows, all must know at the same step: a signal reaches one process, a save fails on one rank,
        and the clock for saving is that of rank 0. A rank that acted alone would leave the others waiting in the next
        collective.
        """
        with self.timers.phase("data"):
            batches, num_labels = self.train_loader.step_batches(self.step)
            unread = self.unread.popleft() if len(self.unread) > self.max_unread else None
            (num_labels_of_all, stop, failed, save), result = self.exchange(
                unread, num_labels, self.stop_signal.received, self.saver.failed, self.is_time_to_save()
            )
        if unread and result:
            self.report(unread.step, result)
        return batches, int(num_labels_of_all), bool(stop or failed), bool(save)

    def catch_up(self) -> None:
        """Report all steps until this one, and validate where it is due."""
        while self.unread:
            unread = self.unread.popleft()
            _, result = self.exchange(unread, 0, False, False, False)
            assert result
            self.report(unread.step, result)

    def exchange(
        self, unread: UnreadStep | None, num_labels: int, stop: bool, failed: bool, save: bool
    ) -> tuple[list[float], StepResult | None]:
        """Sum the numbers over the ranks, and what a step has measured.

        The one collective of a few numbers in a step. On GPUs it passes while they compute the step before. There are
        always as many numbers, so that gloo adds the losses in the same order, wherever a training is resumed.
        """
        own_loss, grad_norm = 0.0, None
        if unread:
            self.heartbeat.note(f"step {unread.step}, reading its loss")
            with self.explained(unread.step):
                own_loss, grad_norm = unread.read()
        self.heartbeat.note(f"step {self.step + 1}, agreeing with the other ranks")
        *numbers, loss = all_reduce_sum(num_labels, stop, failed, save, own_loss)
        return numbers, unread.result(loss, grad_norm) if unread else None

    def train_step(self, batches: list[dict[str, Tensor]], num_labels: int) -> None:
        """Update the weights with one step."""
        with self.explained(self.step + 1):
            numbers = train_step(self.model, self.optimizer, self.scaler, batches, num_labels, self.params, self.timers)
        self.scheduler.step()
        self.step += 1
        self.validation_loss = None
        self.unread.append(UnreadStep(self.step, num_labels, numbers))

    @contextmanager
    def explained(self, step: int) -> Iterator[None]:
        """Have errors name the step, and the checkpoint from which the next launch resumes."""
        try:
            yield
        except StageError as error:
            saved = self.saved_step
            newest = f"the newest checkpoint is of step {saved}" if saved else "no checkpoint is saved yet"
            raise StageError(f"step {step}: {error}; {newest}") from None

    def is_time_to_validate(self, step: int) -> bool:
        """Whether a validation is due after a step."""
        return step % self.params.eval_freq == 0 or step == self.run.total_steps

    def validate(self) -> None:
        """Measure the loss on the validation rows."""
        loader, console = self.validation_loader, self.metrics.console
        with self.timers.phase("validation"):
            self.validation_loss = validation_loss(
                self.model,
                console.progress(loader.validation_batches(), loader.num_validation_batches, "validation"),
                before_forward=lambda: self.heartbeat.note(f"validation after step {self.step}"),
            )
        if self.validation_loss is not None:
            num_rows = len(loader.validation_rows)
            console.line(f"step {self.step}: validation loss {self.validation_loss:.4f} ({num_rows:,} rows)")

    def report(self, step: int, result: StepResult) -> None:
        """Report a step, and the validation after it, which is made here where it is due."""
        is_validated = self.is_time_to_validate(step)
        if is_validated:
            assert step == self.step, "`catch_up` reports it before the next step"
            self.validate()
        if self.runtime.debug and step:
            rows = self.train_loader.step_indices(step - 1).tolist()
            now, peak = memory_gib()
            _LOG.debug(
                f"step {step} done: rows {rows}, loss {result.loss!r}, grad norm {result.grad_norm!r}, "
                f"memory {now:.3f} GiB, peak {peak:.3f} GiB"
            )
        self.metrics.log(step, result, self.validation_loss if is_validated else None, is_validated)

    def verify_tokens(self) -> None:
        """Compare the packed tokens with their digests, a share on each rank; all ranks raise the same."""
        digests = PackedTokens.read(TRAIN).digests | PackedTokens.read(VALIDATION).digests
        check_together(digests, REMEDY, lambda: self.heartbeat.note("verifying the tokens"))

    def list_candidates(self) -> list[Path]:
        """The checkpoints that the run may continue from, best first. Called on rank 0 alone."""
        if self.runtime.resume == "never" and handoff.is_first_start():
            start_over(self.run)
        return resume_candidates(self.run, self.runtime, print_line)

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

    def resume(self, path: Path) -> tuple[TrainState, History, str]:
        """Continue from a checkpoint of this run, or of one that it adopts or extends.

        Returns:
            Its state, its history, and the content of its speed.tsv, "" if it is of another run.
        """
        state = saver.load(path, self.model, self.optimizer, self.scheduler)
        history = History((path / HISTORY).read_text(encoding="utf-8"))
        manifest = CheckpointManifest.read(path)
        load_scaler_state(self.scaler, state.loss_scaler)
        self.step, self.adopted, self.validation_loss = state.step, manifest.adopted, manifest.validation_loss
        if path.parent == self.run.directory:
            self.saved_step = self.step  # nothing to publish before the next step
            speed = (path / SPEED).read_text(encoding="utf-8")
        else:
            speed = ""
            self.adopted, self.validation_loss = adoption(self.run, manifest), None
            metrics = dataclasses.replace(state.metrics, cost=Cost())  # time and memory of this run alone
            if not validates_same_rows(self.run, manifest):  # losses on other rows, which nobody may compare with ours
                history = history.without("validation_loss")
                metrics = dataclasses.replace(metrics, validation_loss=None)
            state = dataclasses.replace(state, metrics=metrics)
            # From here on the learning rate is this run's, also where an extended run had another one until here. Its
            # `lr` is in the state of its scheduler too.
            self.scheduler.base_lrs = [self.params.lr] * len(self.optimizer.param_groups)
            for group in self.optimizer.param_groups:
                set_lr(group, self.params.lr * lr_ratio(self.params, self.run.total_steps, self.step))
        if is_rank0():
            print_line(f"resuming from step {self.step} of {self.run.total_steps}: {path}")
        return state, history, speed

    def is_time_to_save(self) -> bool:
        """Whether rank 0, whose clock counts, wants a checkpoint of this step; False on the other ranks."""
        if not is_rank0():
            return False
        if self.is_best():
            return True
        freq, minutes = self.runtime.ckpt_freq, self.runtime.ckpt_minutes
        by_step = freq is not None and self.step % freq == 0
        return by_step or (minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes)

    def is_best(self) -> bool:
        """Whether this step is the one to export, unless a later one is better.

        Then it is saved, whatever `runtime` says of checkpoints, so that the result does not depend on that.
        """
        is_measured = self.params.export_from == "best" and self.validation_loss is not None
        return is_measured and self.metrics.history.best_step(self.adopted) == self.step

    def save(self) -> None:
        """Publish a checkpoint of this step, unless there is one, or nothing was trained yet.

        Raises:
            StageError: this step, or one before it, has failed; or the save, or the one before it.
        """
        self.catch_up()  # the checkpoint has their history, and none that is not finite
        if self.step in (0, self.saved_step):
            return
        self.heartbeat.note(f"saving step {self.step}")
        state = TrainState(
            step=self.step,
            epoch=self.step * self.params.total_batch_size / self.run.num_rows,
            metrics=self.metrics.snapshot(),
            loss_scaler=scaler_state(self.scaler),
            rng=[],
        )
        manifest = CheckpointManifest(
            format=FORMAT,
            run_id=self.run.run_id,
            step=self.step,
            total_steps=self.run.total_steps,
            identity=self.run.identity,
            validation_loss=self.validation_loss,
            adopted=self.adopted,
            packages=packages(),
            files={},
            tensors={},
        )
        path = self.run.directory / step_name(self.step)
        tables = {HISTORY: self.metrics.history.text(), SPEED: self.metrics.speed.text()}
        with self.timers.phase("saving"):
            self.saver.save(path, self.model, self.optimizer, self.scheduler, state, tables, manifest)
        self.saved_step, self.saved_at = self.step, time.monotonic()


def train(stop_signal: StopSignal) -> bool:
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
    run, runtime = read_run()
    set_environment(run.params)
    set_float32_precision(run.params.tf32)
    if run.params.deterministic:
        use_deterministic_algorithms()
    check_precision(run.params, run.seq_length)
    trackers.check(runtime.tracker)
    run.params.check_packages()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run.params.grad_accum_steps(world_size)
    mesh_shape = run.params.fsdp.mesh_shape(world_size, int(os.environ["LOCAL_WORLD_SIZE"]))
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
        process_group(runtime.timeout_minutes),
    ):
        refuse_different_ranks(run, runtime)  # before the mesh, which each rank makes from its own parameters
        run_on_rank0(lambda: refuse_second_training(run, locks))
        for warning in check_shared(run.directory):
            if is_rank0():
                print_line(warning)
        confirm_lock = locks.enter_context(rank_lock(run.directory))
        with watched(heartbeat, runtime.timeout_minutes, runtime.debug):
            mesh = device_mesh(mesh_shape, runtime.timeout_minutes)
            trainer = Trainer(run, runtime, mesh, stop_signal, heartbeat, confirm_lock)
            stop_signal.training_starts()
            with closing(trainer.tracker):
                return trainer.train()


def refuse_second_training(run: Run, locks: ExitStack) -> None:
    """Lock the directory of a run, unless a launcher of ours has done so. Called on rank 0 alone.

    Raises:
        StageError: another training writes into it.
    """
    if not handoff.has_launcher():
        locks.enter_context(writer_lock(run.directory, print_line))
