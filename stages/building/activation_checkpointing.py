"""Which activations the backward pass finds in memory, and which it computes again."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from stages.base.errors import StageError
from stages.building.nf4 import product

assert callable(product), "its import makes its operator known"
_PRODUCTS = (
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default,
    torch.ops.stages.nf4_product.default,
)  # fmt: skip


def checkpoint_activations(model: PreTrainedModel, layers: list[Any], kind: str) -> None:
    """Have the layers keep only a part of their activations. No module and no parameter gets another name.

    Args:
        model: Any model of transformers.
        layers: Its layers, not compiled yet.
        kind: full: all layers keep only their inputs | selective_op: they also keep the results of attention and of
            every second matrix product.

    Raises:
        StageError: the architecture does not support it.
    """
    if kind == "none":
        return
    # The attribute marks layers that get their activations by position: torch keeps the random state of their devices.
    if not model.supports_gradient_checkpointing or not all(
        hasattr(layer, "gradient_checkpointing") for layer in layers
    ):
        raise StageError(f"activation_checkpointing {kind}: {type(model).__name__} does not support it, use none")
    for layer in layers:
        # Not by transformers, some releases of which checkpoint the call of a layer: outside of what is compiled, so
        # torch would not see its operations, and outside of FSDP's hooks, which would run again with it.
        layer.forward = _checkpointed(layer.forward, {"context_fn": _contexts} if kind == "selective_op" else {})


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        # The reentrant variant gives no gradients where no input of a layer requires them.
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return checkpointed


def _contexts() -> Any:
    """The contexts of forward pass and recomputation, for one call of one layer.

    The policy is that of torchtitan (torchtitan/distributed/activation_checkpoint.py), for operations of any name.
    Attention is the most expensive to compute again, for what its result needs. Of the matrix products half the results
    are kept: keeping all would save the most time, and half of the memory that checkpointing is for.
    """
    num_products = Counter[bool]()  # releases of torch differ in whether they ask again in the recomputation

    def choose(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _PRODUCTS:
            num_products[context.is_recompute] += 1
            is_kept = num_products[context.is_recompute] % 2 == 1
        else:
            # By name: torch has an operation for each kernel of attention, and packages bring their own.
            name = op.name()
            is_kept = "attention" in name or "attn" in name
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)
