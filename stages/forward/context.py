"""Context parallelism: several ranks share the tokens of a forward pass, and in attention its heads.

Outside of attention each rank has a slice of the tokens and all heads. Inside it has all tokens and a part of the heads
(Ulysses: Jacobs et al. 2023, DeepSpeed-Ulysses). So the attention function is that of a single rank: documents, windows
and causality are what they are there. Weights, gradients and checkpoints are sharded as without it.
"""

import math
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor


class Context(Protocol):
    """The ranks that share the tokens of a forward pass. An argument of the model's call: recomputation finds it."""

    size: int
    """How many they are."""

    def gather(self, states: Tensor) -> Tensor:
        """Queries, keys or values of own tokens and all heads -> of all tokens and own heads.

        Args:
            states: (1, H, t, D) of any dtype; with `RowContext` (size, H, t, D).

        Returns:
            (1, h, T, D) with T = size * t, and h = lcm(H, size) / size; with `RowContext` h = H.
        """

    def scatter(self, output: Tensor) -> Tensor:
        """The output of attention, on its way back: (1, T, h, D) -> (1, t, H, D); with `RowContext` (size, t, H, D)."""


class RankContext:
    """Ranks of a process group, each with its slice as a row."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.size, self._group = group.size(), group

    def gather(self, states: Tensor) -> Tensor:
        heads = states.shape[1]
        # Key-value heads that the ranks cannot share evenly go to each rank with queries of them, and gradients are
        # summed.
        states = states[0].repeat_interleave(math.lcm(heads, self.size) // heads, dim=0)
        return self._exchange(states)  # by heads -> by tokens

    def scatter(self, output: Tensor) -> Tensor:
        return self._exchange(output[0])  # by tokens -> by heads

    def _exchange(self, states: Tensor) -> Tensor:
        """Send a part of the first dim to each rank, join what comes along the second: (X, y, D) -> (1, x, Y, D)."""
        parts: Tensor = _AllToAll.apply(states.unflatten(0, (self.size, -1)), self._group)  # type: ignore[no-untyped-call]
        return parts.transpose(0, 1).flatten(1, 2)[None]


class _AllToAll(torch.autograd.Function):
    """Part i of the first dim goes to rank i, and so does its gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(states, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.group), None


def _all_to_all(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    # The functional collective, because `plan` runs it on fake tensors.
    found: Tensor = wait_tensor(all_to_all_single(states.contiguous(), None, None, group))
    return found


class RowContext:
    """Ranks that do not exist: each is a row of a batch in one process.

    What a model computes outside of attention sees the tokens of one row, as it sees those of one rank. So a test in
    one process finds the models that look across tokens there.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, states: Tensor) -> Tensor:
        return states.transpose(0, 1).flatten(1, 2)[None]

    def scatter(self, output: Tensor) -> Tensor:
        rows: Tensor = output[0].unflatten(0, (self.size, -1))
        return rows


def cut(batch: dict[str, Any], number: int, context: Context) -> dict[str, Any]:
    """The slice of a rank, of all tokens of a batch.

    Args:
        batch: As `make_batch` returns it with `lengths`, of a multiple of `context.size` tokens.
        number: Of the rank among those that share the batch, from 0.
        context: These ranks.

    Returns:
        `input_ids`, `labels` and `position_ids` (1, t) int64; `cu_seq_lens` and `max_length` are those of all tokens;
        and `context`. Labels and positions are cut last, so a slice may begin inside a document.
    """
    names = ("input_ids", "labels", "position_ids")
    own = {name: batch[name].view(context.size, -1)[number : number + 1] for name in names}
    return batch | own | {"context": context}
