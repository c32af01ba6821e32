"""Steps, tokens and disk of a training, computed from its parameters and the sizes of its data."""

import math
from dataclasses import dataclass
from typing import ClassVar

from stages.base.errors import StageError
from stages.base.files import JsonFile
from stages.base.packed import PackedTokens
from stages.model.dtypes import BY_NAME, PRECISIONS
from stages.model.manifest import ModelManifest
from stages.planning.memory_plan import FP32, MOMENTS, PeakMemory, Table
from stages.training.order import RowOrder
from stages.training.params import TrainParams


@dataclass(frozen=True)
class Source:
    """Of the rows to train on."""

    rows: int
    tokens: int
    """Of these rows."""
    share: float
    """Of the rows of each step, by `mixture`; without it, of all rows."""
    epochs: float
    """How often the training uses a row of it."""
    total_tokens: int
    """Of the whole training: of prompts and padding, too."""


@dataclass(frozen=True)
class Plan(JsonFile):
    """Content of plan.json."""

    STAGE: ClassVar[str] = "plan"

    parameters: int
    """Of the model."""
    trained_parameters: int
    """All of these, or those of the adapters beside them."""
    training_rows: int
    validation_rows: int
    steps: int
    """Of the optimizer."""
    tokens_per_step: int
    tokens: int
    """Of the whole training."""
    epochs: float
    sources: dict[str, Source]
    """None: the rows are of all files."""
    validations: int
    """During the training: before the first step, every `eval_freq` steps, and after the last one."""
    rows_per_validation: int
    validation_share: float
    """Of the compute of the training, from 0 to 1: a forward pass is a third of forward and backward pass; beside
    adapters half, as the weights need no gradients."""
    num_ranks: int
    """That `peak` and `peaks` are computed for."""
    peak: PeakMemory | None
    """Of each rank; null where it could not be measured."""
    peaks: Table | None
    """Bytes of each rank at the peak of a step, by `activation_checkpointing` and `batch_size`; null where
    `plan.gpu_memory_gb` is."""
    checkpoint_bytes: int
    model_bytes: int
    """Of the exported model and its adapters."""


def estimate(
    params: TrainParams, model: ModelManifest, train: PackedTokens, validation: PackedTokens, export_dtype: str | None
) -> Plan:
    """What a training of `model` with these parameters needs, and the model that is exported in `export_dtype`.

    Raises:
        StageError: the rows are too long for the model, there are too few, the model has no layers as in
            `fsdp.wrap_layer_cls`, fp8 refuses the tokens of a pass, or the optimizer's package is not installed.
    """
    # `plan` runs before the training, so what would fail there is refused here, without a GPU.
    if model.max_seq_length is not None and train.seq_length > model.max_seq_length:
        raise StageError(
            f"seq_length is {train.seq_length}, but {model.model_name} supports at most {model.max_seq_length} tokens"
        )
    params.fsdp.wrapped_classes(model)
    params.check_compile(model)
    params.check_lora(model)
    params.check_tokens(train.seq_length)
    params.check_packages()
    trained_parameters, moments = params.num_trained(model), MOMENTS[params.optimizer]
    order = RowOrder(params, train.num_rows, train.sources)
    steps = params.total_steps(order.num_rows)
    order.check_repeats(steps)
    epochs, shares = order.epochs(steps), order.shares
    validations = 1 + math.ceil(steps / params.eval_freq)
    held_out = validation.sources.values() or [validation.num_rows]
    rows_per_validation = sum(min(num_rows, params.eval_rows or num_rows) for num_rows in held_out)
    validated, trained = validations * rows_per_validation, steps * params.total_batch_size  # rows
    tokens_per_step = params.total_batch_size * train.seq_length
    return Plan(
        parameters=model.num_parameters,
        trained_parameters=trained_parameters,
        training_rows=train.num_rows,
        validation_rows=validation.num_rows,
        steps=steps,
        tokens_per_step=tokens_per_step,
        tokens=steps * tokens_per_step,
        epochs=steps * params.total_batch_size / order.num_rows,
        sources={
            name: Source(
                rows=num_rows,
                tokens=num_rows * train.seq_length,
                share=round(shares.get(name, 0.0), 6),
                epochs=round(epochs.get(name, 0.0), 4),
                total_tokens=round(epochs.get(name, 0.0) * num_rows) * train.seq_length,
            )
            for name, num_rows in train.sources.items()
        },
        validations=validations,
        rows_per_validation=rows_per_validation,
        validation_share=round(validated / (validated + (2 if params.lora_r else 3) * trained), 4),
        num_ranks=0,
        peak=None,
        peaks=None,
        # Without the gradients: a checkpoint is between two steps, where there are none.
        checkpoint_bytes=int((FP32 + moments) * trained_parameters),
        model_bytes=BY_NAME[PRECISIONS[export_dtype] if export_dtype else model.dtype].itemsize * model.num_parameters
        + (FP32 * trained_parameters if params.lora_r else 0),
    )
