"""The parameters that decide the weights. Those under `runtime`, which do not, are in stages/launching/runtime.py.

Options are beside their component where its module imports no torch (schedule.py, stages/building/params.py). The
launcher, `plan` and `checkpoints` read them all, and must answer before torch is imported.
"""

import dataclasses
import importlib.util
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from stages.base.errors import StageError
from stages.base.outputs import ExperimentName
from stages.building.params import BuildParams
from stages.model.files import CONFIG
from stages.model.manifest import ModelManifest
from stages.training.schedule import ScheduleParams


def _refuse_no_clipping(value: object) -> object:
    if value in (None, 0, math.inf, "inf"):  # as other trainers have it
        raise ValueError("no clipping is written as a limit that no gradient reaches: 1.0e+9")
    return value


Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Norm = Annotated[PositiveFloat, BeforeValidator(_refuse_no_clipping)]
# Numbers too: YAML reads a run_id that has only decimal digits as one.
RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$", coerce_numbers_to_str=True)]


@dataclass(frozen=True)
class TrainParams(ScheduleParams, BuildParams):
    """The leaves of `params.yaml` that decide what is learned."""

    experiment_name: ExperimentName
    """Directory below outputs/ of the model and its checkpoints."""
    initial_weights: Literal["auto", "pretrained", "random"]
    """Where the weights come from. auto: pretrained where the model has weights, else random."""
    batch_size: PositiveInt
    """Size of a forward pass on each device, in rows."""
    total_batch_size: PositiveInt
    """Size of an optimizer step over all devices, in rows. Gradient accumulation follows from it."""
    num_epochs: PositiveInt
    """Passes over the training rows."""
    max_steps: PositiveInt | None
    """Length of the training at most, in optimizer steps. null: `num_epochs` decides."""
    mixture: Annotated[dict[str, Share], Field(min_length=1)] | None
    """Rows of each source at every step, as shares. null: each row once in an epoch. Their sum need not be 1. Sources
    that are not named are not used."""
    max_repeats: dict[str, Share] | None
    """How often each source may be used, in epochs of it. null: as often as its share asks for."""
    extend_from: RunId | None
    """`run_id` of a finished run that continues with this schedule: a directory in
    `outputs/<experiment_name>/checkpoints`. null: none."""
    export_from: Literal["last", "best"]
    """Checkpoint that becomes the model. last: the last one. best: that with the lowest validation loss. With best, a
    checkpoint is saved at each validation that is the best so far, and none of another run is adopted."""
    optimizer: Literal["adamw", "adamw_8bit"]
    """The optimizer. adamw_8bit: its two moments use one byte each instead of four (needs torchao)."""
    weight_decay: NonNegativeFloat
    """Weight decay of AdamW on matrices. Norms and biases do not decay."""
    adam_beta1: Beta
    """Decay of the first moment, the mean of the gradients."""
    adam_beta2: Beta
    """Decay of the second moment, the mean of their squares."""
    adam_eps: PositiveFloat
    """Added to the root of the second moment."""
    max_grad_norm: Norm
    """L2 norm over all parameters to which gradients are scaled down."""
    tf32: bool
    """Whether GPUs multiply fp32 matrices in TF32, with 10 instead of 23 bits after the point."""
    deterministic: bool
    """Whether GPUs give the same bits in every run, by slower algorithms. CPUs always do."""
    document_mask: bool
    """Whether tokens attend within their own document only."""
    context_parallel: PositiveInt
    """How many consecutive ranks share the tokens of each row (docs/memory.md)."""
    eval_freq: PositiveInt
    """Distance between two validations, in optimizer steps. There is one before the first step and one after the
    last."""
    eval_batch_size: PositiveInt | None
    """Size of a forward pass of a validation, in rows. null: `batch_size`."""
    eval_rows: PositiveInt | None
    """How many held-out rows of each source a validation measures. null: all. They are spread evenly, and always the
    same."""
    history_freq: PositiveInt
    """Distance between two rows of history.tsv, in optimizer steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fsdp.check()

    def grad_accum_steps(self, num_ranks: int) -> int:
        """Forward passes of each rank per optimizer step.

        Raises:
            StageError: `context_parallel` does not divide the ranks, or `total_batch_size` cannot be shared evenly; for
                each number, a value that can is named.
        """
        total, batch, size = self.total_batch_size, self.batch_size, self.context_parallel
        if num_ranks % size:
            raise StageError(f"context_parallel {size} does not divide {num_ranks} ranks: use a divisor of {num_ranks}")
        ranks = num_ranks // size  # as many groups of them have rows of their own
        if total % (batch * ranks):
            smaller_batch = next((f" or batch_size {n}" for n in range(batch, 0, -1) if not total % (n * ranks)), "")
            fewer = next((f" or {n * size} ranks" for n in range(ranks, 0, -1) if not total % (n * batch)), "")
            raise StageError(
                f"total_batch_size {total} is not a multiple of batch_size {batch} x {self.describe_ranks(num_ranks)}: "
                f"use total_batch_size {_nearest(total, batch * ranks)}{smaller_batch}{fewer} "
                "(runtime.nproc_per_node on each node)"
            )
        return total // (batch * ranks)

    def describe_ranks(self, num_ranks: int) -> str:
        """Ranks by which `batch_size` is multiplied, for people."""
        size = self.context_parallel
        return f"{num_ranks} rank" + "s" * (num_ranks > 1) + (f" / context_parallel {size}" if size > 1 else "")

    def check_context_parallel(self, model: ModelManifest, seq_length: int, ranks_of_node: int | None = None) -> None:
        """Check that `context_parallel` can be used with the model, the ranks, and the other parameters.

        Which layers of a model it works with, a test finds (stages/forward/attention_choice.py).

        Args:
            model: Its config is read, and torch is imported with it, where `context_parallel` is not 1.
            seq_length: Tokens per row.
            ranks_of_node: The ranks of each node, as those of two nodes share no row: in each layer they exchange all
                of its tokens. None: they are not known yet.

        Raises:
            StageError: naming what cannot be together, and all numbers that can.
        """
        size = self.context_parallel
        if size == 1:
            return
        if self.attention not in ("auto", "varlen"):
            raise StageError(
                f"context_parallel {size} needs attention varlen, not {self.attention}: use attention auto, or "
                "context_parallel 1"
            )
        if self.compile:
            raise StageError(
                f"context_parallel {size} and compile true cannot be used together, as this was never measured: use "
                "compile false"
            )
        if model.router_loss_coef:
            raise StageError(
                f"context_parallel {size} is not possible with the router loss of {model.architecture}, which is a "
                "mean over all tokens of a forward pass: use context_parallel 1, or set output_router_logits to false "
                f"in a copy of the model's {CONFIG}"
            )
        shared = {f"the {number} attention heads of {model.architecture}": number for number in model.attention_heads()}
        for name, rows in (("batch_size", self.batch_size), ("eval_batch_size", self.eval_batch_size)):
            if rows:
                tokens = rows * seq_length
                shared[f"the {tokens} tokens of a forward pass ({name} {rows} x seq_length {seq_length})"] = tokens
        if ranks_of_node:
            shared[f"the {ranks_of_node} ranks of a node"] = ranks_of_node
        if unfit := [what for what, number in shared.items() if number % size]:
            common = math.gcd(*shared.values())
            *smaller, largest = (str(number) for number in range(1, 2 * size) if common % number == 0)
            fit = " and ".join(what for what in shared if what not in unfit)
            raise StageError(
                f"context_parallel {size} does not divide {', nor '.join(unfit)}: use "
                + (f"{', '.join(smaller)} or {largest}" + f", which also divide {fit}" * bool(fit) if smaller else "1")
            )

    def check_context_on_gpus(self) -> None:
        """Check that GPUs have a kernel for `context_parallel` in this precision.

        Raises:
            StageError: they have none.
        """
        if self.context_parallel > 1 and self.precision == "fp32":
            raise StageError(
                f"context_parallel {self.context_parallel} needs attention varlen, which has no kernel for fp32 on "
                "GPUs: use precision bf16"
            )

    def check_tokens(self, seq_length: int) -> None:
        """Check that matrix products in fp8 can have the tokens of a forward pass.

        Raises:
            StageError: they cannot.
        """
        size = self.context_parallel
        # In the product that gives the gradient of a weight.
        if self.precision == "fp8" and self.batch_size * seq_length % (16 * size):
            shared = f" / context_parallel {size}" if size > 1 else ""
            raise StageError(
                f"precision fp8 needs a multiple of 16 tokens per forward pass, not batch_size {self.batch_size} x "
                f"seq_length {seq_length}{shared}: use bf16, or another batch_size"
            )

    @property
    def rows_per_validation_pass(self) -> int:
        """Rows per device and forward pass of a validation."""
        return self.eval_batch_size or self.batch_size

    def identity(self) -> dict[str, Any]:
        """The parameters as far as they decide what is learned: without adapters, none of theirs."""
        values = dataclasses.asdict(self)
        if self.lora_r is None:
            return {name: value for name, value in values.items() if not name.startswith("lora_")}
        if isinstance(self.lora_target_modules, list):
            values["lora_target_modules"] = sorted(set(self.lora_target_modules))
        return values

    def check_export_from(self, num_validation_rows: int) -> None:
        """Check that there are rows by which `export_from` can choose.

        Raises:
            StageError: there are none.
        """
        if self.export_from == "best" and not num_validation_rows:
            raise StageError(
                "export_from is best, but no rows are held out to measure which checkpoint that is: set "
                "validation_splits to 1 or more, or export_from to last (held-out text that is shorter than seq_length "
                "gives no row: set validation_splits to more)"
            )

    def check_packages(self) -> None:
        """Check that the packages are installed which some values need, without importing them.

        Raises:
            StageError: one is not.
        """
        for name, value, needing, package, other in (
            ("optimizer", self.optimizer, "adamw_8bit", "torchao", "adamw"),
            ("precision", self.precision, "fp8", "torchao", "bf16"),
        ):
            if value == needing and importlib.util.find_spec(package) is None:
                raise StageError(
                    f"{name} {value} needs {package}, which is not installed: run `pip install {package}`, or use "
                    f"{other}"
                )

    def total_steps(self, num_rows: int) -> int:
        """Optimizer steps of the whole run over `num_rows` training rows."""
        # Rounded down over all epochs, not in each: at most one incomplete step is dropped, at the very end.
        steps = num_rows * self.num_epochs // self.total_batch_size
        if steps == 0:
            raise StageError(
                f"{num_rows} training rows x {self.num_epochs} epochs are less than one step of total_batch_size "
                f"{self.total_batch_size}: add data, lower total_batch_size or raise num_epochs"
            )
        return min(steps, self.max_steps or steps)


def _nearest(value: int, factor: int) -> str:
    below, above = value // factor * factor, (value // factor + 1) * factor
    return f"{below} or {above}" if below else str(above)
