"""Estimate what a training will need, before a GPU is booked for it.

Reads    data/model.json, data/tokens/train, data/tokens/validation
Writes   outputs/<experiment_name>/plan.json
Command  python -m stages.plan

The numbers follow from the manifests and the parameters alone; no weight and no token is read.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from stages.artifacts import command
from stages.artifacts.command import format_gib
from stages.artifacts.dtypes import BY_NAME
from stages.artifacts.errors import StageError
from stages.artifacts.params_file import load_params
from stages.artifacts.record import Record
from stages.checkpointing.layout import checkpoint_root
from stages.model.manifest import ModelManifest
from stages.tokens.packed import TRAIN, VALIDATION, PackedTokens
from stages.training.params import TrainParams, TrainRuntime

_FP32 = 4
_MOMENTS = {"adamw": 2 * _FP32, "adamw_8bit": 2 * (1 + _FP32 / 256)}
"""Bytes per parameter of the optimizer state; in 8 bits, 256 values share a scale."""


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
    training_state_bytes: int
    """Weights and gradients in fp32, and the moments of AdamW, of one copy of the model. Activations come on top."""
    checkpoint_bytes: int
    model_bytes: int
    """Of the exported model."""


def main() -> None:
    command.parser(__doc__).parse_args()
    params = load_params(TrainParams)
    runtime = load_params(TrainRuntime, "runtime")
    plan = estimate(params, ModelManifest.read(), PackedTokens.read(TRAIN), PackedTokens.read(VALIDATION))
    plan.write(Path("outputs") / params.experiment_name / "plan.json")

    # Beside the newest checkpoints there are the best one, and the one that is being written.
    disk = (runtime.keep_checkpoints + 2) * plan.checkpoint_bytes + plan.model_bytes
    print(
        f"plan: {plan.steps:,} steps, {plan.tokens:,} tokens ({plan.epochs:.2f} epochs) of a model of "
        f"{plan.parameters:,} parameters: {format_gib(plan.training_state_bytes)} of memory over the ranks that share "
        f"a copy of it, beside activations; {format_gib(disk)} of disk for checkpoints and model"
    )
    checkpoints = _existing(checkpoint_root(params.experiment_name))
    if (free := shutil.disk_usage(checkpoints).free) < disk:
        print(f"warning: {checkpoints} has {format_gib(free)} free; set CHECKPOINT_ROOT to a larger disk")


def estimate(params: TrainParams, model: ModelManifest, train: PackedTokens, validation: PackedTokens) -> Plan:
    """What a training of `model` with these parameters needs.

    Raises:
        StageError: the rows are too long for the model, there are too few, or the model has no EOS token.
    """
    # `plan` runs before the training, so what would fail there is refused here, without a GPU.
    if model.max_seq_length is not None and train.seq_length > model.max_seq_length:
        raise StageError(
            f"seq_length is {train.seq_length}, but {model.model_name} supports at most {model.max_seq_length} tokens"
        )
    if model.eos_token_id is None:
        raise StageError(f"{model.model_name} has no eos_token_id: set one in its generation_config.json")
    num_parameters, moments = model.num_parameters, _MOMENTS[params.optimizer]
    steps = params.total_steps(train.num_rows)
    tokens_per_step = params.total_batch_size * train.seq_length
    return Plan(
        parameters=num_parameters,
        training_rows=train.num_rows,
        validation_rows=validation.num_rows,
        steps=steps,
        tokens_per_step=tokens_per_step,
        tokens=steps * tokens_per_step,
        epochs=steps * params.total_batch_size / train.num_rows,
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
