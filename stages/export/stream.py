"""From the shards of a checkpoint to safetensors files, one tensor in memory at a time.

A model that was sharded because it is large need not fit in the memory of the machine that exports it: one tensor must.
torch's own converter needs all of the model in memory, and fills what it does not find in the shards with zeros. Here
all names, shapes and dtypes are checked before anything is written.
"""

import hashlib
import io
import json
import math
import os
import resource
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from tqdm import tqdm

from stages.artifacts.dtypes import BY_NAME
from stages.artifacts.errors import StageError
from stages.artifacts.garbage import paused_collector
from stages.artifacts.model_files import WEIGHTS, WEIGHTS_INDEX
from stages.artifacts.publish import write_json

_OTHER_FILES = 100
"""Files that a process may have open beside those of a checkpoint."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """PyTorch's name, such as `float32`."""
        return str(self.dtype).removeprefix("torch.")


class ShardedWeights:
    """The tensors below `model` in a checkpoint of torch.distributed.checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self._reader = _Reader(checkpoint)
        self._metadata = self._reader.read_metadata()

    def files_open(self) -> AbstractContextManager[None]:
        """Open each file only once for all tensors that are read."""
        return self._reader.files.keep()

    def check(self, expected: Mapping[str, TensorSpec]) -> None:
        """Compare names, shapes and dtypes with `expected`, and check that the shards contain all of each tensor.

        Only metadata is read. dcp.load does not notice a missing shard: it leaves that part of the tensor as it was.

        Raises:
            StageError: naming the tensors that are missing, not expected, different, or incomplete.
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
        """Read one tensor from all its shards."""
        tensor = torch.empty(spec.shape, dtype=spec.dtype)  # not zeros: `check` ensured that the shards fill all of it
        with warnings.catch_warnings():
            # One process reads the shards of all ranks, so there is nobody to talk to.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # In place. The planner flattens the nested dictionary to the name `model.<name>` of the checkpoint.
            dcp.load({"model": {name: tensor}}, storage_reader=self._reader, no_dist=True)
        return tensor


class _Reader(dcp.FileSystemReader):
    """Reads the metadata, which is large for large models, once and not for every tensor; files likewise."""

    _cached: Metadata | None = None

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self.fs = self.files = _OpenFiles()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._cached is None:
            with paused_collector():
                self._cached = super().read_metadata(*args, **kwargs)
        return self._cached


class _OpenFiles(FileSystem):
    """Keeps the files of the ranks open: of 1 024, each would be opened again for each of hundreds of tensors."""

    def __init__(self) -> None:
        self._files: dict[str, io.IOBase] = {}
        self._stack = ExitStack()
        self._limit = 0

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Keep as many files open as the system allows."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the default of 1 024 is for programs with select()
        self._limit = most - _OTHER_FILES if most != resource.RLIM_INFINITY else sys.maxsize
        with self._stack:
            yield
        self._files, self._limit = {}, 0

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        name = os.fspath(path)
        if name not in self._files:
            if len(self._files) >= self._limit:
                with super().create_stream(path, mode) as file:
                    yield file
                return
            self._files[name] = self._stack.enter_context(super().create_stream(path, mode))
        yield self._files[name]


def _differences(name: str, expected: TensorSpec, found: Any) -> Iterator[str]:
    if not isinstance(found, TensorStorageMetadata):
        yield f"{name} is not a tensor"
        return
    shape, dtype = tuple(found.size), found.properties.dtype
    if (shape, dtype) != (expected.shape, expected.dtype):
        yield f"{name} is {list(shape)} {dtype} instead of {list(expected.shape)} {expected.dtype}"
    # Shards do not overlap, as DCP writes each part once, so the sum of their sizes finds any gap.
    elif (stored := sum(math.prod(chunk.sizes) for chunk in found.chunks)) != math.prod(shape):
        yield f"{name} is incomplete: the shards contain {stored} of {math.prod(shape)} elements"


