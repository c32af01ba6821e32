"""What a training can do with less memory."""

from stages.training.params import TrainParams


def remedies(params: TrainParams, world_size: int) -> str:
    """Settings that need less memory, in words: the cheapest first."""
    found = []
    if (params.eval_batch_size or 0) > params.batch_size:
        found.append(f"eval_batch_size {params.batch_size}, if this was a validation")
    if smaller := _smaller_batch_size(params, world_size):
        found.append(f"batch_size {smaller} (total_batch_size {params.total_batch_size} stays, and so do the steps)")
    if params.loss == "plain":
        found.append("loss auto")
    if params.activation_checkpointing != "full":
        found.append("activation_checkpointing full")
    found.append("a smaller seq_length")
    found.append("more ranks, each with memory of its own")
    return ", ".join(found[:-1]) + ", or " + found[-1]


def _smaller_batch_size(params: TrainParams, world_size: int) -> int | None:
    """The largest one below `batch_size` that shares `total_batch_size` evenly."""
    sizes = range(params.batch_size - 1, 0, -1)
    return next((size for size in sizes if params.total_batch_size % (size * world_size) == 0), None)
