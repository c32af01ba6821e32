"""From the shards of a checkpoint to safetensors files: each tensor is copied in blocks, several tensors at a time.

A model that was sharded because it is large need not fit in the memory of the machine that exports it: a block of each
thread must. torch's own converters need all of the model or of a file in memory, and fill what they do not find in the
shards with zeros. Here all names, shapes and dtypes are checked before anything is written.
"""

import hashlib
import json
import math
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from tqdm import tqdm

from stages.base.errors import StageError, explained
from stages.base.publish import write_json
from stages.checkpointing import metadata
from stages.checkpointing.layout import METADATA, MODEL
from stages.model.dtypes import BY_NAME
from stages.model.files import WEIGHTS_INDEX

MEMORY = 32 << 20
"""Bytes of the blocks that all threads read at a time; the block before, and what is cast, take as many again."""


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


class _Chunk(NamedTuple):
    """Consecutive elements of a tensor, in a file of a checkpoint."""

    first: int
    """The first element's place in the tensor."""
    num_elements: int
    path: Path
    offset: int
    """Of the archive in the file."""
    length: int
    """Of the archive, bytes."""


class ShardedTensors:
    """The tensors of the model in a checkpoint of torch.distributed.checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        """Read what `.metadata` says of them."""
        self.directory = checkpoint / MODEL
        listed = metadata.read(self.directory)
        self._entries: dict[str, Any] = {**listed.state_dict_metadata}
        self._chunks: dict[str, list[_Chunk]] = {}
        """Of each tensor, in the order of its elements."""
        with metadata.understood(self.directory / METADATA):
            places = {(index.fqn, tuple(index.offset or ())): place for index, place in listed.storage_data.items()}
            for name, entry in self._entries.items():
                for chunk in entry.chunks:
                    first, count = _elements(name, tuple(entry.size), chunk)
                    if count and (place := places.get((name, tuple(chunk.offsets)))):
                        path = self.directory / place.relative_path
                        self._chunks.setdefault(name, []).append(_Chunk(first, count, path, place.offset, place.length))
            for chunks in self._chunks.values():
                chunks.sort()

    @property
    def files(self) -> list[str]:
        """The names of the files that have a part of them."""
        return sorted({chunk.path.name for chunks in self._chunks.values() for chunk in chunks})

    def check(self, expected: Mapping[str, TensorSpec]) -> None:
        """Compare names, shapes and dtypes with `expected`, and check that the shards contain all of each tensor.

        Only metadata is read. dcp.load does not notice a missing shard: it leaves that part of the tensor as it was.

        Raises:
            StageError: naming the tensors that are missing, not expected, different, or incomplete.
        """
        problems = [f"{name} is missing" for name in expected.keys() - self._entries.keys()]
        problems += [f"{name} is not expected" for name in self._entries.keys() - expected.keys()]
        for name in expected.keys() & self._entries.keys():
            problems += self._differences(name, expected[name])
        if problems:
            raise StageError(f"{self.directory}: the tensors are not those of the model", *sorted(problems))

    def _differences(self, name: str, expected: TensorSpec) -> Iterator[str]:
        entry, end = self._entries[name], 0
        shape, dtype, size = tuple(entry.size), entry.properties.dtype, math.prod(entry.size)
        if (shape, dtype) != (expected.shape, expected.dtype):
            yield f"{name} is {list(shape)} {dtype} instead of {list(expected.shape)} {expected.dtype}"
            return
        for chunk in self._chunks.get(name, ()):
            if chunk.first != end:
                break
            end += chunk.num_elements
        if end != size:
            yield f"{name} is incomplete: the shards do not contain element {end} of {size}"

    def read(self, name: str, first: int, count: int, block: int) -> Iterator[Tensor]:
        """Yield consecutive elements of a tensor, as tensors of one dim and at most `block` bytes.

        Raises:
            StageError: a file does not contain what `.metadata` says.
        """
        dtype: torch.dtype = self._entries[name].properties.dtype
        for chunk in self._chunks.get(name, ()):
            begin, end = max(chunk.first, first), min(chunk.first + chunk.num_elements, first + count)
            if begin >= end:
                continue
            with chunk.path.open("rb") as file:
                file.seek(_data_offset(file, name, chunk, dtype) + (begin - chunk.first) * dtype.itemsize)
                while begin < end:
                    data = bytearray(min(block, (end - begin) * dtype.itemsize))
                    if file.readinto(data) != len(data):
                        raise StageError(f"{chunk.path} has become shorter while it was read")
                    yield (elements := torch.frombuffer(data, dtype=dtype))
                    begin += len(elements)


def _elements(name: str, shape: tuple[int, ...], chunk: ChunkStorageMetadata) -> tuple[int, int]:
    """Where the elements of a chunk are in its tensor: the first one's place, and how many they are."""
    if tuple(chunk.sizes[1:]) != shape[1:] or any(chunk.offsets[1:]):
        raise StageError(f"{name} is not sharded in rows: no version of the pipeline has written this checkpoint")
    return (chunk.offsets[0] if shape else 0) * math.prod(shape[1:]), math.prod(chunk.sizes)


