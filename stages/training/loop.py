"""The loop of the training: one rank of it, from the model to the last step.

All that decides the weights is here, or is called from here. What a training does beside that (find a checkpoint, save,
report, stop) comes from outside, as `Hooks`: stages/launching/hooks.py.
"""

import dataclasses
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stages.base.packed import TRAIN, VALIDATION
from stages.base.splitmix64 import next_value
from stages.building import sharded_model
from stages.building.sharding import compute_dtype
from stages.forward.attention import activate_kernels
from stages.forward.attention_choice import choose_attention
from stages.forward.context import Context
from stages.forward.distributed import all_reduce_sum, device_type, run_on_rank0
from stages.forward.loss import choose_loss
from stages.forward.rope import fix_tables
from stages.forward.rows import TokenRows
from stages.model.manifest import ModelManifest
from stages.training.loader import BatchLoader
from stages.training.optimizer import make_optimizer, set_lr
from stages.training.params import TrainParams
from stages.training.precision import make_grad_scaler
from stages.training.schedule import learning_rate
from stages.training.step import StepResult, UnreadStep, Validation, train_step, validate


class Hooks(Protocol):
    """What a training asks of whoever runs it, on each rank. None of it changes a weight."""

    def note(self, activity: str) -> None:
        """This rank starts another activity."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around a part of a step."""

    def explained(self, step: int) -> AbstractContextManager[None]:
        """Around what may fail with a `StageError` because of the numbers of a step."""

    def before_step(self, step: int) -> None:
        """A step starts."""

    def wishes(self) -> tuple[bool, bool]:
        """Whether this rank wants to stop, and to save, before the next step. All do what one of them wants."""

    def report(self, step: int, result: StepResult, validation: Validation | None) -> None:
        """What a step has measured, and the validation after it; step 0: before the training."""

    def save(self) -> None:
        """Save the state of all ranks; a collective."""


