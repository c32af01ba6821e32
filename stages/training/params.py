"""What the train stage is told: `TrainParams` (watched by DVC) and `TrainRuntime` (never changes the result)."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from stages.artifacts.command import StageError

Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _refuse(value: Any, reason: str) -> AfterValidator:
    """A check that refuses one value, which FSDP2 cannot honour."""

    def check(given: Any) -> Any:
        if given == value and given is not None:
            raise ValueError(reason)
        return given

    return AfterValidator(check)


_DEFAULTS = {
    "cpu_offload": False,
    "backward_prefetch": "BACKWARD_PRE",
    "forward_prefetch": False,
    "limit_all_gathers": True,
    "use_orig_params": True,
    "sync_module_states": True,
    "flatten_parameters": False,
    "sync_batchnorm": False,
}
FSDP_PRESETS: dict[str, dict[str, Any]] = {
    "single_node_fsdp": {**_DEFAULTS, "strategy": "auto", "sharding_strategy": "FULL_SHARD"},
    "multi_node_fsdp": {
        **_DEFAULTS, "strategy": "fsdp", "sharding_strategy": "HYBRID_SHARD", "forward_prefetch": True,
    },
    "large_scale_fsdp": {
        **_DEFAULTS, "strategy": "fsdp", "sharding_strategy": "FULL_SHARD", "forward_prefetch": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class FsdpParams:
    """How the model is spread over the processes, in the words of FSDP. None of it changes more than rounding.

    A null stands for the value of the preset; `resolved` puts it there.
    """

    preset: Literal["single_node_fsdp", "multi_node_fsdp", "large_scale_fsdp"]
    """Where the values come from that are null."""
    strategy: Literal["auto", "fsdp", "ddp", "none"] | None
    """fsdp: shard as `sharding_strategy` says | ddp: each process holds the whole model | none: one process only |
    auto: fsdp for more than one process, else none."""
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] | None
    """FULL_SHARD frees the gathered weights of a layer after its forward pass; SHARD_GRAD_OP keeps them for the
    backward pass: more memory, less communication. HYBRID_SHARD: FULL_SHARD within groups, by default those of one
    machine, each of which holds the whole model. NO_SHARD: every process does."""
    size: PositiveInt | None
    """Processes that share one copy of the model; null: all of them, or with HYBRID_SHARD those of a machine."""
    cpu_offload: bool | None
    """Keep weights, gradients and optimizer state in the memory of the host, and update them there."""
    backward_prefetch: Annotated[
        Literal["BACKWARD_PRE", "BACKWARD_POST", "NONE"] | None,
        _refuse(
            "BACKWARD_POST",
            "in FSDP2 the weights of the next layer are gathered before the gradients of this one are computed "
            "(BACKWARD_PRE), or when they are needed (NONE)",
        ),
    ]
    """When the backward pass gathers the weights of the next layer."""
    forward_prefetch: bool | None
    """Whether the forward pass gathers the weights of the next layer before this one is computed."""
    limit_all_gathers: Annotated[bool | None, _refuse(False, "there is no FSDP2 without the limit: take true or null")]
    """FSDP2 always does."""
    use_orig_params: Annotated[
        bool | None, _refuse(False, "in FSDP2 each parameter keeps its name and shape: take true or null")
    ]
    """FSDP2 always does."""
    sync_module_states: bool | None
    """All processes begin with the same weights in any case: each reads its part of the same verified files."""
    flatten_parameters: Annotated[
        bool | None, _refuse(True, "in FSDP2 every parameter is sharded by itself: take false or null")
    ]
    """FSDP2 never does."""
    wrap_layer_cls: str | None
    """Classes of the modules that are gathered as a whole, separated by commas; null: the decoder's layers."""
    sync_batchnorm: bool | None
    """Whether BatchNorm layers take their statistics over all processes."""

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ValueError: naming both values.
        """
        if self.strategy in ("ddp", "none"):
            given = f"fsdp.strategy {self.strategy}"
        elif self.sharding_strategy == "NO_SHARD":
            given = "fsdp.sharding_strategy NO_SHARD"
        else:
            return
        if self.sharding_strategy not in (None, "NO_SHARD"):
            raise ValueError(
                f"{given} shards nothing, but fsdp.sharding_strategy is {self.sharding_strategy}: take null there, or "
                "fsdp.strategy fsdp"
            )
        if self.size not in (None, 1):
            raise ValueError(f"{given} shards nothing, but fsdp.size is {self.size}: take null there")

    def resolved(self) -> "FsdpParams":
        """The same with the values of the preset where there were nulls."""
        preset = FSDP_PRESETS[self.preset]
        return dataclasses.replace(
            self, **{name: value for name, value in preset.items() if getattr(self, name) is None}
        )

    def mesh_shape(self, world_size: int, local_world_size: int) -> tuple[int, int]:
        """How many copies of the model there are, and how many processes share each.

        Args:
            world_size: Processes of the training.
            local_world_size: Those on this machine.

        Raises:
            StageError: the processes cannot be grouped so.
        """
        fsdp = self.resolved()
        if fsdp.strategy == "none" and world_size > 1:
            raise StageError(
                f"fsdp.strategy none trains in one process, but there are {world_size}: set runtime.nproc_per_node "
                "to 1, or fsdp.strategy to auto"
            )
        if fsdp.strategy == "ddp" or fsdp.sharding_strategy == "NO_SHARD":
            size = 1
        else:
            size = fsdp.size or (local_world_size if fsdp.sharding_strategy == "HYBRID_SHARD" else world_size)
        if world_size % size:
            divisors = ", ".join(str(number) for number in range(1, world_size + 1) if world_size % number == 0)
            raise StageError(f"fsdp.size {size} does not divide the {world_size} processes: take one of {divisors}")
        return world_size // size, size


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
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"]
    """Shape of the learning rate after the warm-up. wsd (warm-up, stable, decay): `lr`, then a linear decay."""
    lr_decay_steps: PositiveInt | None
    """Optimizer steps, warm-up included, until the lowest learning rate; null: the whole run."""
    lr_decay_ratio: Annotated[float, Field(gt=0, le=1)]
    """wsd: the last part of `lr_decay_steps` that decays."""
    min_lr_ratio: Fraction
    """The lowest learning rate, as a part of `lr`."""
    warmup_steps: NonNegativeInt
    """Optimizer steps of linear rise from 0 to `lr`."""
    optimizer: Literal["adamw", "adamw_8bit"]
    """adamw | adamw_8bit: its two means take a byte each instead of four (from torchao, which must be installed)."""
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
    precision: Literal["bf16", "fp16", "fp32"]
    """Of forward and backward pass. The weights that the optimizer updates are fp32. fp16: the loss is scaled."""
    activation_checkpointing: Literal["none", "full", "selective"]
    """full: keep only the inputs of each layer and compute the rest again in the backward pass | selective: of every
    second layer."""
    document_mask: bool
    """Whether tokens attend within their own document only."""
    compile: bool
    """Whether torch.compile compiles the layers, each by itself."""
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
        if self.lr_decay_steps is not None and self.lr_decay_steps <= self.warmup_steps:
            raise ValueError(
                f"lr_decay_steps {self.lr_decay_steps} includes the warm-up, but warmup_steps is {self.warmup_steps}: "
                "take more lr_decay_steps or fewer warmup_steps"
            )
        self.fsdp.check()

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
    ckpt_freq: PositiveInt | None
    """Optimizer steps between two checkpoints; null: none by steps."""
    ckpt_minutes: PositiveFloat | None
    """Minutes between two checkpoints, by the clock of rank 0; null: none by time."""
    async_checkpoint: bool
    """Whether training goes on while a checkpoint is written; it takes as much memory, of the CPU, as the weights and
    the optimizer state. Not with adamw_8bit."""
    keep_checkpoints: Annotated[int, Field(ge=2)]
    """How many of the newest checkpoints stay, beside the best; at least 2, so that a damaged one has a predecessor."""
    timeout_minutes: PositiveFloat
    """How long a rank may take for one thing: after 0.9 of it the launcher names the rank and ends all. Where there is
    no launcher, the others give it up after all of it."""
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
