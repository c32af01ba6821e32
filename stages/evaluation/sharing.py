"""How the ranks share a model, divide what is to be done, and collect what they have found."""

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from stages.evaluation.request import free_memory
from stages.forward.distributed import all_reduce_sum, gather_on_rank0, is_rank0
from stages.ranks.watchdog import Heartbeat

T = TypeVar("T")

MEMORY_SHARE = 0.8
"""Of the free memory, that copies of the weights may take: the rest is for activations, logits, keys and values."""


def must_shard(weight_bytes: int) -> bool:
    """Whether copies of a model would not fit into the free memory of all GPUs, or of this machine; a collective."""
    if torch.cuda.is_available():
        needed, free = weight_bytes, torch.cuda.mem_get_info()[0]
    else:
        needed, free = dist.get_world_size() * weight_bytes, free_memory()
    (votes,) = all_reduce_sum(needed > MEMORY_SHARE * free)
    return votes > 0 and dist.get_world_size() > 1


def gathered(own: list[T], heartbeat: Heartbeat) -> list[T]:
    """On rank 0, what all ranks have of what `share` has divided, in its order; a collective."""
    heartbeat.note("collecting what the ranks have found")
    answers = gather_on_rank0(lambda: own)
    if not is_rank0():
        return own
    found = answers()
    return [found[index % len(found)][index // len(found)] for index in range(sum(map(len, found)))]


def share(items: Sequence[T], is_sharded: bool) -> tuple[list[T], int]:
    """This rank's share of some items, and how many of them count.

    A forward pass of a sharded model is a collective: all ranks make as many, some of which do not count.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    own = [*items[rank::num_ranks]]
    missing = -(-len(items) // num_ranks) - len(own) if is_sharded else 0
    return own + [*items[:1]] * missing, len(own)
