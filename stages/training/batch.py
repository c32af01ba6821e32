"""From rows of tokens to what the model is fed, and the loss on it."""

import torch
from torch import Tensor, nn


def make_batch(input_ids: Tensor, eos_token_id: int, document_mask: bool) -> dict[str, Tensor]:
    """Inputs and labels of packed rows.

    Args:
        input_ids: (B, T) integers; every document ends with `eos_token_id`, rows cut documents anywhere.
        eos_token_id: The token that ends a document, and stands nowhere else.
        document_mask: Restart `position_ids` after each document. Given such positions and no attention mask,
            transformers lets no token attend to another document.

    Returns:
        `input_ids` (B, T) int64, `labels` (B, T) int64 (already shifted: `labels[:, t]` is the token after
        `input_ids[:, t]`, or -100 where nothing is to be predicted) and `position_ids` (B, T) int64.
    """
    input_ids = input_ids.long()
    num_rows, length = input_ids.shape
    labels = torch.full_like(input_ids, -100)
    labels[:, :-1] = input_ids[:, 1:]
    positions = torch.arange(length, device=input_ids.device).expand(num_rows, length)
    if document_mask:
        is_end = input_ids == eos_token_id
        labels[is_end] = -100  # the first token of a document follows from nothing before it
        starts = torch.zeros_like(input_ids)
        starts[:, 1:] = torch.where(is_end[:, :-1], positions[:, 1:], 0)
        positions = positions - starts.cummax(dim=1).values
    return {"input_ids": input_ids, "labels": labels, "position_ids": positions}


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The negative log-likelihood, in nats, summed over all labels of a batch: a scalar, float32."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
    )


def num_labels(batch: dict[str, Tensor]) -> int:
    """How many tokens of a batch are predicted."""
    return int((batch["labels"] != -100).sum())
