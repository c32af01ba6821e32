"""From rows of tokens to the inputs and labels of a model."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:  # pyarrow is not needed here
    from stages.forward.rows import TokenRows

_LEAST_LENGTH = 128
"""Of `max_length`: no block of a kernel has more tokens."""


class Marks(NamedTuple):
    """What rows say of their tokens, where they have conversations; else documents end with EOS, and all is trained."""

    is_trained: Tensor
    """(B, T) bool."""
    is_start: Tensor
    """(B, T) bool: whether a document begins."""


def make_batch(
    input_ids: Tensor, eos_token_id: int, document_mask: bool, lengths: bool = False, marks: Marks | None = None
) -> dict[str, Any]:
    """Inputs and labels of packed rows, made on the CPU: on a GPU, the number of documents would have to be waited for.

    Args:
        input_ids: (B, T) integers; every document ends with `eos_token_id`, rows cut documents anywhere.
        eos_token_id: The token that ends a document, and occurs nowhere else; not used with `marks`.
        document_mask: Whether tokens attend to their own document only, else to their row.
        lengths: For `varlen`, which needs the lengths of the documents: with them, the model computes all rows as one.
        marks: Of these rows.

    Returns:
        `input_ids` (B, T) int64, `labels` (B, T) int64 (already shifted: `labels[:, t]` is the token after
        `input_ids[:, t]`, or -100 where nothing is to be predicted), and:

        - with `document_mask` or `lengths`, `position_ids` (B, T) int64 that restart after each document. Given such
          positions and no attention mask, most implementations of transformers let no token attend to another document.
          Models count positions by themselves; given some, transformers has the CPU wait for the GPU to see whether
          they restart, but not with attention functions that need no mask, such as `varlen`.
        - with `lengths`, `cu_seq_lens` (N + 1,) int32: where each document starts among the B*T tokens, and then B*T,
          repeated until N is a power of two; and `max_length`, an int that no document is longer than: kernels start
          blocks for so many tokens of each. It is no tensor: the CPU would wait for the GPU to read it.
    """
    # Rows are stored as int32; only here they become int64, which cross_entropy asks of labels.
    input_ids = input_ids.long()
    num_rows, length = input_ids.shape
    # The last token of each row has no label: its successor is in another row.
    labels = torch.full_like(input_ids, -100)  # (B, T)
    labels[:, :-1] = input_ids[:, 1:]
    if marks:
        labels[:, :-1].masked_fill_(~marks.is_trained[:, 1:], -100)
    batch: dict[str, Any] = {"input_ids": input_ids, "labels": labels}
    is_start = torch.zeros_like(input_ids, dtype=torch.bool)  # (B, T)
    if document_mask:
        is_start[:, 1:] = marks.is_start[:, 1:] if marks else (input_ids == eos_token_id)[:, :-1]
        labels[:, :-1].masked_fill_(is_start[:, 1:], -100)  # a document follows from nothing before it
    if document_mask or lengths:
        positions = torch.arange(length, device=input_ids.device).expand(num_rows, length)  # (B, T)
        # Where a document starts, its position in the row, elsewhere 0: the running maximum is then the start of the
        # document that each token is in. A row that begins inside a document counts from its own first token.
        batch["position_ids"] = positions - torch.where(is_start, positions, 0).cummax(dim=1).values
    if lengths:
        is_start[:, 0] = True  # also of a row that begins inside a document
        batch["cu_seq_lens"] = _padded(is_start.flatten().nonzero().flatten(), end=is_start.numel())
        longest = int(batch["cu_seq_lens"].diff().max())
        # A power of two: torch.compile sees few numbers.
        batch["max_length"] = min(length, max(_LEAST_LENGTH, 1 << (longest - 1).bit_length()))
    return batch


def read_batch(
    rows: "TokenRows", indices: NDArray[np.int64], eos_token_id: int, document_mask: bool, lengths: bool
) -> dict[str, Any]:
    """`make_batch` of the rows at `indices`."""
    input_ids = torch.from_numpy(rows.rows(indices))
    return make_batch(input_ids, eos_token_id, document_mask, lengths, read_marks(rows, indices))


def read_marks(rows: "TokenRows", indices: NDArray[np.int64]) -> Marks | None:
    """What the rows at `indices` say of their tokens, if anything."""
    marks = rows.marks(indices)
    return Marks(*map(torch.from_numpy, marks)) if marks else None


def _padded(starts: Tensor, end: int) -> Tensor:
    """Add empty documents at the end: torch.compile sees few shapes.

    To a power of two, not to the most that could be: kernels start blocks, and allocate memory, for empty ones too.
    """
    num_documents = 1 << (len(starts) - 1).bit_length()
    return torch.nn.functional.pad(starts, (0, num_documents + 1 - len(starts)), value=end).int()


def count_labels(batch: dict[str, Tensor]) -> int:
    """The number of tokens of a batch that are predicted."""
    return int((batch["labels"] != -100).sum())
