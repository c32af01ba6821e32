"""What a step needs of a rank's memory, and which settings fit into it; measured by stages/planning/peak_memory.py."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args, get_type_hints

from stages.base.command import format_gib
from stages.base.errors import StageError, one_line
from stages.base.packed import TRAIN
from stages.base.summary import counted
from stages.forward.rows import TokenRows
from stages.model import adapters
from stages.model.dtypes import BY_NAME, PRECISIONS
from stages.model.manifest import ModelManifest
from stages.training.params import TrainParams

if TYPE_CHECKING:
    from stages.planning.peak_memory import Chosen

FP32 = 4
MOMENTS = {"adamw": 2 * FP32, "adamw_8bit": 2 * (1 + FP32 / 256)}
"""Bytes per parameter of the optimizer state; in 8 bits, 256 values share a scale."""

KINDS: tuple[str, ...] = get_args(get_type_hints(TrainParams)["activation_checkpointing"])
"""Values of `activation_checkpointing`."""

Table = Mapping[str, Mapping[int, int]]
"""For each kind of activation checkpointing that the model supports, the peak in bytes by `batch_size`."""

USABLE = 0.93
"""Of the memory of a GPU. CUDA, NCCL and cuBLAS need 1 to 2 GiB, and the allocator leaves gaps."""
_MUCH_PADDING = 0.3
"""Of the tokens that are computed; more is worth a warning."""


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


def measure_memory(
    model: ModelManifest, params: TrainParams, num_ranks: int, seq_length: int, limit: int | None
) -> tuple[PeakMemory | None, Table, str]:
    """Measure the memory of each rank, and where `limit` bytes of a GPU are known, print a table of what fits.

    The tensors have no memory (stages/planning/peak_memory.py), and no weight is read. So the result is the same on
    each machine.

    Returns:
        The peak of each rank, None where it cannot be measured; a table of peaks, empty without a limit; and how the
        rows of a step are divided over the ranks, "" where these cannot train, or passes have no fixed size.

    Raises:
        StageError: the model cannot be trained like this.
    """
    from stages.planning import peak_memory  # imports torch

    try:
        params.check_context_parallel(model, seq_length, num_ranks)
        accumulated = params.grad_accum_steps(num_ranks)
        _, size = params.fsdp.mesh_shape(num_ranks, num_ranks)
    except StageError as error:  # these ranks are assumed, others may train
        ranks = counted(num_ranks, "rank")
        print(f"warning: {ranks} (plan.num_ranks) cannot train, and their memory is not known: {error}")
        return None, {}, ""
    if size != params.fsdp.mesh_shape(num_ranks, 1)[1]:
        print(
            f"warning: HYBRID_SHARD shards the model over the ranks of a node, and this is the memory of {num_ranks} "
            "ranks (plan.num_ranks) on one: set fsdp.size to the GPUs of a node"
        )
    if limit:
        params.check_context_on_gpus()
    chosen, rows, step = peak_memory.choose(model, params), None, ""
    if chosen.params.attention == "padded":
        rows = TokenRows(TRAIN)
        _print_padding(model, chosen, num_ranks, seq_length, rows)
    else:
        steps = counted(accumulated, "accumulation step")
        step = f" = {params.describe_ranks(num_ranks)} x {counted(params.batch_size, 'row')} x {steps}"
    try:
        peak = peak_memory.measure(model, chosen, num_ranks, seq_length, rows=rows, device_memory=limit)
        peaks = peak_memory.make_table(model, chosen, num_ranks, seq_length, limit, rows) if limit else {}
    except peak_memory.ERRORS as error:
        state = state_bytes(params, model) / size
        print(
            f"warning: activations of {model.architecture} cannot be measured ({type(error).__name__}: "
            f"{one_line(error)}): weights, gradients and optimizer state of each of {num_ranks} "
            f"ranks need {format_gib(state)}, and what comes on top is not known"
        )
        return None, {}, step
    if limit:
        if params.precision == "fp32":
            print("warning: precision fp32 uses a small part of a GPU, which is made for bf16: set precision to bf16")
        print(f"GiB of each rank by activation_checkpointing and batch_size; !: too much for {format_gib(limit)}")
        print("\n".join(lines(peaks, limit)))
        if not any(largest(peaks, limit).values()):
            _print_context_parallel(model, params, num_ranks, seq_length, limit)
        if params.lora_r and size > 1:
            _print_ddp(model, chosen, num_ranks, seq_length, limit, rows)
    return peak, peaks, step


def _print_padding(model: ModelManifest, chosen: "Chosen", num_ranks: int, seq_length: int, rows: TokenRows) -> None:
    """Print what share of the computed tokens `attention: padded` wastes."""
    from stages.planning import peak_memory

    share = peak_memory.padding(model, chosen, num_ranks, rows).share
    reason = f", because {chosen.reason}" if chosen.reason else ""
    print(f"note: attention padded{reason}; {share:.0%} of the tokens that are computed are padding")
    if share > _MUCH_PADDING:
        print(
            f"warning: {share:.0%} is much padding. Of more documents in a step, more have the same length: raise "
            f"total_batch_size {chosen.params.total_batch_size}, batch_size {chosen.params.batch_size} or seq_length "
            f"{seq_length:,}"
        )


def _print_ddp(
    model: ModelManifest, chosen: "Chosen", num_ranks: int, seq_length: int, limit: int, rows: TokenRows | None
) -> None:
    """With adapters, print whether the whole model fits each rank, which then gathers no weights."""
    from stages.planning import peak_memory

    whole = dataclasses.replace(chosen.params.fsdp, strategy="ddp", sharding_strategy=None, cpu_offload=False)
    changed = chosen._replace(params=dataclasses.replace(chosen.params, fsdp=whole))
    needed = peak_memory.measure(model, changed, num_ranks, seq_length, rows=rows, device_memory=limit).total
    if needed <= USABLE * limit:
        print(
            f"note: with fsdp.strategy ddp each rank holds the whole model, in {format_gib(needed)}, and gathers no "
            "weights"
        )


def _print_context_parallel(
    model: ModelManifest, params: TrainParams, num_ranks: int, seq_length: int, limit: int
) -> None:
    """Where no row fits, print how many ranks of a node could share each."""
    from stages.planning import peak_memory

    for size in (2, 4, 8):
        changed = dataclasses.replace(
            params, context_parallel=size, batch_size=1, eval_batch_size=None, activation_checkpointing="full"
        )
        if size <= params.context_parallel or num_ranks % size:
            continue
        try:
            changed.check_context_parallel(model, seq_length)
            changed.check_context_on_gpus()
            changed.grad_accum_steps(num_ranks)
            chosen = peak_memory.choose(model, changed)
            needed = peak_memory.measure(model, chosen, num_ranks, seq_length, device_memory=limit).total
        except (StageError, *peak_memory.ERRORS):  # nor for more ranks
            return
        if needed <= USABLE * limit:
            print(
                f"note: with context_parallel {size}, batch_size 1 and activation_checkpointing full each rank needs "
                f"{format_gib(needed)} (docs/memory.md)"
            )
            return


def state_bytes(params: TrainParams, model: ModelManifest) -> int:
    """Weights, gradients and moments of one copy of the model."""
    trained = int((2 * FP32 + MOMENTS[params.optimizer]) * params.num_trained(model))
    if params.lora_r is None:
        return trained
    quantized = params.num_quantized(model)
    frozen = BY_NAME[PRECISIONS[params.precision]].itemsize * (model.num_parameters - quantized)
    return trained + frozen + int(adapters.NF4_BYTES * quantized)
