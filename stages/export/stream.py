"""From the shards of a checkpoint to safetensors files, one tensor in memory at a time.

torch's own converter fills what it does not find with zeros, and needs the whole model in memory. Here each tensor is
held against what is expected before anything is written.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from tqdm import tqdm

from stages.artifacts.command import StageError
from stages.artifacts.publish import write_json

MAX_FILE_BYTES = 1 << 30
"""Tensors share a file up to this size; a larger one has a file of its own."""

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must be."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


class ShardedWeights:
    """The tensors below `model` in a checkpoint of torch.distributed.checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self._reader = _Reader(checkpoint)
        self._metadata = self._reader.read_metadata()

    def check(self, expected: Mapping[str, TensorSpec]) -> None:
        """Hold names, shapes and dtypes against `expected`, and see that the shards make up each tensor.

        Raises:
            StageError: naming the tensors that are missing, not expected, different, or not whole.
        """
        found: dict[str, Any] = {
            name.removeprefix("model."): entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if name.startswith("model.")
        }
        problems = [f"{name} is missing" for name in expected.keys() - found.keys()]
        problems += [f"{name} is not expected" for name in found.keys() - expected.keys()]
        for name in expected.keys() & found.keys():
            problems += _differences(name, expected[name], found[name])
        if problems:
            raise StageError(
                "\n".join([f"{self._reader.path}: the tensors are not those of the model", *sorted(problems)])
            )

    def read(self, name: str, spec: TensorSpec) -> Tensor:
        """Read one whole tensor."""
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is meant
            dcp.load({"model": {name: tensor}}, storage_reader=self._reader, no_dist=True)
        return tensor


class _Reader(dcp.FileSystemReader):
    """Reads the metadata, which are large for large models, once and not once a tensor."""

    _cached: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._cached is None:
            self._cached = super().read_metadata(*args, **kwargs)
        return self._cached


def _differences(name: str, expected: TensorSpec, found: Any) -> Iterator[str]:
    if not isinstance(found, TensorStorageMetadata):
        yield f"{name} is no tensor"
        return
    shape, dtype = tuple(found.size), found.properties.dtype
    if (shape, dtype) != (expected.shape, expected.dtype):
        yield f"{name} is {list(shape)} {dtype} instead of {list(expected.shape)} {expected.dtype}"
    elif (stored := sum(math.prod(chunk.sizes) for chunk in found.chunks)) != math.prod(shape):
        yield f"{name} is not whole: the shards hold {stored} of {math.prod(shape)} elements"


def write_safetensors(
    weights: ShardedWeights, specs: Mapping[str, TensorSpec], dtype: torch.dtype, target: Path
) -> dict[str, str]:
    """Write the tensors in `specs` as `model.safetensors`, or as several files with an index.

    Floating-point tensors are cast to `dtype`, others are kept. The bytes depend on nothing else.

    Returns:
        The SHA-256 of each file.

    Raises:
        StageError: a value is beyond the range of `dtype`.
    """
    stored = {
        name: TensorSpec(spec.shape, dtype if spec.dtype.is_floating_point else spec.dtype)
        for name, spec in specs.items()
    }
    groups = _split(stored)
    digests: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    total = sum(spec.num_bytes for spec in stored.values())
    with tqdm(total=total, desc="consolidate", unit="B", unit_scale=True, disable=None) as progress:
        for number, group in enumerate(groups, 1):
            single = len(groups) == 1
            file = "model.safetensors" if single else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            digest = hashlib.sha256()
            with (target / file).open("wb") as output:
                for data in _file_content(weights, specs, group):
                    output.write(data)
                    digest.update(data)
                    progress.update(len(data))
            digests[file] = digest.hexdigest()
            weight_map |= dict.fromkeys(group, file)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(target / "model.safetensors.index.json", index)
    return digests


def _split(specs: Mapping[str, TensorSpec]) -> list[dict[str, TensorSpec]]:
    """Groups of tensors, in the model's order, of at most `MAX_FILE_BYTES` each."""
    groups: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if groups[-1] and size + spec.num_bytes > MAX_FILE_BYTES:
            groups.append({})
            size = 0
        groups[-1][name] = spec
        size += spec.num_bytes
    return groups


def _file_content(
    weights: ShardedWeights, specs: Mapping[str, TensorSpec], stored: Mapping[str, TensorSpec]
) -> Iterator[bytes | memoryview]:
    """A safetensors file: the length of the header, the header, then tensor after tensor."""
    # The widest first, so that each tensor is aligned to its own item size.
    ordered = sorted(stored.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    offset = 0
    for name, spec in ordered:
        end = offset + spec.num_bytes
        header[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name, spec in ordered:
        tensor = _cast(name, weights.read(name, specs[name]), spec.dtype)
        yield tensor.reshape(-1).view(torch.uint8).numpy().data


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == dtype or tensor.numel() == 0:
        return tensor.to(dtype)
    low, high = torch.aminmax(tensor)
    largest, limit = max(-low.item(), high.item()), torch.finfo(dtype).max
    if limit < largest < math.inf:
        raise StageError(
            f"{name} has values up to {largest:g}, beyond the {limit:g} of {dtype}, in which the source model is "
            "stored: start from one in bfloat16 or float32"
        )
    return tensor.to(dtype)
