"""Random weights, of which each rank makes its own rows, and which are the same on any number of ranks.

The model's own rules are run once on the meta device, where they compute nothing and only their operations are
recorded. Nearly all of them fill a parameter element by element, so a rank repeats them for its rows alone: block by
block, from seeds that depend on the parameter and the block. A model of 70 billion parameters needs seven minutes
on each rank that makes all of it, but 0.4 s on each of 1 024 that share (docs/scale.md).
"""

import hashlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from stages.training import sharding

BLOCK = 1 << 15
"""Elements of the rows that share a seed: as many as need a multiple of the time of seeding a generator, 10 µs."""

_ATEN = torch.ops.aten
_RANDOM = {_ATEN.normal_.default, _ATEN.uniform_.default}
_FILL = {*_RANDOM, _ATEN.zero_.default, _ATEN.fill_.Scalar}
"""Whatever was there before, it is gone."""
_CHANGE = {_ATEN.mul_.Tensor, _ATEN.mul_.Scalar, _ATEN.add_.Tensor, _ATEN.add_.Scalar, _ATEN.clamp_.default,
           _ATEN.erfinv_.default}  # fmt: skip


class Operation(NamedTuple):
    """An operation in place on a parameter, or on one of its rows."""

    function: Any
    args: tuple[Any, ...]
    row: int | None


def fill_by_rows(model: nn.Module, reference: PreTrainedModel, seed: int) -> set[str]:
    """Fill those parameters whose rules work element by element; returns their names.

    Args:
        model: Its parameters are DTensors, sharded on their first dim.
        reference: The same model on the meta device.
        seed: Of the random weights.
    """
    operations = record(reference)
    params = {name: param for name, param in model.named_parameters() if name in operations}
    for name, param in params.items():
        assert isinstance(param, DTensor)
        rows = sharding.local_rows(param)
        fill_rows(param.to_local(), rows.start, param.shape, operations[name], f"{seed}/{name}")
    return set(params)


def record(reference: PreTrainedModel) -> dict[str, list[Operation]]:
    """How the model's rules fill each parameter of a meta model; without those that they fill in another way."""
    # Children first, because a parent may give a child other values.
    names = {id(param): name for name, param in reference.named_parameters()}
    with torch.no_grad(), _Recorder(names) as recorder:
        for module in reversed(list(reference.modules())):
            reference._init_weights(module)
    return {name: found for name, found in recorder.operations.items() if name not in recorder.others}


class _Recorder(TorchDispatchMode):
    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: dict[str, list[Operation]] = {}
        self.others: set[str] = set()
        """Parameters on which there were operations that `fill_rows` cannot repeat."""
        self._places: dict[int, tuple[str, int | None]] = {key: (name, None) for key, name in names.items()}
        self._kept: list[Tensor] = []
        """Tensors whose id may not become that of another one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if id(tensor) not in self._places:
                continue
            name, row = self._places[id(tensor)]
            if func is _ATEN.select.int and row is None and args[1] == 0:
                self._places[id(result)] = (name, args[2] % tensor.shape[0])  # of an embedding, the row of the padding
                self._kept.append(result)
            elif func in _FILL and row is None:
                self.operations[name] = [Operation(func, args[1:], None)]
            elif func in _FILL | _CHANGE and len(tensors) == 1 and name in self.operations:
                self.operations[name].append(Operation(func, args[1:], row))
            else:
                self.others.add(name)
        return result


@torch.no_grad()
def fill_rows(local: Tensor, first_row: int, shape: torch.Size, operations: list[Operation], seed: str) -> None:
    """Fill rows of a parameter.

    Args:
        local: (rows, ...): the rows of this rank.
        first_row: The number of the first of them.
        shape: Of the full parameter.
        operations: That fill it, from `record`.
        seed: Of the parameter.
    """
    generator = torch.Generator()
    last_row, size = first_row + len(local), max(1, BLOCK // max(1, math.prod(shape[1:])))
    for first in range(first_row - first_row % size, last_row, size):
        values = torch.empty((min(size, shape[0] - first), *shape[1:]), dtype=local.dtype)
        generator.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{first}".encode()).digest()[:8], "big"))
        for function, args, row in operations:
            if row is None or first <= row < first + len(values):
                target = values if row is None else values[row - first]
                function(target, *args, **({"generator": generator} if function in _RANDOM else {}))
        start, stop = max(first, first_row), min(first + size, last_row)
        local[start - first_row : stop - first_row].copy_(values[start - first : stop - first])
