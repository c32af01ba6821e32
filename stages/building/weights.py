"""Filling a sharded model: each rank reads its own rows of the files, and computes the buffers, which no file holds."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from stages.base.errors import StageError
from stages.building.nf4 import Nf4Linear, quantize
from stages.model.headers import StoredTensor


def rebuild_buffers(model: nn.Module, reference: PreTrainedModel, seed: int) -> None:
    """Compute all buffers, such as the frequencies of rotary embeddings; those that files store are read afterwards.

    `to_empty` leaves garbage in them, and the logits still look plausible.
    """
    with_buffers = [module for module in reference.modules() if module._buffers]
    for module in with_buffers:
        # Not `to_empty`: it would also allocate parameters beside them, and separate an embedding from a tied head
        # (Gemma 3 has a buffer there).
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = _unset_like(buffer)
    rules = rules_of_random_values(reference)
    # Children before parents, as transformers does: a parent may fill the buffers of a child (as in Falcon H1).
    for name, module in reversed([*reference.named_modules()]):
        if any(True for _ in module.buffers()):
            with seeded(f"{seed}/{name}"), torch.no_grad():
                rules[module](module)  # parameters beside the buffers stay on the meta device
    buffers = dict(model.named_buffers())
    for name, buffer in reference.named_buffers():
        buffers[name].copy_(buffer)
    for module in with_buffers:
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = buffer.to("meta")


def _unset_like(tensor: Tensor) -> Tensor:
    """On the CPU; NaN, where there is one: what no rule fills must not look plausible."""
    empty = torch.empty_like(tensor, device="cpu")
    return empty.fill_(torch.nan) if empty.is_floating_point() else empty


@torch.no_grad()
def read_weights(model: nn.Module, directory: Path, stored: dict[str, list[StoredTensor]]) -> None:
    """Fill parameters and stored buffers from safetensors, without reading the rows of other ranks; quantize some."""
    targets = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    quantized = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, Nf4Linear)}
    by_file = defaultdict(list)
    for name, parts in stored.items():
        first = 0  # element of the parameter
        for part in parts:
            by_file[part.file].append((name, first, part))
            first += math.prod(part.shape)
    for file, tensors in by_file.items():
        with safe_open(directory / file, framework="pt") as reader:
            # `copy_` converts, from bf16 to the fp32 that the optimizer updates. `get_slice` reads these rows only.
            for name, first, part in tensors:
                target, module = targets[name], quantized.get(name)
                if not part.shape:
                    target.copy_(reader.get_tensor(part.key))
                    continue
                local = target.to_local() if isinstance(target, DTensor) else target
                own = local_rows(target) if isinstance(target, DTensor) else slice(0, len(target))  # or all of it
                width, row = module.in_features if module else math.prod(target.shape[1:]), math.prod(part.shape[1:])
                begin, end = max(own.start * width, first), min(own.stop * width, first + part.shape[0] * row)
                if begin >= end:
                    continue
                rows = reader.get_slice(part.key)[(begin - first) // row : (end - first) // row]
                if module:
                    packed = quantize(rows.to(local.device)).view(local.dtype)
                    local[begin // width - own.start : end // width - own.start] = packed
                else:
                    local.view(-1)[begin - own.start * width : end - own.start * width].copy_(rows.reshape(-1))


def local_rows(param: DTensor) -> slice:
    """Which rows of the full tensor this rank holds. `fully_shard` splits the first dim as `torch.chunk` does."""
    placement, mesh = param.placements[-1], param.device_mesh
    assert isinstance(placement, Shard) and placement.dim == 0
    axis = mesh.ndim - 1
    rows, size = param.shape[0], -(-param.shape[0] // mesh.size(axis))  # rounded up: the last ranks may have none
    start = min(mesh.get_local_rank(axis) * size, rows)
    own = slice(start, min(start + size, rows))
    assert own.stop - own.start == param.to_local().shape[0]
    return own


def make_weights(
    model: nn.Module, reference: PreTrainedModel, layer_classes: list[str], seed: int, note: Callable[[], None]
) -> None:
    """Initialize all parameters randomly, one layer at a time, of which each rank keeps its own rows."""
    params = dict(model.named_parameters())
    names = {module: name for name, module in reference.named_modules()}
    rules = rules_of_random_values(reference)
    done: set[str] = set()
    for layer, modules in _layers(reference, layer_classes):
        note()
        for module in modules:
            module.to_empty(device="cpu", recurse=False)
        if not layer:
            reference.tie_weights()  # `to_empty` has replaced the parameters, so those that were one are now two
        own = {
            name: param
            for module in modules
            for key, param in module.named_parameters(recurse=False)
            # else it is tied to one that is a parameter of the model
            if (name := f"{names[module]}.{key}".lstrip(".")) in params
        }
        with seeded(f"{seed}/{layer}"), torch.no_grad():
            for param in own.values():
                param.fill_(torch.nan)
            for module in modules:
                rules[module](module)
            check_set(own)
            for name, param in own.items():
                sharded = params[name]
                assert isinstance(sharded, DTensor)
                sharded.to_local().copy_(param[local_rows(sharded)])
        done |= {*own}
        for module in modules:
            module.to_empty(device="meta", recurse=False)  # frees it: only one layer at a time is in memory
    assert done == set(params), sorted(set(params) - done)


def _layers(model: PreTrainedModel, layer_classes: list[str]) -> Iterator[tuple[str, list[nn.Module]]]:
    """Each layer, then everything outside layers: its name ('' for the rest) and its modules, children before parents.

    transformers' rules visit a module after its children, because a parent may give a child other values.
    """
    rest = dict.fromkeys(reversed(list(model.modules())))
    for name, module in model.named_modules():
        if type(module).__name__ in layer_classes:
            modules = list(reversed(list(module.modules())))
            yield name, modules
            for inner in modules:
                rest.pop(inner, None)
    yield "", list(rest)


def rules_of_random_values(model: PreTrainedModel) -> dict[nn.Module, Callable[[nn.Module], None]]:
    """What initializes each module: the method of the innermost model that it belongs to, as transformers has it."""
    rules: dict[nn.Module, Callable[[nn.Module], None]] = {}
    for module in model.modules():  # inner ones after those around them
        if isinstance(module, PreTrainedModel):
            rules |= dict.fromkeys(module.modules(), module._init_weights)
    return rules


@contextmanager
def seeded(seed: str) -> Iterator[None]:
    """Have the generator of the CPU give the same numbers on all ranks."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the GPUs too, which are not forked
        torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big"))
        yield


def check_set(tensors: Mapping[str, Tensor]) -> None:
    """Refuse a model of which transformers leaves some random weights as they were in memory.

    Raises:
        StageError: naming them.
    """
    unset = [name for name, tensor in tensors.items() if tensor.isnan().any()]
    if unset:
        raise StageError(
            f"transformers has no rule for the random values of {', '.join(unset[:3])}: use a model with weights"
        )
