"""From rows of tokens to the inputs and labels of a model."""

import torch
from torch import Tensor


def make_batch(input_ids: Tensor, eos_token_id: int, document_mask: bool) -> dict[str, Tensor]:
    """Inputs and labels of packed rows.

    Args:
        input_ids: (B, T) integers; every document ends with `eos_token_id`, rows cut documents anywhere.
        eos_token_id: The token that ends a document, and occurs nowhere else.
        document_mask: Add `position_ids` that restart after each document. Given such positions and no attention
            mask, transformers lets no token attend to another document.

    Returns:
        `input_ids` (B, T) int64, `labels` (B, T) int64 (already shifted: `labels[:, t]` is the token after
        `input_ids[:, t]`, or -100 where nothing is to be predicted) and, with `document_mask`, `position_ids` (B, T)
        int64. Models count positions by themselves; given some, transformers has the CPU wait for the GPU to see
        whether they restart.
    """
    # Rows are stored, and copied to the GPU, as int32; only here they become int64, which cross_entropy asks of labels.
    input_ids = input_ids.long()
    num_rows, length = input_ids.shape
    # The last token of each row has no label: its successor is in another row.
    labels = torch.full_like(input_ids, -100)  # (B, T)
    labels[:, :-1] = input_ids[:, 1:]
    if not document_mask:
        return {"input_ids": input_ids, "labels": labels}
    is_end = input_ids == eos_token_id  # (B, T) bool
    labels[is_end] = -100  # the first token of a document follows from nothing before it
    positions = torch.arange(length, device=input_ids.device).expand(num_rows, length)  # (B, T)
    # Where a document starts, its position in the row, elsewhere 0: the running maximum is then the start of the
    # document that each token is in. A row that begins inside a document counts from its own first token.
    starts = torch.zeros_like(input_ids)
    starts[:, 1:] = torch.where(is_end[:, :-1], positions[:, 1:], 0)
    return {"input_ids": input_ids, "labels": labels, "position_ids": positions - starts.cummax(dim=1).values}


def count_labels(batch: dict[str, Tensor]) -> int:
    """The number of tokens of a batch that are predicted."""
    return int((batch["labels"] != -100).sum())
