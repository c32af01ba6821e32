"""What to do where memory does not suffice."""

from collections.abc import Iterator
from contextlib import contextmanager

from stages.artifacts.command import StageError
from stages.training.params import TrainParams


@contextmanager
def explained(params: TrainParams, rank: int, world_size: int) -> Iterator[None]:
    """Turn the errors of an allocation that failed into one that says what to change.

    Raises:
        StageError: this rank is out of memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        reason = " ".join(str(error).rpartition("] ")[2].split())[:200]
        raise StageError(
            f"rank {rank} is out of memory{f' ({reason})' if reason else ''}: take {remedies(params, world_size)}. "
            "The run goes on from its newest checkpoint, but with another seq_length it is a new one"
        ) from None


def _is_out_of_memory(error: Exception) -> bool:
    import torch  # the launcher, which only wants the remedies, must not import it yet

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def remedies(params: TrainParams, world_size: int) -> str:
    """What needs less memory, in words: the cheapest first."""
    found = []
    if smaller := _smaller_batch_size(params, world_size):
        found.append(f"batch_size {smaller} (total_batch_size {params.total_batch_size} stays, and so do the steps)")
    if params.activation_checkpointing != "full":
        found.append("activation_checkpointing full")
    found.append("a smaller seq_length")
    found.append("more processes, each with memory of its own")
    return ", ".join(found[:-1]) + ", or " + found[-1]


def _smaller_batch_size(params: TrainParams, world_size: int) -> int | None:
    """The largest one below `batch_size` that shares `total_batch_size` evenly."""
    sizes = range(params.batch_size - 1, 0, -1)
    return next((size for size in sizes if params.total_batch_size % (size * world_size) == 0), None)