class Trainer:
    """Model, optimizer and data of a training."""

    def __init__(
        self, params: TrainParams, manifest: ModelManifest, seq_length: int, total_steps: int, mesh: DeviceMesh,
        initialize: bool, note: Callable[[str], None], context: Context | None,
    ) -> None:  # fmt: skip
        """A collective.

        Args:
            params: Those of the training.
            manifest: The model manifest.
            seq_length: Tokens per row.
            total_steps: Of the whole training.
            mesh: The ranks of each copy of the model are its last axis.
            initialize: Whether to fill the weights, from files that are verified; a checkpoint fills them otherwise.
            note: Called before what may take long, and says what it is.
            context: The ranks that share each row with this one; None: there are none.
        """
        self.params, self.total_steps = params, total_steps
        eos_token_id = manifest.eos_token_id
        directory, dtype = manifest.directory(), compute_dtype(params.precision)
        # On one rank, as the answer is the same on all.
        self.attention = run_on_rank0(
            lambda: choose_attention(
                params.attention, directory, params.document_mask, seq_length, dtype, device_type(),
                params.context_parallel,
            )
        )  # fmt: skip
        activate_kernels(self.attention.kernels)
        self.loss = run_on_rank0(lambda: choose_loss(params.loss, directory))
        self.chosen = dataclasses.replace(params, attention=self.attention.name, loss=self.loss.name)
        """The parameters, with the attention and the loss that were chosen."""

        router_loss = bool(manifest.router_loss_coef)
        self.train_loader = BatchLoader(TokenRows(TRAIN), self.chosen, eos_token_id, router_loss, context)
        self.validation_loader = BatchLoader(TokenRows(VALIDATION), self.chosen, eos_token_id, router_loss, context)
        note("building the model")
        self.model = sharded_model.build(
            manifest, self.chosen, mesh, initialize=initialize, note=lambda: note("making the weights")
        )
        fix_tables(self.model, seq_length)
        self.optimizer = make_optimizer(self.model, params)
        self.scaler = make_grad_scaler(params.precision, next(self.model.parameters()).device)

        self.step = 0
        """The newest step that is done, so as well how many are; 0: none."""
        self.validation: Validation | None = None
        """Of this very step."""
        self._unread: deque[UnreadStep] = deque()
        """The newest steps, whose numbers are not read yet."""
        # On a GPU the numbers of a step are read when the next one is queued: the GPU always has something to do.
        self.max_unread = 1 if device_type() == "cuda" else 0

    def train(self, hooks: Hooks) -> bool:
        """Train to the last step; False where a rank wanted to stop before. Either way the state is saved."""
        self._hooks = hooks
        self.model.train()
        with closing(self.train_loader):
            if self.step == 0:  # the loss before training, with which `evaluate` compares
                self._report(0, StepResult(loss=None, grad_norm=None))
            while self.step < self.total_steps:
                hooks.before_step(self.step + 1)
                batches, num_labels, must_stop, must_save = self._next_batches()
                if must_stop:
                    break
                if must_save:  # the step before this one
                    hooks.save()
                self._train_step(batches, num_labels)
                if self._must_validate(self.step):
                    self.catch_up()  # and validate
            hooks.save()  # where a save has failed on any rank, all raise here, as they left the loop at the same step
        return self.step == self.total_steps

    def catch_up(self) -> None:
        """Report all steps until this one, and validate where it is due; a collective."""
        while self._unread:
            unread = self._unread.popleft()
            *_, result = self._agree(unread)
            assert result
            self._report(unread.step, result)

    def _next_batches(self) -> tuple[list[dict[str, Tensor]], int, bool, bool]:
        """This rank's batches, the labels of all ranks in this step, and whether to stop or to save before it.

        What one rank knows, all must know at the same step: a signal reaches one process, a save fails on one rank,
        and the clock for saving is that of rank 0. A rank that acted alone would leave the others waiting in the next
        collective.
        """
        with self._hooks.phase("data"):
            batches, num_labels = self.train_loader.step_batches(self.step)
            unread = self._unread.popleft() if len(self._unread) > self.max_unread else None
            num_labels_of_all, must_stop, must_save, result = self._agree(unread, num_labels, *self._hooks.wishes())
        if unread and result:
            self._report(unread.step, result)
        return batches, num_labels_of_all, must_stop, must_save

    def _agree(
        self, unread: UnreadStep | None, num_labels: int = 0, stop: bool = False, save: bool = False
    ) -> tuple[int, bool, bool, StepResult | None]:
        """The labels of all ranks, whether one wants to stop or to save, and what the step `unread` has measured.

        The one collective of a few numbers in a step. On GPUs it passes while they compute the step before. There are
        always as many numbers, so that gloo adds the losses in the same order, wherever a training is resumed.
        """
        own_loss, grad_norm = 0.0, None
        if unread:
            self._hooks.note(f"step {unread.step}, reading its loss")
            with self._hooks.explained(unread.step):
                own_loss, grad_norm = unread.read()
        self._hooks.note(f"step {self.step + 1}, agreeing with the other ranks")
        num_labels_of_all, num_stop, num_save, loss = all_reduce_sum(num_labels, stop, save, own_loss)
        result = unread.result(loss, grad_norm) if unread else None
        return int(num_labels_of_all), num_stop > 0, num_save > 0, result

    def _train_step(self, batches: list[dict[str, Tensor]], num_labels: int) -> None:
        """Update the weights with one step.

        Its learning rate and its random numbers are functions of the step: a checkpoint has the state of neither.
        """
        for group in self.optimizer.param_groups:
            set_lr(group, learning_rate(self.params, self.total_steps, self.step))
        torch.manual_seed(dropout_seed(self.params.seed, self.step, dist.get_rank()))
        with self._hooks.explained(self.step + 1):
            numbers = train_step(
                self.model, self.optimizer, self.scaler, batches, num_labels, self.params, self._hooks.phase
            )
        self.step += 1
        self.validation = None
        self._unread.append(UnreadStep(self.step, num_labels, numbers))

    def _must_validate(self, step: int) -> bool:
        """Whether a validation is due after a step."""
        return step % self.params.eval_freq == 0 or step == self.total_steps

    def _report(self, step: int, result: StepResult) -> None:
        """Report a step, and the validation after it, which is made here where it is due."""
        if self._must_validate(step):
            assert step == self.step, "`catch_up` reports it before the next step"
            self.validate(self._hooks)
        self._hooks.report(step, result, self.validation if step == self.step else None)

    def validate(self, hooks: Hooks) -> None:
        """Measure the loss on the validation rows; a collective."""
        loader = self.validation_loader
        with hooks.phase("validation"):
            self.validation = validate(
                self.model,
                loader.validation_batches(),
                {source: len(rows) for source, rows in loader.validation_rows.items()},
                before_forward=lambda: hooks.note(f"validation after step {self.step}"),
            )


def dropout_seed(seed: int, steps_done: int, dp_rank: int) -> int:
    """What seeds torch before a step, so that each rank has other masks in each step: they train on other rows."""
    state = np.zeros(1, np.uint64)
    for number in (seed, steps_done, dp_rank):
        state = next_value(state ^ np.uint64(number))
    return int(state[0])