def write_safetensors(
    weights: ShardedWeights,
    specs: Mapping[str, TensorSpec],
    dtype: torch.dtype,
    directory: Path,
    max_file_bytes: int,
) -> dict[str, str]:
    """Write the tensors in `specs` as `model.safetensors`, or as several files with an index.

    The bytes depend on the arguments alone, not on how many ranks wrote the checkpoint.

    Args:
        weights: Of a checkpoint; `check` has passed.
        specs: Shape and dtype of each tensor in the checkpoint, in the model's order.
        dtype: Floating-point tensors are cast to it, others keep their dtype.
        directory: An existing directory.
        max_file_bytes: Tensors share a file up to this size; a larger tensor has a file of its own.

    Returns:
        The SHA-256 of each file.

    Raises:
        StageError: a value is beyond the range of `dtype`.
    """
    stored = {
        name: TensorSpec(spec.shape, dtype if spec.dtype.is_floating_point else spec.dtype)
        for name, spec in specs.items()
    }
    groups = _split(stored, max_file_bytes)
    digests: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    total = sum(spec.num_bytes for spec in stored.values())
    with (
        weights.files_open(),
        tqdm(total=total, desc="consolidate", unit="B", unit_scale=True, disable=None) as progress,
    ):
        for number, group in enumerate(groups, 1):
            single = len(groups) == 1
            file = WEIGHTS if single else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            digest = hashlib.sha256()  # while the file is written: hashing it later would read all of it again
            with (directory / file).open("wb") as output:
                for data in _file_content(weights, specs, group):
                    output.write(data)
                    digest.update(data)
                    progress.update(len(data))
            digests[file] = digest.hexdigest()
            # No fsync here: `publish.directory` flushes all files before it renames their directory.
            weight_map |= dict.fromkeys(group, file)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(directory / WEIGHTS_INDEX, index)
    return digests


def _split(specs: Mapping[str, TensorSpec], max_file_bytes: int) -> list[dict[str, TensorSpec]]:
    """Groups of tensors, in the model's order, one for each file."""
    groups: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        # A group has at least one tensor, so one that is larger than the limit gets a file of its own.
        if groups[-1] and size + spec.num_bytes > max_file_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = spec
        size += spec.num_bytes
    return groups


def _file_content(
    weights: ShardedWeights, specs: Mapping[str, TensorSpec], stored: Mapping[str, TensorSpec]
) -> Iterator[bytes | memoryview]:
    """A safetensors file: the length of the header (8 bytes), the header, then tensor after tensor.

    The header comes first and contains the offsets of all tensors, so it is made from `stored` before a tensor is read.
    """
    # Readers map the file into memory and use a tensor where it is, which needs an address that is a multiple of the
    # item size. So the data starts at a multiple of 8, and wider dtypes come first, as safetensors itself orders them.
    ordered = sorted(stored.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers before version 5 requires it
    offset = 0
    for name, spec in ordered:
        end = offset + spec.num_bytes
        code = BY_NAME[spec.dtype_name].code
        header[name] = {"dtype": code, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # JSON may end with spaces
    yield len(text).to_bytes(8, "little") + text
    for name, spec in ordered:
        tensor = _cast(name, weights.read(name, specs[name]), spec.dtype)
        # (bytes,): NumPy has no bfloat16. Flat first, because a scalar cannot be viewed as bytes. No copy.
        yield tensor.reshape(-1).view(torch.uint8).numpy().data


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == dtype or tensor.numel() == 0:  # torch.aminmax fails on an empty tensor
        return tensor.to(dtype)
    # The cast makes infinities of values beyond the range, without an error, and the model then computes NaN. NaN and
    # infinities that are in the checkpoint already are kept.
    low, high = torch.aminmax(tensor)
    largest, limit = max(-low.item(), high.item()), torch.finfo(dtype).max
    if not math.isfinite(largest):  # NaN, if any value is
        largest = torch.nan_to_num(tensor, 0.0, 0.0, 0.0).abs().max().item()
    if largest > limit:
        raise StageError(
            f"{name} has values up to {largest:g}, beyond the {limit:g} of {dtype}: set export_dtype to a dtype with a "
            "wider range (bf16, fp32)"
        )
    return tensor.to(dtype)
