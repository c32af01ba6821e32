"""What a training can do with less memory."""

from stages.training.params import TrainParams


def remedies(params: TrainParams, world_size: int) -> str:
    """Settings that need less memory, in words: the cheapest first."""
    found = []
    if (params.eval_batch_size or 0) > params.batch_size:
        found.append(f"eval_batch_size {params.batch_size}, if this was a validation")
    smaller = range(params.batch_size - 1, 0, -1)
    num_groups = world_size // params.context_parallel
    if size := next((size for size in smaller if params.total_batch_size % (size * num_groups) == 0), None):
        found.append(f"batch_size {size} (total_batch_size {params.total_batch_size} stays, and so do the steps)")
    if params.loss == "plain":
        found.append("loss auto")
    if params.activation_checkpointing != "full":
        found.append("activation_checkpointing full")
    elif params.batch_size == 1 and num_groups % 2 == 0:
        found.append(f"context_parallel {2 * params.context_parallel}, if `plan` accepts it")
    found.append("a smaller seq_length")
    found.append("more ranks, each with memory of its own")
    return ", ".join(found[:-1]) + ", or " + found[-1]
