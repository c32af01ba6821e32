"""A training a step at a time, on any ranks: what `stages.train` does between two lines of its output."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from stages.base.params_file import load_params
from stages.building import sharded_model
from stages.checkpointing import saver
from stages.checkpointing.layout import CheckpointManifest
from stages.checkpointing.state import ScalerState, TrainState
from stages.forward.batch import count_labels, make_batch
from stages.forward.distributed import all_reduce_sum
from stages.launching.runtime import TrainRuntime
from stages.ranks.process_group import device_mesh
from stages.training.optimizer import make_optimizer, set_lr
from stages.training.params import TrainParams
from stages.training.precision import load_scaler_state, make_grad_scaler, scaler_state
from stages.training.step import StepResult, UnreadStep, train_step
from tests.models import full_value, manifest_of
from tests.project import REPO
from tests.trainings import checkpoint_manifest, train_state

TIMEOUT_MINUTES = 7


def changed(params: TrainParams, fsdp: dict[str, Any] | None = None, **values: Any) -> TrainParams:
    return dataclasses.replace(params, fsdp=dataclasses.replace(params.fsdp, **fsdp or {}), **values)


class Training:
    """A few steps of one model, as `stages.train` makes them."""

    def __init__(self, directory: Path, params: TrainParams, initialize: bool = True) -> None:
        self.params = params
        mesh = device_mesh(params.fsdp.mesh_shape(dist.get_world_size(), dist.get_world_size()), TIMEOUT_MINUTES)
        self.model = sharded_model.build(manifest_of(directory, with_weights=True), params, mesh, initialize)
        self.optimizer = make_optimizer(self.model, params)
        self.scaler = make_grad_scaler(params.precision, next(self.model.parameters()).device)
        runtime = load_params(TrainRuntime, "runtime", path=REPO / "params.yaml")
        self.saver = saver.Saver(dataclasses.replace(runtime, async_checkpoint=True), TIMEOUT_MINUTES)
        self.step = 0

    def train(self, steps: int) -> list[tuple[float | None, float | None]]:
        results = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(10 * self.step + dist.get_rank())
            rows = [torch.randint(0, 101, (2, 16), generator=generator) for _ in range(2)]
            lengths = self.params.attention == "varlen"
            batches = [make_batch(part, 0, document_mask=True, lengths=lengths) for part in rows]
            (num_labels,) = all_reduce_sum(sum(map(count_labels, batches)))
            for group in self.optimizer.param_groups:
                set_lr(group, self.params.lr / (1 + self.step))
            results.append(self.train_step(batches, int(num_labels)))
            self.step += 1
        return results

    def queue_step(self, batches: list[dict[str, torch.Tensor]], num_labels: int) -> UnreadStep:
        numbers = train_step(self.model, self.optimizer, self.scaler, batches, num_labels, self.params)
        return UnreadStep(self.step + 1, num_labels, numbers)

    def train_step(self, batches: list[dict[str, torch.Tensor]], num_labels: int) -> StepResult:
        unread = self.queue_step(batches, num_labels)
        own_loss, grad_norm = unread.read()
        return unread.result(*all_reduce_sum(own_loss), grad_norm)

    def save(self, directory: Path) -> None:
        state = train_state(ScalerState(*scaler_state(self.scaler)))
        self.saver.save(directory, self.model, self.optimizer, state, {}, checkpoint_manifest(step=self.step))
        self.saver.wait()

    def load(self, directory: Path) -> None:
        saver.load(directory, self.model, self.optimizer)
        state = TrainState.of(directory)
        self.step = CheckpointManifest.read(directory).step
        load_scaler_state(self.scaler, state.loss_scaler.scale, state.loss_scaler.good_steps)

    def trained(self) -> dict[str, torch.Tensor]:
        """The full values of what is trained, and of its first moments."""
        params = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        moments = {f"{name} exp_avg": self.optimizer.state[param]["exp_avg"] for name, param in params.items()}
        return {name: full_value(value.detach()) for name, value in (params | moments).items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's part of the weights and of the state of the optimizer."""
        tensors = {name: param.detach() for name, param in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            tensors |= {f"{name} {key}": value for key, value in self.optimizer.state[param].items()}
        local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in tensors.items()}
        return {name: value.dequantize() if hasattr(value, "codes") else value for name, value in local.items()}
