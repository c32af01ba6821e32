"""From the shards of a checkpoint to safetensors files, which torch loads the tensors into.

A model that was sharded because it is large need not fit in the memory of the machine that exports it. Each file is
mapped into memory, and torch.distributed.checkpoint copies one stored piece after the other into it, and casts it. So
one piece is in memory at a time, and what is written is in the page cache, which the system frees.

torch leaves a part of a tensor that is in no shard as it was. Here all names, shapes, dtypes and parts are checked
before anything is written.
"""

import hashlib
import json
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from tqdm import tqdm

from stages.base.errors import StageError, explained, naming
from stages.base.publish import write_json
from stages.checkpointing import metadata
from stages.checkpointing.layout import METADATA, MODEL
from stages.model.dtypes import BY_NAME
from stages.model.files import WEIGHTS_INDEX


class ShardedTensors:
    """The tensors of the model in a checkpoint of torch.distributed.checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        """Read what `.metadata` says of them."""
        self.directory = checkpoint / MODEL
        self._reader = metadata.Reader(self.directory)
        self._listed: Any = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._listed, is_coordinator=True)

    @property
    def files(self) -> list[str]:
        """The names of the files that have a part of them."""
        return sorted({stored.relative_path for stored in self._listed.storage_data.values()})

    def check(self, expected: Mapping[str, Tensor]) -> None:
        """Compare names, shapes and dtypes with `expected`, and check that the shards contain all of each tensor.

        Only metadata is read, and no value of `expected`, which may be on the meta device.

        Raises:
            StageError: naming the tensors that are missing, not expected, different, or incomplete.
        """
        problems = [f"{name} is missing" for name in expected.keys() - self._listed.state_dict_metadata.keys()]
        problems += [f"{name} is not expected" for name in self._listed.state_dict_metadata.keys() - expected.keys()]
        with metadata.understood(self.directory / METADATA):
            for name in expected.keys() & self._listed.state_dict_metadata.keys():
                problems += self._differences(name, expected[name])
        if problems:
            raise StageError(f"{self.directory}: the tensors are not those of the model", *sorted(problems))

    def _differences(self, name: str, expected: Tensor) -> Iterator[str]:
        entry, end = self._listed.state_dict_metadata[name], 0
        shape, dtype, size = tuple(entry.size), entry.properties.dtype, math.prod(entry.size)
        if (shape, dtype) != (expected.shape, expected.dtype):
            yield f"{name} is {list(shape)} {dtype} instead of {list(expected.shape)} {expected.dtype}"
            return
        # FSDP shards in rows: each chunk begins where the one before ends.
        for chunk in sorted(entry.chunks, key=lambda chunk: (*chunk.offsets, *chunk.sizes)):
            is_rows = tuple(chunk.sizes[1:]) == shape[1:] and not any(chunk.offsets[1:])
            first = math.prod((*chunk.offsets[:1], *shape[1:])) if shape else 0
            if MetadataIndex(name, chunk.offsets) in self._listed.storage_data and is_rows and first == end:
                end += math.prod(chunk.sizes)
        if end != size:
            yield f"{name} is incomplete: the shards do not contain element {end} of {size}"

    def load(self, name: str, content: memoryview, dtype: torch.dtype, goes_on: Callable[[int], object]) -> None:
        """Have torch copy a tensor into `content`, one stored piece after the other, cast to `dtype`.

        `goes_on` is called with the number of bytes of each piece.

        Raises:
            StageError: a value is beyond the range of the dtype, or a file is not what `.metadata` says.
        """
        entry = self._listed.state_dict_metadata[name]
        target = torch.frombuffer(content, dtype=dtype).view(entry.size)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(
            {name: target if dtype == entry.properties.dtype else in_range(name, target)}, self._listed
        )
        for item in planner.create_local_plan().items:
            self._read(item, planner)
            goes_on(math.prod(item.lengths) * dtype.itemsize)

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        path = self.directory / self._listed.storage_data[item.storage_index].relative_path
        damaged = f"{path} is damaged: {item.storage_index.fqn} is not where {METADATA} says"
        with explained(lambda problem: StageError(f"{damaged} ({problem})")):
            self._reader.read_data(LoadPlan([item]), planner)


def in_range(name: str, tensor: Tensor) -> Tensor:
    """A tensor that refuses values beyond the range of its dtype.

    torch makes infinities of them, without an error, and the model then computes NaN. NaN and infinities that are in
    the checkpoint already are kept.
    """

    class InRange(Tensor):
        def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
            low, high = torch.aminmax(source)
            largest, limit = max(-low.item(), high.item()), torch.finfo(self.dtype).max
            if not math.isfinite(largest):  # NaN, if any value is
                largest = torch.nan_to_num(source, 0.0, 0.0, 0.0).abs().max().item()
            if largest > limit:
                raise StageError(
                    f"{name} has the value {largest:g}, beyond the {limit:g} of {self.dtype}: set export_dtype to a "
                    "dtype with a wider range (bf16, fp32)"
                )
            return self.as_subclass(Tensor).copy_(source, non_blocking)

    return tensor.as_subclass(InRange)


class Digests(NamedTuple):
    """The SHA-256 of what was written."""

    files: dict[str, str]
    tensors: dict[str, str]
    """Of the bytes of each tensor."""


Load = Callable[[str, memoryview, torch.dtype, Callable[[int], object]], None]
"""Where the values of tensors come from: `ShardedTensors.load`, or one like it."""


def write_safetensors(
    load: Load,
    parts: Mapping[str, Mapping[str, tuple[int, ...]]],
    directory: Path,
    num_workers: int,
    dtypes: Mapping[str, torch.dtype],
    max_shard_bytes: int = sys.maxsize,
    stem: str = "model",
) -> Digests:
    """Write tensors as `model.safetensors`, or as several files with an index.

    The bytes depend on the tensors and the arguments alone, not on how many ranks wrote the checkpoint.

    Args:
        load: Of the tensors of a checkpoint, whose `check` has passed, or of merged ones.
        parts: For each tensor there, in the model's order, the names and shapes of those that are written in its place,
            in the order of its elements and in one file.
        directory: An existing directory.
        num_workers: Threads that hash tensors.
        dtypes: In which each tensor is written; floating-point tensors alone may have another one than there.
        max_shard_bytes: Tensors share a file up to this size; a larger one has a file of its own.
        stem: What the names of the files begin with.

    Raises:
        StageError: a value is beyond the range of its dtype, or a file is not what `.metadata` says.
    """
    stored = {
        name: {part: torch.empty(shape, dtype=dtypes[name], device="meta") for part, shape in shapes.items()}
        for name, shapes in parts.items()
    }
    split = split_state_dict_into_shards_factory(  # as `save_pretrained` does
        stored,
        get_storage_size=_num_bytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    of_files: dict[str, Future[str]] = {}
    of_tensors: dict[str, Future[str]] = {}
    with (
        tqdm(
            total=split.metadata["total_size"], desc="consolidate", unit="B", unit_scale=True, disable=None
        ) as progress,
        ThreadPoolExecutor(num_workers) as pool,
    ):
        for file, names in split.filename_to_tensors.items():
            content, slices_of = _create(directory / file, [stored[name] for name in names])
            for name in names:
                slices = [slices_of[part] for part in stored[name]]
                if _num_bytes(stored[name]):
                    load(name, content[slices[0].start : slices[-1].stop], dtypes[name], progress.update)
                of_tensors |= {part: pool.submit(_sha256, content[slices_of[part]]) for part in stored[name]}
            of_files[file] = pool.submit(_sha256, content)
    if split.is_sharded:
        weight_map = {part: file for name, file in split.tensor_to_filename.items() for part in stored[name]}
        write_json(
            directory / WEIGHTS_INDEX, {"metadata": split.metadata, "weight_map": dict(sorted(weight_map.items()))}
        )
    return Digests(
        {file: digest.result() for file, digest in of_files.items()},
        {name: digest.result() for name, digest in of_tensors.items()},
    )


def _sha256(content: memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


_Stored = Mapping[str, Tensor]
"""A tensor of the checkpoint, as those that are written in its place, on the meta device, in the order of its elements.
"""


def _num_bytes(tensor: _Stored) -> int:
    return sum(part.nbytes for part in tensor.values())


def _create(path: Path, group: list[_Stored]) -> tuple[memoryview, dict[str, slice]]:
    """Create a safetensors file; return its mapped content, and where in it each tensor is."""
    # Readers map the file into memory and use a tensor where it is, which needs an address that is a multiple of the
    # item size. So the data starts at a multiple of 8, and wider dtypes come first, as safetensors itself orders them.
    parts = [(name, part) for tensor in group for name, part in tensor.items()]
    parts.sort(key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # which transformers before version 5 requires
    end = 0
    for name, part in parts:
        begin, end = end, end + part.nbytes
        code = BY_NAME[str(part.dtype).removeprefix("torch.")].code
        header[name] = {"dtype": code, "shape": list(part.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # JSON may end with spaces
    start = 8 + len(text)
    with naming(path), path.open("x+b") as file:
        # Not truncate: where the disk has no room for a mapped page, the process is killed (SIGBUS).
        os.posix_fallocate(file.fileno(), 0, start + end)
        content = memoryview(mmap.mmap(file.fileno(), start + end))
    content[:start] = len(text).to_bytes(8, "little") + text
    return content, {name: slice(*(start + offset for offset in header[name]["data_offsets"])) for name, _ in parts}
