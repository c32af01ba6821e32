"""Which rows of the data each step uses: a function of `seed` and position alone.

Position g of the whole training is row `permutation_e(g mod n)` of epoch e = g // n, so every row is used once in each
epoch, whatever the batch size and the number of ranks, and a resume is an index.

The permutation is never stored, whatever the number of rows: it is a Feistel network over the smallest 2k-bit
range that holds n, walked until the result is below n again (cycle walking; Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", 2002). Its round function is one step of SplitMix64 (Steele, Lea and Flood, 2014). Unlike a
library's shuffle it also stays the same from one release to the next.
"""

import numpy as np
from numpy.typing import NDArray

from stages.base.splitmix64 import next_value

_ROUNDS = 6


def step_rows(step: int, total_batch_size: int, num_rows: int, seed: int) -> NDArray[np.int64]:
    """The rows of optimizer step `step`, in order: (total_batch_size,) int64."""
    positions = np.arange(step * total_batch_size, (step + 1) * total_batch_size, dtype=np.int64)
    rows = np.empty_like(positions)
    epochs = positions // num_rows  # a step may end one epoch and begin the next; no row is dropped between them
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        rows[inside] = permute(positions[inside] % num_rows, num_rows, seed, int(epoch))
    return rows


def permute(indices: NDArray[np.int64], num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where the permutation of `range(num_rows)` that belongs to `seed` and `epoch` sends `indices`."""
    # Both halves have the same number of bits, so the range is at most four times `num_rows`: on average an index is
    # below it after at most four walks.
    half_bits = np.uint64(max(1, ((num_rows - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    # The seed is mixed before the epoch is added: otherwise epoch 1 of seed 0 would be epoch 0 of seed 1.
    key = next_value(next_value(np.array([seed], dtype=np.uint64)) + np.uint64(epoch))
    keys = [next_value(key + np.uint64(number)) for number in range(1, _ROUNDS + 1)]

    values = indices.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():  # ends: walking a permutation from a start below `num_rows` returns there at the latest
        walked = values[outside]
        left, right = walked >> half_bits, walked & mask
        for round_key in keys:
            left, right = right, left ^ (next_value(right ^ round_key) & mask)
        values[outside] = (left << half_bits) | right
        outside = values >= num_rows
    return values.astype(np.int64)
