"""SplitMix64, the mixing function behind the assignment of files to splits and the order of training rows.

Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014. A library's generator may change its
numbers between two releases; these two orders must never change.
"""

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio, made odd


def finalize(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each element, uint64 of any shape: each input bit changes half of the output bits."""
    # Products are meant modulo 2^64. Arrays wrap silently; a NumPy scalar would warn of an overflow.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return result


def next_value(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The generator's output for each state, uint64 of any shape: advance by the golden gamma, then `finalize`."""
    return finalize(x + _GAMMA)
