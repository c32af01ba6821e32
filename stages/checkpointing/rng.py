"""The random number generators of a rank, as JSON: after a resume, dropout has the masks of an uninterrupted run.

JSON, as the states of all ranks are in state.json, which the launcher reads without torch.
"""

import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The state of every random number generator of this rank."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    if torch.cuda.is_available() and "cuda" in state:  # a checkpoint of a CPU has none
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _tensor(text: str) -> torch.Tensor:
    # A bytearray, because torch.frombuffer warns of memory that is not writable.
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
