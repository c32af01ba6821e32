"""What the train stage is told: `TrainParams` (watched by DVC) and `TrainRuntime` (never changes the result)."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from stages.artifacts.command import StageError
from stages.artifacts.params import forbid_unknown

Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


@forbid_unknown
@dataclass(frozen=True)
class FsdpParams:
    """How the model is spread over the ranks."""

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP"]
    """FULL_SHARD frees the gathered weights of a layer after its forward pass, SHARD_GRAD_OP keeps them for the
    backward pass: more memory, less communication. Gradients and optimizer state are sharded in both."""


@dataclass(frozen=True)
class TrainParams:
    """The leaves of `params.yaml` that decide what is learnt."""

    experiment_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the directory under outputs/."""
    seed: NonNegativeInt
    """Fixes the order of the rows, random weights and dropout."""
    initial_weights: Literal["auto", "pretrained", "random"]
    """Where the weights come from; the model manifest lists the files, or none for random weights."""
    batch_size: PositiveInt
    """Rows per device and forward pass."""
    total_batch_size: PositiveInt
    """Rows per optimizer step, over all devices and forward passes."""
    num_epochs: PositiveInt
    """Passes over the training rows."""
    max_steps: PositiveInt | None
    """A limit below `num_epochs`, in optimizer steps; null for none."""
    lr: PositiveFloat
    """Peak learning rate."""
    lr_schedule: Literal["cosine", "linear", "constant"]
    """Shape of the learning rate after the warm-up."""
    lr_decay_steps: PositiveInt | None
    """Optimizer steps, warm-up included, until the lowest learning rate; null: the whole run."""
    min_lr_ratio: Fraction
    """The lowest learning rate, as a part of `lr`."""
    warmup_steps: NonNegativeInt
    """Optimizer steps of linear rise from 0 to `lr`."""
    weight_decay: NonNegativeFloat
    """Of AdamW, on matrices only: norms and biases do not decay."""
    adam_beta1: Beta
    """Decay of the mean of the gradients."""
    adam_beta2: Beta
    """Decay of the mean of their squares."""
    adam_eps: PositiveFloat
    """Added to the root of the latter."""
    max_grad_norm: PositiveFloat
    """Gradients are scaled down to this L2 norm over all parameters."""
    precision: Literal["bf16", "fp32"]
    """Of forward and backward pass. The weights that the optimizer updates, and its state, are fp32."""
    activation_checkpointing: Literal["none", "full"]
    """full: keep only the inputs of each layer and compute the rest again in the backward pass."""
    document_mask: bool
    """Whether tokens attend within their own document only."""
    compile: bool
    """Whether torch.compile compiles each layer."""
    eval_freq: PositiveInt
    """Optimizer steps between two validations; there is one before the first step and one after the last."""
    history_freq: PositiveInt
    """Optimizer steps between two rows of history.tsv."""
    fsdp: FsdpParams
    """How the model is spread over the ranks."""

    def __post_init__(self) -> None:
        if self.total_batch_size % self.batch_size:
            raise ValueError(
                f"total_batch_size {self.total_batch_size} is no multiple of batch_size {self.batch_size}: "
                f"take {_nearest(self.total_batch_size, self.batch_size)}"
            )

    def grad_accum_steps(self, dp_world_size: int) -> int:
        """Forward passes of each rank per optimizer step.

        Raises:
            StageError: `total_batch_size` cannot be shared evenly; the nearest ones that can are named.
        """
        rows = self.batch_size * dp_world_size
        if self.total_batch_size % rows:
            raise StageError(
                f"total_batch_size {self.total_batch_size} is no multiple of batch_size {self.batch_size} x "
                f"{dp_world_size} ranks: take total_batch_size {_nearest(self.total_batch_size, rows)}, "
                "or another batch_size or runtime.nproc_per_node"
            )
        return self.total_batch_size // rows

    def total_steps(self, num_rows: int) -> int:
        """Optimizer steps of the whole run over `num_rows` training rows."""
        steps = num_rows * self.num_epochs // self.total_batch_size
        if steps == 0:
            raise StageError(
                f"{num_rows} training rows x {self.num_epochs} epochs are less than one step of total_batch_size "
                f"{self.total_batch_size}: add data, lower total_batch_size or raise num_epochs"
            )
        return min(steps, self.max_steps or steps)


@dataclass(frozen=True)
class TrainRuntime:
    """The leaves of the `runtime` section that training reads. None of them changes what is learnt."""

    launcher: Literal["torchrun"]
    """What starts the processes."""
    nproc_per_node: PositiveInt | None
    """Processes on this machine; null: one a GPU, or 2 where there is none."""
    log_freq: PositiveInt
    """Optimizer steps between two lines."""
    ckpt_freq: PositiveInt
    """Optimizer steps between two checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=2)]
    """How many of the newest checkpoints stay; at least 2, so that a damaged one has a predecessor."""
    timeout_minutes: PositiveFloat
    """How long a rank that does not answer is waited for; then the others give up."""
    max_restarts: NonNegativeInt
    """How often the ranks are started again after one of them crashed or hung. An error that would come again, and a
    signal to stop, end the training at once."""
    resume: Literal["auto", "never", "extend"]
    """auto: go on from the newest checkpoint that would have come about the same way | never: start over |
    extend: go on with more epochs although the learning rate of the steps already done would have been another."""
    tracker: Literal["none", "tensorboard", "wandb"]
    """Where else the numbers go: files below outputs/<experiment_name>/ for TensorBoard or Weights & Biases."""
    debug: bool
    """Whether each rank writes what it does into outputs/<experiment_name>/logs/<run_id>/rank-N.log."""


def _nearest(value: int, factor: int) -> str:
    below, above = value // factor * factor, (value // factor + 1) * factor
    return f"{below} or {above}" if below else str(above)
