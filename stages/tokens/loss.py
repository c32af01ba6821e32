"""The loss of a causal language model on packed rows."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from stages.tokens.batch import count_labels


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The logits of a batch: (B, T, vocab_size), in the dtype that the model computes in."""
    output: Tensor = _forward(model, batch).logits
    return output


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The negative log-likelihood, in nats, summed over all labels of a batch: a scalar, float32.

    A sum, not a mean: batches differ in their number of labels, so a mean of their means would give some tokens more
    weight than others.
    """
    return _cross_entropy(logits(model, batch), batch["labels"])


def training_losses(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """`loss_sum`, and the router loss of a mixture of experts that computes one: a scalar, float32, else None.

    The router loss is low where all experts get equally many tokens of the batch. It is not a sum over tokens.
    """
    output = _forward(model, batch)
    return _cross_entropy(output.logits, batch["labels"]), getattr(output, "aux_loss", None)


def _forward(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    # No cache of keys and values: nothing is generated, and it would keep those of every layer alive.
    return model(input_ids=batch["input_ids"], position_ids=batch.get("position_ids"), use_cache=False)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    # In float32: the softmax sums over the vocabulary, and bf16 has 8 significant bits.
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
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
