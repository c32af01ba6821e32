"""The loss of a causal language model on packed rows."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from stages.tokens.batch import count_labels


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The logits of a batch: (B, T, vocab_size), in the dtype that the model computes in."""
    # No cache of keys and values: nothing is generated, and it would keep those of every layer alive.
    output: Tensor = model(input_ids=batch["input_ids"], position_ids=batch.get("position_ids"), use_cache=False).logits
    return output


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The negative log-likelihood, in nats, summed over all labels of a batch: a scalar, float32.

    A sum, not a mean: batches differ in their number of labels, so a mean of their means would give some tokens more
    weight than others.
    """
    # In float32: the softmax sums over the vocabulary, and bf16 has 8 significant bits.
    return nn.functional.cross_entropy(
        logits(model, batch).flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
    )


def total_loss(
    model: nn.Module, batches: Iterable[dict[str, Tensor]], before_forward: Callable[[], None] = lambda: None
) -> tuple[float, int]:
    """Measure the loss on several batches, as validation during training and the evaluate stage both do.

    The caller puts the model in evaluation mode and turns gradients off.

    Args:
        model: Any causal language model of transformers, sharded or not.
        batches: As `make_batch` returns them.
        before_forward: Called before each forward pass.

    Returns:
        The negative log-likelihood in nats, summed over all labels, and the number of labels. Their quotient is the
        mean loss per token. They are separate so that ranks can add up theirs before they divide.
    """
    total, num_labels = 0.0, 0
    for batch in batches:
        before_forward()
        total += loss_sum(model, batch).item()  # added up in Python, in double precision
        num_labels += count_labels(batch)
    return total, num_labels
