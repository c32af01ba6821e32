"""Estimate what a training will need, before a GPU is booked for it.

Reads    data/model.json, data/tokens/train, data/tokens/validation
Writes   outputs/plan.json
Command  python -m stages.plan

The numbers follow from the manifests and the parameters alone; no weight and no token is read.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from stages.artifacts import command, outputs, publish
from stages.artifacts.command import format_gib
from stages.artifacts.dtypes import BY_NAME
from stages.artifacts.errors import StageError
from stages.artifacts.params_file import load_params
from stages.artifacts.record import Record
from stages.checkpointing.layout import checkpoint_root
from stages.model.manifest import ROUTER_LOSS_OFF, ModelManifest
from stages.tokens.packed import TRAIN, VALIDATION, PackedTokens
from stages.training.params import TrainParams, TrainRuntime

_FP32 = 4
_MOMENTS = {"adamw": 2 * _FP32, "adamw_8bit": 2 * (1 + _FP32 / 256)}
"""Bytes per parameter of the optimizer state; in 8 bits, 256 values share a scale."""

MAX_VALIDATION_SHARE = 0.2
"""Of the compute of a training; `plan` warns of more."""


@dataclass(frozen=True)
class Plan(Record):
    """Content of plan.json."""

    STAGE: ClassVar[str] = "plan"

    parameters: int
    training_rows: int
    validation_rows: int
    steps: int
    """Of the optimizer."""
    tokens_per_step: int
    tokens: int
    """Of the whole training."""
    epochs: float
    validations: int
    """During the training: before the first step, every `eval_freq` steps, and after the last one."""
    rows_per_validation: int
    validation_share: float
    """Of the compute of the training, from 0 to 1: a forward pass is a third of forward and backward pass."""
    training_state_bytes: int
    """Weights and gradients in fp32, and the moments of AdamW, of one copy of the model. Activations come on top."""
    checkpoint_bytes: int
    model_bytes: int
    """Of the exported model."""


def main() -> None:
    command.parser(__doc__).parse_args()
    params = load_params(TrainParams)
    runtime = load_params(TrainRuntime, "runtime")
    check_num_ranks(params, runtime.nproc_per_node)
    with publish.lock(outputs.PLAN):
        model = ModelManifest.read()
        plan = estimate(params, model, PackedTokens.read(TRAIN), PackedTokens.read(VALIDATION))
        plan.write(outputs.PLAN)

    # Beside the newest checkpoints there are the best one, and the one that is being written.
    disk = (runtime.keep_checkpoints + 2) * plan.checkpoint_bytes + plan.model_bytes
    print(
        f"plan: {plan.steps:,} steps, {plan.tokens:,} tokens ({plan.epochs:.2f} epochs) of a model of "
        f"{plan.parameters:,} parameters: {format_gib(plan.training_state_bytes)} of memory over the ranks that share "
        f"a copy of it, beside activations; {format_gib(disk)} of disk for checkpoints and model"
    )
    if plan.rows_per_validation:
        print(
            f"plan: {plan.validations:,} validations of {plan.rows_per_validation:,} rows: about "
            f"{plan.validation_share:.0%} of the compute of the training"
        )
    if plan.validation_share > MAX_VALIDATION_SHARE:
        print("warning: validation uses much of the time of the training; lower eval_rows or raise eval_freq")
    if model.router_loss_coef == 0:
        print(ROUTER_LOSS_OFF)
    checkpoints = _existing(checkpoint_root(params.experiment_name))
    if (free := shutil.disk_usage(checkpoints).free) < disk:
        print(f"warning: {checkpoints} has {format_gib(free)} free; set CHECKPOINT_ROOT to a larger disk")


def check_num_ranks(params: TrainParams, num_ranks: int | None) -> None:
    """Check that this number of ranks can train; None: it is not known before the training.

    Raises:
        StageError: they cannot share `total_batch_size` evenly, or be grouped as `fsdp` asks.
    """
    if num_ranks is not None:
        params.grad_accum_steps(num_ranks)
        params.fsdp.mesh_shape(num_ranks, num_ranks)
        return
    params.check_any_num_ranks()
    print(
        f"plan: the number of ranks must divide {params.total_batch_size // params.batch_size}, the quotient of "
        "total_batch_size and batch_size (runtime.nproc_per_node is null: one per GPU, or 2 on CPUs)"
    )


def estimate(params: TrainParams, model: ModelManifest, train: PackedTokens, validation: PackedTokens) -> Plan:
    """What a training of `model` with these parameters needs.

    Raises:
        StageError: the rows are too long for the model, there are too few, the model has no EOS token or no layers as
            in `fsdp.wrap_layer_cls`, or the optimizer's package is not installed.
    """
    # `plan` runs before the training, so what would fail there is refused here, without a GPU.
    if model.max_seq_length is not None and train.seq_length > model.max_seq_length:
        raise StageError(
            f"seq_length is {train.seq_length}, but {model.model_name} supports at most {model.max_seq_length} tokens"
        )
    if model.eos_token_id is None:
        raise StageError(f"{model.model_name} has no eos_token_id: set one in its generation_config.json")
    params.fsdp.wrapped_classes(model)
    params.check_optimizer()
    num_parameters, moments = model.num_parameters, _MOMENTS[params.optimizer]
    steps = params.total_steps(train.num_rows)
    validations = 1 + math.ceil(steps / params.eval_freq)
    rows_per_validation = min(validation.num_rows, params.eval_rows or validation.num_rows)
    validated, trained = validations * rows_per_validation, steps * params.total_batch_size  # rows
    tokens_per_step = params.total_batch_size * train.seq_length
    return Plan(
        parameters=num_parameters,
        training_rows=train.num_rows,
        validation_rows=validation.num_rows,
        steps=steps,
        tokens_per_step=tokens_per_step,
        tokens=steps * tokens_per_step,
        epochs=steps * params.total_batch_size / train.num_rows,
        validations=validations,
        rows_per_validation=rows_per_validation,
        validation_share=round(validated / (validated + 3 * trained), 4),
        training_state_bytes=int((2 * _FP32 + moments) * num_parameters),
        # Without the gradients: a checkpoint is between two steps, where there are none.
        checkpoint_bytes=int((_FP32 + moments) * num_parameters),
        model_bytes=BY_NAME[model.dtype].itemsize * num_parameters,
    )


def _existing(path: Path) -> Path:
    # Before the first training the directory of the checkpoints is missing, and disk_usage needs one that exists.
    return path if path.exists() else _existing(path.parent)


if __name__ == "__main__":
    command.run(main)
