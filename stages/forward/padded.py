"""Packed rows as one sequence for each document, padded to the longest.

A causal model never sees what stands to the right of a token. So padding there needs no mask, and documents that are
sequences of their own are apart in attention, convolutions, state spaces and linear attention alike: without a kernel,
and without anything that a model would have to do with the lengths of its documents.
"""

from bisect import bisect_left
from collections.abc import Iterator

import torch
from torch import Tensor

_MIN_TOKENS = 64
"""A sequence counts as at least so many tokens: layers with a state compute tokens in chunks, and keep a state for each
sequence. A hundred documents of 20 tokens need 8 times the memory of two of 1024 tokens in Falcon H1."""


def padded_batches(
    batch: dict[str, Tensor], max_tokens: int, num_ranks: int = 1, multiple: int = 1, mask: bool = False,
    rank: int | None = None,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """The documents of packed rows, sorted by length and cut into forward passes.

    It depends on the rows alone. Where all ranks give it the rows of all of them, as they can, each of them knows the
    forward passes of all, without a word: they make as many, and wait for each other as little as possible.

    Args:
        batch: Of some rows, as `make_batch` returns it; without positions, each row is a document.
        max_tokens: Of a forward pass, padding included; at least those of a row.
        num_ranks: That share the forward passes.
        multiple: Of which the length of the sequences is one; a divisor of `max_tokens`.
        mask: Whether to add `attention_mask`, with which attention needs memory for a mask: for the router loss of a
            mixture of experts, which is a mean over tokens. The forward passes then are the same for any `num_ranks`.
        rank: Whose batches to make; None: those of all ranks, one after another in each round.

    Returns:
        A multiple of `num_ranks` batches, or with `rank` as many on each, each with `input_ids` and `labels` (N, L)
        int64, padded with some token and with -100, and with `mask` an `attention_mask` (N, L) int64, 0 at padding. All
        labels of the rows are in it once. What stands behind the last label of a document is left out, and so is a
        document without labels: neither can change the loss. The last batches may repeat one, without its labels.
    """
    input_ids, labels = (batch[name].flatten() for name in ("input_ids", "labels"))
    starts, lengths = _documents(batch)
    min_tokens = min(_MIN_TOKENS, batch["input_ids"].shape[1])
    padded = (-(-lengths // multiple) * multiple).tolist()
    # The router loss is no sum over tokens: other passes would have another one.
    passes = _forward_passes(padded, max_tokens, 1 if mask else num_ranks, min_tokens)
    numbers = range(-(-len(passes) // num_ranks) * num_ranks)
    batches = []
    for number in numbers if rank is None else numbers[rank::num_ranks]:
        own = passes[min(number, len(passes) - 1)]  # past the end the last one again, without its labels
        offsets = torch.arange(padded[own.start])
        is_token = offsets < lengths[own, None]  # (N, L)
        indices = torch.where(is_token, starts[own, None] + offsets, 0)
        is_label = is_token & (number < len(passes))
        made = {"input_ids": input_ids[indices], "labels": labels[indices].masked_fill_(~is_label, -100)}
        batches.append(made | ({"attention_mask": is_token.long()} if mask else {}))
    return batches


def extended(batches: list[dict[str, Tensor]], number: int) -> list[dict[str, Tensor]]:
    """As many batches as `number`: the last one is repeated, without its labels."""
    without_labels = batches[-1] | {"labels": torch.full_like(batches[-1]["labels"], -100)}
    return batches + [without_labels] * (number - len(batches))


def count_tokens(batch: dict[str, Tensor]) -> int:
    """The tokens that `padded_batches` takes from some rows; all others in its batches are padding."""
    return int(_documents(batch)[1].sum())


def _documents(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Where documents start among all tokens, and their lengths until the last label: (D,) each, the longest first."""
    labels = batch["labels"].flatten()
    in_row = torch.arange(batch["labels"].shape[1]).repeat(len(batch["labels"]))
    positions = batch["position_ids"].flatten() if "position_ids" in batch else in_row
    is_start = positions == 0  # rows start with one, too
    starts = is_start.nonzero().flatten()
    ends = torch.where(labels != -100, positions + 1, 0)
    lengths = torch.zeros_like(starts).scatter_reduce_(0, is_start.cumsum(0) - 1, ends, "amax")
    lengths, order = lengths.sort(descending=True, stable=True)
    num_documents = max(1, int(lengths.count_nonzero()))  # one also where there is no label at all
    return starts[order[:num_documents]], lengths[:num_documents].clamp(min=1)


def _forward_passes(lengths: list[int], max_tokens: int, num_ranks: int, min_tokens: int) -> list[slice]:
    """Which documents share a forward pass; `lengths` are sorted, the longest first."""

    def cut(limit: int) -> Iterator[slice]:
        start = 0
        while start < len(lengths):
            end = start + max(1, limit // max(lengths[start], min_tokens))
            yield slice(start, min(end, len(lengths)))
            start = end

    def num_rounds(limit: int) -> int:
        return -(-sum(1 for _ in cut(limit)) // num_ranks)

    # In each round, all ranks wait for the longest pass: the smallest limit with which there are no more rounds.
    limits = range(1, max_tokens)
    found = bisect_left(limits, True, key=lambda limit: num_rounds(limit) <= num_rounds(max_tokens))
    return list(cut(1 + found))
