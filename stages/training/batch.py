"""From rows of tokens to what the model is fed, and the loss on it."""

import torch
from torch import Tensor, nn


def make_batch(input_ids: Tensor, eos_token_id: int, document_mask: bool) -> dict[str, Tensor]:
    """Inputs and labels of packed rows.

    Args:
        input_ids: (B, T) integers; every document ends with `eos_token_id`, rows cut documents anywhere.
        eos_token_id: The token that ends a document, and stands nowhere else.
        document_mask: Add `position_ids` that restart after each document. Given such positions and no attention
            mask, transformers lets no token attend to another document.

    Returns:
        `input_ids` (B, T) int64, `labels` (B, T) int64 (already shifted: `labels[:, t]` is the token after
        `input_ids[:, t]`, or -100 where nothing is to be predicted) and, with `document_mask`, `position_ids` (B, T)
        int64. Models count positions by themselves; given some, transformers has the CPU wait for the GPU to see
        whether they restart.
    """
    input_ids = input_ids.long()
    num_rows, length = input_ids.shape
    labels = torch.full_like(input_ids, -100)
    labels[:, :-1] = input_ids[:, 1:]
    if not document_mask:
        return {"input_ids": input_ids, "labels": labels}
    is_end = input_ids == eos_token_id
    labels[is_end] = -100  # the first token of a document follows from nothing before it
    positions = torch.arange(length, device=input_ids.device).expand(num_rows, length)
    starts = torch.zeros_like(input_ids)
    starts[:, 1:] = torch.where(is_end[:, :-1], positions[:, 1:], 0)
    return {"input_ids": input_ids, "labels": labels, "position_ids": positions - starts.cummax(dim=1).values}


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What the model says of a batch: (B, T, vocabulary), of the dtype that it computes in."""
    output: Tensor = model(input_ids=batch["input_ids"], position_ids=batch.get("position_ids"), use_cache=False).logits
    return output


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The negative log-likelihood, in nats, summed over all labels of a batch: a scalar, float32."""
    return nn.functional.cross_entropy(
        logits(model, batch).flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
    )


def num_labels(batch: dict[str, Tensor]) -> int:
    """How many tokens of a batch are predicted."""
    return int((batch["labels"] != -100).sum())
