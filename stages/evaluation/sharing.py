"""How the ranks divide what is to be done, and collect what they have found."""

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

from stages.forward.distributed import gather_on_rank0, is_rank0
from stages.ranks.watchdog import Heartbeat

T = TypeVar("T")


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
