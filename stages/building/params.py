"""The parameters of how the model is built. Its section `fsdp` has the names of FSDP1, which people know.

No torch here: the launcher and `plan` read these parameters before torch is imported. sharding.py turns `fsdp` into
calls of FSDP2.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from stages.base.errors import StageError
from stages.forward.attention_names import Attention
from stages.model import adapters
from stages.model.files import CONFIG
from stages.model.manifest import ModelManifest


def _refuse(value: Any, reason: str) -> AfterValidator:
    """A check that refuses one value, because FSDP2 has no equivalent."""

    def check(given: Any) -> Any:
        if given == value:
            raise ValueError(reason)
        return given

    return AfterValidator(check)


FSDP_PRESETS: dict[str, dict[str, Any]] = {
    "single_node_fsdp": {"strategy": "auto", "sharding_strategy": "FULL_SHARD"},
    "multi_node_fsdp": {"strategy": "fsdp", "sharding_strategy": "HYBRID_SHARD", "forward_prefetch": True},
    "large_scale_fsdp": {"strategy": "fsdp", "sharding_strategy": "FULL_SHARD", "forward_prefetch": True},
}
"""Of the other values, null is what FSDP2 does by default."""


@dataclass(frozen=True)
class FsdpParams:
    """How the model is sharded over the ranks. Nothing here changes more than rounding.

    A null stands for the value of the preset; `resolved` fills it in.
    """

    preset: Literal["single_node_fsdp", "multi_node_fsdp", "large_scale_fsdp"]
    """Where values that are null come from."""
    strategy: Literal["auto", "fsdp", "ddp", "none"] | None
    """How ranks hold the model. fsdp: sharded, as `sharding_strategy` says. ddp: each rank holds all of it. none: one
    rank only. auto: fsdp for more than one rank, else none."""
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] | None
    """When gathered weights of a layer are freed. FULL_SHARD: after its forward pass. SHARD_GRAD_OP: after its backward
    pass, with more memory and less communication. HYBRID_SHARD: as FULL_SHARD, within groups of ranks that hold a whole
    model. NO_SHARD: every rank holds it."""
    size: PositiveInt | None
    """How many ranks share one copy of the model. null: all of them, or with HYBRID_SHARD those of a node."""
    cpu_offload: bool | None
    """Whether weights, gradients and optimizer state are in CPU memory, and updated there."""
    backward_prefetch: Annotated[
        Literal["BACKWARD_PRE", "BACKWARD_POST", "NONE"] | None,
        _refuse(
            "BACKWARD_POST",
            "in FSDP2 the weights of the next layer are gathered before the gradients of this one are computed "
            "(BACKWARD_PRE), or when they are needed (NONE)",
        ),
    ]
    """When the backward pass gathers the weights of the next layer. BACKWARD_POST: refused."""
    forward_prefetch: bool | None
    """Whether the forward pass gathers the next layer's weights before it computes this one."""
    limit_all_gathers: Annotated[
        bool | None, _refuse(False, "in FSDP2 all-gathers are always limited: use true or null")
    ]
    """Always true in FSDP2."""
    use_orig_params: Annotated[
        bool | None, _refuse(False, "in FSDP2 each parameter keeps its name and shape: use true or null")
    ]
    """Always true in FSDP2."""
    sync_module_states: Annotated[
        bool | None,
        _refuse(
            False,
            "all ranks start with the same weights: each reads its part of the same verified files; use true or null",
        ),
    ]
    """Always true: all ranks start with the same weights."""
    flatten_parameters: Annotated[
        bool | None, _refuse(True, "in FSDP2 every parameter is sharded by itself: use false or null")
    ]
    """Always false in FSDP2."""
    wrap_layer_cls: str | None
    """Classes of the modules to wrap, separated by commas. null: the decoder's layers."""
    sync_batchnorm: Annotated[bool | None, _refuse(True, "no decoder has BatchNorm layers: use false or null")]
    """Always false: no decoder has batch norms."""

    def check(self) -> None:
        """Refuse values that contradict each other.

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
                f"{given} shards nothing, but fsdp.sharding_strategy is {self.sharding_strategy}: use null there, or "
                "fsdp.strategy fsdp"
            )
        if self.size not in (None, 1):
            raise ValueError(f"{given} shards nothing, but fsdp.size is {self.size}: use null there")

    def resolved(self) -> "FsdpParams":
        """The same with the values of the preset in place of nulls."""
        preset = FSDP_PRESETS[self.preset]
        return dataclasses.replace(
            self, **{name: value for name, value in preset.items() if getattr(self, name) is None}
        )

    def wrapped_classes(self, model: ModelManifest) -> list[str]:
        """The classes of the modules to wrap.

        Raises:
            StageError: the model has no modules of a class in `wrap_layer_cls`.
        """
        if not self.wrap_layer_cls:
            return model.layer_classes
        classes = [name.strip() for name in self.wrap_layer_cls.split(",")]
        if unknown := sorted(set(classes) - set(model.module_classes)):
            others = ", ".join(sorted(set(model.module_classes) - set(model.layer_classes)))
            raise StageError(
                f"fsdp.wrap_layer_cls: {model.architecture} has no {', '.join(unknown)}: use "
                f"{','.join(model.layer_classes)} (its layers, as with null) or others of its classes: {others}"
            )
        return classes

    def mesh_shape(self, world_size: int, local_world_size: int) -> tuple[int, int]:
        """How many copies of the model there are, and how many ranks share each.

        Args:
            world_size: Ranks of the training.
            local_world_size: Those on this node.

        Raises:
            StageError: the ranks cannot be grouped like this.
        """
        fsdp = self.resolved()
        if fsdp.strategy == "none" and world_size > 1:
            raise StageError(
                f"fsdp.strategy none trains on one rank, but there are {world_size}: set runtime.nproc_per_node to 1, "
                "or fsdp.strategy to auto"
            )
        if fsdp.strategy == "ddp" or fsdp.sharding_strategy == "NO_SHARD":
            size = 1  # groups of one rank: the gradients are then exchanged between the copies only, as DDP does
        else:
            size = fsdp.size or (local_world_size if fsdp.sharding_strategy == "HYBRID_SHARD" else world_size)
        if world_size % size:
            divisors = ", ".join(str(number) for number in range(1, world_size + 1) if world_size % number == 0)
            raise StageError(f"fsdp.size {size} does not divide the {world_size} ranks: use one of {divisors}")
        return world_size // size, size


def _check_targets(value: object) -> object:
    is_list = isinstance(value, list) and value and all(isinstance(name, str) for name in value)
    if value != adapters.ALL_LINEAR and (not is_list or adapters.ALL_LINEAR in cast(list[str], value)):
        raise ValueError(f"write {adapters.ALL_LINEAR}, or names in brackets such as [q_proj, v_proj]")
    return value


@dataclass(frozen=True)
class BuildParams:
    """What decides how the model is built, and how it computes."""

    seed: Annotated[int, Field(ge=0, lt=2**32)]
    """Fixes the order of the rows, random weights and dropout. Times the number of ranks, 64 bits hold it."""
    lora_r: PositiveInt | None
    """Rank of the adapters, which alone are trained. null: all weights are."""
    lora_alpha: PositiveInt
    """The output of an adapter is multiplied by `lora_alpha / lora_r`."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)]
    """Dropout of the input of an adapter, as a probability."""
    lora_target_modules: Annotated[Literal["all-linear"] | list[str], BeforeValidator(_check_targets)]
    """Linear modules that get an adapter: all in the layers, or the ends of their names."""
    lora_base: Literal["nf4"] | None
    """How the weights beside adapters are stored. nf4: those of linear modules in the layers in 4.5 bits (QLoRA). null:
    in `precision`."""
    precision: Literal["bf16", "fp16", "fp32", "fp8"]
    """Number format of forward and backward pass. fp16: the loss is scaled. fp8: bf16, and 8 bits in the layers'
    matrix products (needs torchao, and GPUs of Ada, Hopper or newer). The weights that the optimizer updates are
    fp32."""
    activation_checkpointing: Literal["none", "full", "selective_op"]
    """What the backward pass computes again, to save memory. full: all but the inputs of each layer. selective_op: all
    but attention and every second matrix product."""
    attention: Attention
    """The attention function. Each of them gives the same results up to rounding, or is refused for the model."""
    loss: Literal["auto", "fused", "plain"]
    """How the loss is computed. fused: by the LM head, some tokens at a time. plain: from the logits of all tokens.
    auto: fused where that gives the same loss."""
    compile: bool
    """Whether torch.compile compiles the layers. Each is compiled by itself."""
    fsdp: FsdpParams
    """How the model is sharded over the ranks."""

    def num_trained(self, model: ModelManifest) -> int:
        """Parameters of the model that are trained, or of its adapters."""
        if self.lora_r is None:
            return model.num_parameters
        kinds = adapters.choose(model.linears, self.lora_target_modules, model.architecture)
        return adapters.num_parameters(kinds, self.lora_r)

    def num_quantized(self, model: ModelManifest) -> int:
        """Weights beside adapters that are quantized: those of which the model takes the module, not the weight."""
        if self.lora_r is None or self.lora_base is None:
            return 0
        kinds = adapters.choose(model.linears, adapters.ALL_LINEAR, model.architecture)
        return sum(linear.weights for linear in kinds.values())

    def check_lora(self, model: ModelManifest) -> None:
        """Check that `lora_r` can be used with the model, and with the other parameters.

        Raises:
            StageError: naming what cannot be together.
        """
        if self.lora_r is None:
            if self.lora_base:
                raise StageError(f"lora_base {self.lora_base} is for weights beside adapters: set lora_r, such as 16")
            return
        if not model.weights:
            raise StageError(
                f"lora_r is {self.lora_r}, but {model.model_name} starts from random weights, which adapters would "
                "leave random: set lora_r to null, or use a model with weights"
            )
        if self.precision == "fp8":
            raise StageError("lora_r and precision fp8 cannot be used together: use precision bf16")
        adapters.choose(model.linears, self.lora_target_modules, model.architecture)

    def check_compile(self, model: ModelManifest) -> None:
        """Check that `compile` can be used with the model.

        Raises:
            StageError: torch cannot compile how transformers collects the router logits.
        """
        if self.compile and model.router_loss_coef:
            raise StageError(
                f"compile true is not possible with the router loss of {model.architecture}: use compile false, or set "
                f"output_router_logits to false in a copy of the model's {CONFIG}"
            )
