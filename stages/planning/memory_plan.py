"""What a step needs of a rank's memory, and which settings fit into it; measured by stages/planning/peak_memory.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args, get_type_hints

from stages.base.command import format_gib
from stages.base.errors import StageError
from stages.training.params import TrainParams

KINDS: tuple[str, ...] = get_args(get_type_hints(TrainParams)["activation_checkpointing"])
"""Values of `activation_checkpointing`."""

Table = Mapping[str, Mapping[int, int]]
"""For each kind of activation checkpointing that the model supports, the peak in bytes by `batch_size`."""

USABLE = 0.93
"""Of the memory of a GPU. CUDA, NCCL and cuBLAS need 1 to 2 GiB, and the allocator leaves gaps."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of one rank at the moment of a step at which it needs the most."""

    total: int
    """Of the GPU; with `fsdp.cpu_offload` without weights, gradients and optimizer state, which are on the CPU."""
    is_upper_bound: bool
    """Whether a GPU may need less, because it has an attention function for the model that CPUs do not have."""
    weights: int
    """This rank's part, in fp32, or in the dtype of `precision` if they are not trained; and buffers."""
    gradients: int
    """This rank's part, in fp32."""
    optimizer: int
    """The optimizer state of this rank's part."""
    unsharded: int
    """Gathered weights and gradients of the layers that are being computed, and the buffers that exchange them."""
    activations: int
    """What the backward pass needs, and what the forward pass has just computed; the logits too."""
    temporaries: int
    """Of the backward pass: gradients of activations and logits, and activations that are computed again."""
    staging: int
    """Of a checkpoint in CPU memory, while it is written asynchronously: what is trained, and its optimizer state."""


def batch_sizes(params: TrainParams, num_ranks: int) -> list[int]:
    """The powers of two that share `total_batch_size` evenly, and `batch_size` itself."""
    powers = [1 << power for power in range(params.total_batch_size.bit_length())]
    num_groups = num_ranks // params.context_parallel
    return sorted({params.batch_size, *(size for size in powers if params.total_batch_size % (size * num_groups) == 0)})


def lines(table: Table, limit: int) -> list[str]:
    """The table and what fits, for people.

    Args:
        table: Of peaks.
        limit: Bytes of the memory of a GPU.
    """
    sizes = sorted({size for peaks in table.values() for size in peaks})
    width = max(len("batch_size"), *map(len, table))
    rows = [f"  {'batch_size':{width}}" + "".join(f"{size:>9}" for size in sizes)]
    for kind, peaks in table.items():
        cells = {size: f"{peak / 2**30:.2f}{' ' if peak <= USABLE * limit else '!'}" for size, peak in peaks.items()}
        rows.append(f"  {kind:{width}}" + "".join(f"{cells.get(size, ''):>9}" for size in sizes))
    return [*rows, f"largest batch_size that fits: {_largest_of_each(table, limit) or 'none'}"]


def check_fits(peak: PeakMemory, table: Table, limit: int, could_adapt: bool) -> None:
    """Refuse what cannot fit, before a GPU is booked for it.

    Args:
        peak: With the settings as they are.
        table: Of others, for the message.
        limit: Bytes of the memory of a GPU, `plan.gpu_memory_gb`.
        could_adapt: Whether adapters would need less.

    Raises:
        StageError: naming the settings that would fit.
    """
    if peak.total <= limit or peak.is_upper_bound:
        return
    fitting = _largest_of_each(table, limit)
    remedy = f"use a batch_size of at most: {fitting}" if fitting else "more ranks, or fsdp.cpu_offload true"
    if could_adapt:
        remedy += ", or train adapters alone (lora_r 16)"
    raise StageError(
        f"each rank needs {format_gib(peak.total)} at the peak of a step, and a GPU has {format_gib(limit)} "
        f"(plan.gpu_memory_gb): {remedy}"
    )


def largest(table: Table, limit: int) -> dict[str, int]:
    """The largest `batch_size` that fits, with each kind of activation checkpointing; 0: none does."""
    return {
        kind: max((size for size, peak in peaks.items() if peak <= USABLE * limit), default=0)
        for kind, peaks in table.items()
    }


def _largest_of_each(table: Table, limit: int) -> str:
    found = largest(table, limit).items()
    return ", ".join(f"{size} with activation_checkpointing {kind}" for kind, size in found if size)
