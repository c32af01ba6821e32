"""Random weights, of which each rank makes its own rows, and which are the same on any number of ranks.

The model's own rules are run once on the meta device, where they compute nothing and only their operations are
recorded. Nearly all of them fill a parameter element by element, so a rank repeats them for its rows alone: block by
block, from seeds that depend on the parameter and the block. A model of 70 billion parameters needs nine minutes
on each rank that makes all of it, but 0.5 s on each of 1 024 that share.
"""

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.initialization import TORCH_INIT_FUNCTIONS

from stages.training import sharding

BLOCK = 1 << 15
"""Elements of the rows that share a seed: as many as need a multiple of the time of seeding a generator, 10 µs."""

_ATEN = torch.ops.aten
_RANDOM = {_ATEN.normal_.default, _ATEN.uniform_.default, nn.init.trunc_normal_}
_FILL = {*_RANDOM, _ATEN.zero_.default, _ATEN.fill_.Scalar}
"""Whatever was there before, it is gone."""
_CHANGE = {_ATEN.mul_.Tensor, _ATEN.mul_.Scalar, _ATEN.add_.Tensor, _ATEN.add_.Scalar, _ATEN.clamp_.default}

_ALIAS = {_ATEN.detach.default, _ATEN.alias.default}  # `weight.data`

_SILENT = ("trunc_normal_", "orthogonal_", "sparse_", "dirac_")
"""Functions of torch.nn.init that return at once on the meta device, from torch 2.13 on: no operation shows them."""


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
    with torch.no_grad(), _Recorder(reference) as recorder, _calls_recorded(recorder):
        for module in reversed(list(reference.modules())):
            reference._init_weights(module)
    return {name: found for name, found in recorder.operations.items() if name not in recorder.others}


class _Recorder(TorchDispatchMode):
    def __init__(self, reference: PreTrainedModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: dict[str, list[Operation]] = {}
        self.others: set[str] = set()
        """Parameters on which there were operations that `fill_rows` cannot repeat."""
        # By their storage: rules also write through views, such as `weight.data`.
        self._params = {_storage(param): (name, param) for name, param in reference.named_parameters()}
        self._rows: dict[int, tuple[int, Tensor]] = {}
        """By its id, a view of one row, which is kept so that its id does not become that of another one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(func, args, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)], result)
        return result

    def note(self, function: Any, args: tuple[Any, ...], tensors: list[Tensor], result: Any = None) -> None:
        """Record a call for those of `tensors` that are parameters or views of them."""
        for tensor in tensors:
            if _storage(tensor) not in self._params or function in _ALIAS:
                continue
            name, param = self._params[_storage(tensor)]
            row, _ = self._rows.get(id(tensor), (None, None))
            is_full = row is None and tensor.shape == param.shape and tensor.stride() == param.stride()
            if function is _ATEN.select.int and is_full and args[1] == 0:
                self._rows[id(result)] = (args[2] % len(param), result)  # of an embedding, the row of the padding
            elif function in _FILL and is_full:
                self.operations[name] = [Operation(function, args[1:], None)]
            elif (
                function in _FILL | _CHANGE
                and len(tensors) == 1
                and name in self.operations
                and (is_full or row is not None)
            ):
                self.operations[name].append(Operation(function, args[1:], row))
            else:
                self.others.add(name)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _calls_recorded(recorder: _Recorder) -> Iterator[None]:
    """Record the calls of those functions that no operation shows."""
    originals = {name: getattr(nn.init, name) for name in _SILENT}

    def recorded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            bound.arguments.pop("generator", None)
            recorder.note(function, bound.args, [bound.args[0]])
            return cast(Tensor, bound.args[0])

        return call

    calls = {name: recorded(function) for name, function in originals.items()}
    try:
        for name, call in calls.items():
            setattr(nn.init, name, call)
        TORCH_INIT_FUNCTIONS.update(calls)
        yield
    finally:
        for name, function in originals.items():
            setattr(nn.init, name, function)
        TORCH_INIT_FUNCTIONS.update(originals)


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
