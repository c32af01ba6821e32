"""The weights of a model with adapters merged into them, which `mapped.write_safetensors` writes like others.

W + (lora_alpha / r) B A is computed in fp32 from the files of the initial model, and rounded once as it is written. The
training had W in the dtype of its computation. Blocks have one size, as the bits of a product may depend on its shape.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from stages.export.mapped import ShardedTensors, in_range
from stages.model.adapters import A, B
from stages.model.headers import StoredTensor

_BLOCK = 1 << 24
"""Values that are in memory at a time: 64 MiB in fp32, three times where an adapter is added."""


class MergedTensors:
    """The weights in files, with the adapters of a checkpoint."""

    def __init__(
        self, directory: Path, stored: Mapping[str, list[StoredTensor]], adapters: ShardedTensors,
        expected: Mapping[str, Tensor], scale: float,
    ) -> None:  # fmt: skip
        """Load the adapters.

        Args:
            directory: Of the files of the initial model.
            stored: The tensors in them that each weight consists of, as `meta.check_headers` returns them.
            adapters: Of a checkpoint; `check` has passed.
            expected: What `check` was given: their shapes and dtypes, by name.
            scale: Of their summands.
        """
        self._directory, self._stored, self._scale = directory, stored, scale
        self._adapters: dict[str, Tensor] = {}
        for name, tensor in expected.items():
            self._adapters[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            content = memoryview(self._adapters[name].numpy().view(np.uint8).reshape(-1))  # type: ignore[arg-type]
            adapters.load(name, content, tensor.dtype, lambda _: None)

    def load(self, name: str, content: memoryview, dtype: torch.dtype, goes_on: Callable[[int], object]) -> None:
        """As `ShardedTensors.load`: fill `content` with a weight."""
        target = torch.frombuffer(content, dtype=dtype)
        module = name.removesuffix(".weight")
        low, high = self._adapters.get(module + A), self._adapters.get(module + B)
        first = 0
        for part in self._stored[name]:
            row = math.prod(part.shape[1:])
            with safe_open(self._directory / part.file, "pt") as file:
                if not part.shape:
                    target[first:].copy_(file.get_tensor(part.key).view(1))
                    continue
                stored, size = file.get_slice(part.key), max(1, _BLOCK // row)
                for start in range(0, part.shape[0], size):
                    rows = slice(start, min(start + size, part.shape[0]))
                    weight = stored[rows]
                    if low is not None and high is not None:
                        at = first // row  # where these rows are in the whole weight
                        weight = weight.float() + (high[at + rows.start : at + rows.stop] @ low) * self._scale
                    block = target[first + rows.start * row : first + rows.stop * row]
                    (block if weight.dtype == dtype else in_range(name, block)).copy_(weight.reshape(-1))
                    goes_on(block.nbytes)
            first += math.prod(part.shape)