class _Slice(RawIOBase):
    """A part of a file as a file of its own, to be read by `zipfile`."""

    def __init__(self, file: BufferedReader, start: int, size: int) -> None:
        self._file, self._start, self._size, self._place = file, start, size, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._place)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._size - self._place)])
        self._place += count
        return count


def _data_offset(file: BufferedReader, name: str, chunk: _Chunk, dtype: torch.dtype) -> int:
    """Where the elements are in the file: torch.save writes a ZIP archive for each tensor, not compressed."""
    damaged = StageError(f"{chunk.path} is damaged: {name} is not where .metadata says")
    with explained(lambda _: damaged):  # zipfile raises errors of a dozen classes at what is no archive
        with zipfile.ZipFile(cast(IO[bytes], _Slice(file, chunk.offset, chunk.length))) as archive:
            data = next(entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
        start = chunk.offset + data.header_offset
        if data.compress_size != chunk.num_elements * dtype.itemsize or start < 0:
            raise damaged
        file.seek(start)
        # A local header has 30 bytes, then a name and extra fields of any length: torch aligns the data with these.
        name_length, extra_length = struct.unpack("<26xHH", file.read(30))
    return start + 30 + int(name_length + extra_length)


class Digests(NamedTuple):
    """The SHA-256 of what was written."""

    files: dict[str, str]
    tensors: dict[str, str]
    """Of the bytes of each tensor."""


class _Copy(NamedTuple):
    """A tensor to write."""

    source: str
    """The tensor of the checkpoint."""
    first: int
    """Of its elements."""
    spec: TensorSpec
    """As written."""


def write_safetensors(
    tensors: ShardedTensors,
    specs: Mapping[str, TensorSpec],
    directory: Path,
    num_workers: int,
    dtypes: Mapping[str, torch.dtype],
    max_shard_bytes: float = math.inf,
    parts: Mapping[str, Mapping[str, tuple[int, ...]]] | None = None,
) -> Digests:
    """Write the tensors in `specs` as `model.safetensors`, or as several files with an index.

    The bytes depend on the tensors and the arguments alone, not on how many ranks wrote the checkpoint.

    Args:
        tensors: Of a checkpoint; `check` has passed.
        specs: Shape and dtype of each tensor in the checkpoint, in the model's order.
        directory: An existing directory.
        num_workers: Threads that read, cast, hash and write tensors.
        dtypes: In which each of `specs` is written; floating-point tensors alone may have another one than there.
        max_shard_bytes: Tensors share a file up to this size; a larger tensor has a file of its own.
        parts: For each tensor the names and shapes of those that are written in its place, in the order of its
            elements; None: it alone.

    Raises:
        StageError: a value is beyond the range of its dtype, or a file is not what `.metadata` says.
    """
    copies: dict[str, _Copy] = {}
    for source, spec in specs.items():
        first = 0
        for name, shape in (parts[source] if parts else {source: spec.shape}).items():
            copies[name] = _Copy(source, first, TensorSpec(shape, dtypes[source]))
            first += math.prod(shape)
    groups = _split(copies, max_shard_bytes)
    numbers = [f"-{number:05d}-of-{len(groups):05d}" for number in range(1, len(groups) + 1)]
    files = {
        f"model{number}.safetensors": group
        for number, group in zip(numbers if len(groups) > 1 else [""], groups, strict=True)
    }
    total = sum(copy.spec.num_bytes for copy in copies.values())
    block = MEMORY // max(16, num_workers) // 8 * 8  # a multiple of every item size
    digests = Digests({}, {})
    with (
        _one_thread_each(),
        tqdm(total=total, desc="consolidate", unit="B", unit_scale=True, disable=None) as progress,
        ThreadPoolExecutor(num_workers) as pool,
    ):
        try:
            # All at once, so that threads are never idle between files: a task has no memory until it runs.
            outputs = [_Output(directory / name, group) for name, group in files.items()]
            copying = [
                {name: pool.submit(output.copy, tensors, name, block) for name in output.copies} for output in outputs
            ]
            for output, futures in zip(outputs, copying, strict=True):
                # The digest of a file needs its bytes in order, of which those written last are in the page cache.
                digest = hashlib.sha256(output.header)
                with output.path.open("rb", buffering=0) as file:  # what is read ahead is not there yet
                    file.seek(len(output.header))
                    for name, future in futures.items():
                        digests.tensors[name] = future.result()
                        rest = output.copies[name].spec.num_bytes
                        while rest:
                            data = file.read(min(1 << 20, rest))
                            digest.update(data)
                            progress.update(len(data))
                            rest -= len(data)
                digests.files[output.path.name] = digest.hexdigest()
        except BaseException:  # Ctrl-C, too
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if len(groups) > 1:
        weight_map = {name: file for file, group in files.items() for name in group}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(directory / WEIGHTS_INDEX, index)
    return digests


def _split(copies: Mapping[str, _Copy], max_shard_bytes: float) -> list[dict[str, _Copy]]:
    """Groups of tensors, in the model's order, one for each file."""
    groups: list[dict[str, _Copy]] = [{}]
    size = 0
    for name, copy in copies.items():
        # A group has at least one tensor, so one that is larger than the limit gets a file of its own.
        if groups[-1] and size + copy.spec.num_bytes > max_shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = copy
        size += copy.spec.num_bytes
    return groups


class _Output:
    """A safetensors file: the length of the header (8 bytes), the header, then tensor after tensor."""

    def __init__(self, path: Path, copies: Mapping[str, _Copy]) -> None:
        """Write the header, which contains the offsets of all tensors, and reserve the space of these."""
        # Readers map the file into memory and use a tensor where it is, which needs an address that is a multiple of
        # the item size. So the data starts at a multiple of 8, and wider dtypes come first, as safetensors itself
        # orders them.
        self.path, self.copies = path, dict(sorted(copies.items(), key=lambda item: -item[1].spec.dtype.itemsize))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # which transformers before version 5 requires
        end = 0
        for name, (_, _, spec) in self.copies.items():
            place, end = end, end + spec.num_bytes
            code = BY_NAME[spec.dtype_name].code
            header[name] = {"dtype": code, "shape": list(spec.shape), "data_offsets": [place, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # JSON may end with spaces
        self.header = len(text).to_bytes(8, "little") + text
        self._places = {name: len(self.header) + header[name]["data_offsets"][0] for name in self.copies}
        with path.open("xb") as file:
            file.write(self.header)
            file.truncate(len(self.header) + end)

    def copy(self, tensors: ShardedTensors, name: str, block: int) -> str:
        """Write a tensor to its place, and return its digest."""
        source, first, spec = self.copies[name]
        digest = hashlib.sha256()
        with self.path.open("r+b") as file:
            file.seek(self._places[name])
            for elements in tensors.read(source, first, math.prod(spec.shape), block):
                content = _cast(name, elements, spec.dtype).view(torch.uint8).numpy().data  # NumPy has no bfloat16
                digest.update(content)
                file.write(content)
        return digest.hexdigest()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Keep torch from starting threads of its own in each of the threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    # The cast makes infinities of values beyond the range, without an error, and the model then computes NaN. NaN and
    # infinities that are in the checkpoint already are kept.
    low, high = torch.aminmax(tensor)
    largest, limit = max(-low.item(), high.item()), torch.finfo(dtype).max
    if not math.isfinite(largest):  # NaN, if any value is
        largest = torch.nan_to_num(tensor, 0.0, 0.0, 0.0).abs().max().item()
    if largest > limit:
        raise StageError(
            f"{name} has the value {largest:g}, beyond the {limit:g} of {dtype}: set export_dtype to a dtype with a "
            "wider range (bf16, fp32)"
        )
    return tensor.to(dtype)
