"""Rotary embeddings whose table depends on the longest position of a forward call, fixed for all calls.

In transformers a call with a position beyond the original context of the model gets another table: `longrope` has two,
`dynamic` one for each length. So documents would be computed in another way beside a longer one, or after it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle


def fix_tables(model: nn.Module, seq_length: int) -> list[RemovableHandle]:
    """Have each call use the table of rows of `seq_length` tokens, whatever documents are in it.

    All other models stay as they are. Inference servers choose the table in this way, too: by the longest context.

    Returns:
        What undoes it, when removed.
    """
    last = seq_length - 1

    def add_last(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # One more position, of a token that is not there.
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": _with(kwargs["position_ids"], last)}
        return (args[0], _with(args[1], last), *args[2:]), kwargs

    def drop_last(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> Any:
        return tree_map(lambda values: values[..., :-1, :], found)  # cosines and sines: (B, T, D)

    handles: list[RemovableHandle] = []
    for module in model.modules():
        if _depends_on_length(module):
            handles += [
                module.register_forward_pre_hook(add_last, with_kwargs=True),
                module.register_forward_hook(drop_last, with_kwargs=True),
            ]
    return handles


def _with(position_ids: Tensor, last: int) -> Tensor:
    """(B, T) or, of several axes, (N, B, T), with one more."""
    return torch.cat([position_ids, position_ids.new_full((*position_ids.shape[:-1], 1), last)], dim=-1)


def _depends_on_length(module: nn.Module) -> bool:
    """As `dynamic_rope_update` of transformers decides it."""
    found = getattr(module, "rope_type", None)
    kinds = found.values() if isinstance(found, dict) else (found,)  # a dict has that of each kind of layer
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)
