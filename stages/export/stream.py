"""From the shards of a checkpoint to safetensors files: each shard is read once, in blocks, by several threads.

A model that was sharded because it is large need not fit in the memory of the machine that exports it: the blocks that
are being worked on must. torch's own converter needs all of the model in memory, and fills what it does not find in the
shards with zeros. Here all names, shapes and dtypes are checked before anything is written, and each shard is hashed as
it is read.

A file can be hashed only from its beginning to its end, so a thread reads it in this order; others cast its blocks and
write them to their places. What is written is hashed tensor by tensor, while it is still in the page cache.
"""

import hashlib
import heapq
import io
import json
import math
import os
import resource
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view
from tqdm import tqdm

from stages.artifacts.dtypes import BY_NAME
from stages.artifacts.errors import StageError
from stages.artifacts.garbage import paused_collector
from stages.artifacts.publish import write_json

BLOCK = 8 << 20
"""Bytes that are read at once, with few threads."""
MEMORY = 64 << 20
"""Bytes of all blocks that have been read and not been written, with any number of threads; cast, as many again."""
FORMAT = {"format": "pt"}
"""In the header of each file; transformers before version 5 requires it."""
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


class _Piece(NamedTuple):
    """Consecutive elements of a tensor of the checkpoint, which are written as a tensor."""

    name: str
    """Of the tensor that is written."""
    first: int
    """The first element's place in the tensor of the checkpoint."""
    num_elements: int


class _Stored(NamedTuple):
    """Consecutive elements of a tensor, in a file of a checkpoint."""

    offset: int
    """Of the archive in the file."""
    length: int
    """Of the archive, bytes."""
    name: str
    first: int
    """The first element's place in the tensor."""
    num_elements: int


class ShardedTensors:
    """The tensors of one kind, such as `model`, in a checkpoint of torch.distributed.checkpoint."""

    def __init__(self, checkpoint: Path, kind: str = "model") -> None:
        """Read what `.metadata` says of them."""
        self.directory = checkpoint / kind
        with paused_collector():
            metadata = dcp.FileSystemReader(self.directory).read_metadata()
        self._entries: dict[str, Any] = {**metadata.state_dict_metadata}
        self.files: dict[str, list[_Stored]] = {}
        """What is in each file, in the order of the file."""
        chunks = {
            (name, tuple(chunk.offsets)): chunk
            for name, entry in self._entries.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }
        for index, place in metadata.storage_data.items():
            if chunk := chunks.get((index.fqn, tuple(index.offset or ()))):
                first, count = _elements(index.fqn, tuple(self._entries[index.fqn].size), chunk)
                stored = _Stored(place.offset, place.length, index.fqn, first, count)
                self.files.setdefault(place.relative_path, []).append(stored)
        for parts in self.files.values():
            parts.sort()

    def specs(self) -> dict[str, TensorSpec]:
        """What they are, by name.

        Raises:
            StageError: one of them is no plain tensor, or the shards do not contain all of it.
        """
        found = {
            name: TensorSpec(tuple(entry.size), entry.properties.dtype)
            for name, entry in self._entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.check({name: found.get(name, TensorSpec((), torch.float32)) for name in self._entries})
        return found

    def check(self, expected: Mapping[str, TensorSpec]) -> None:
        """Compare names, shapes and dtypes with `expected`, and check that the shards contain all of each tensor.

        Only metadata is read. dcp.load does not notice a missing shard: it leaves that part of the tensor as it was.

        Raises:
            StageError: naming the tensors that are missing, not expected, different, or incomplete.
        """
        problems = [f"{name} is missing" for name in expected.keys() - self._entries.keys()]
        problems += [f"{name} is not expected" for name in self._entries.keys() - expected.keys()]
        for name in expected.keys() & self._entries.keys():
            problems += _differences(name, expected[name], self._entries[name])
        if problems:
            raise StageError(
                "\n".join([f"{self.directory}: the tensors are not those of the model", *sorted(problems)])
            )


def _elements(name: str, shape: tuple[int, ...], chunk: ChunkStorageMetadata) -> tuple[int, int]:
    """Where the elements of a chunk are in its tensor: the first one's place, and how many they are."""
    if tuple(chunk.sizes[1:]) != shape[1:] or any(chunk.offsets[1:]):
        raise StageError(f"{name} is not sharded in rows: no version of the pipeline has written this checkpoint")
    return (chunk.offsets[0] if shape else 0) * math.prod(shape[1:]), math.prod(chunk.sizes)


def _differences(name: str, expected: TensorSpec, found: Any) -> Iterator[str]:
    if not isinstance(found, TensorStorageMetadata):
        yield f"{name} is not a tensor"
        return
    shape, dtype = tuple(found.size), found.properties.dtype
    if (shape, dtype) != (expected.shape, expected.dtype):
        yield f"{name} is {list(shape)} {dtype} instead of {list(expected.shape)} {expected.dtype}"
    # Shards do not overlap, as each row is written once, so the sum of their sizes finds any gap.
    elif (stored := sum(math.prod(chunk.sizes) for chunk in found.chunks)) != math.prod(shape):
        yield f"{name} is incomplete: the shards contain {stored} of {math.prod(shape)} elements"


class Digests(NamedTuple):
    """The SHA-256 of what was written."""

    files: dict[str, str]
    tensors: dict[str, str]
    """Of the bytes of each tensor."""


def write_safetensors(
    tensors: ShardedTensors,
    specs: Mapping[str, TensorSpec],
    directory: Path,
    num_workers: int,
    check_digest: Callable[[Path, str], None] = lambda path, sha256: None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: float = math.inf,
    stem: str = "model",
    metadata: Mapping[str, str] = FORMAT,
    parts: Mapping[str, Mapping[str, tuple[int, ...]]] | None = None,
) -> Digests:
    """Write the tensors in `specs` as `<stem>.safetensors`, or as several files with an index.

    The bytes depend on the tensors and the arguments alone, not on how many ranks wrote the checkpoint.

    Args:
        tensors: Of a checkpoint; `check` has passed.
        specs: Shape and dtype of each tensor in the checkpoint, in the model's order.
        directory: An existing directory.
        num_workers: Threads that read, cast and hash.
        check_digest: Called with each file of the checkpoint that was read and its SHA-256; raises if it is another.
        dtype: Floating-point tensors are cast to it, others keep their dtype; None: all do.
        max_shard_bytes: Tensors share a file up to this size; a larger tensor has a file of its own.
        stem: Of the names of the files.
        metadata: Strings in the header of each file.
        parts: For each tensor the names and shapes of those that are written in its place, in the order of its
            elements; None: it alone.

    Raises:
        StageError: a value is beyond the range of `dtype`, or a file is not what `.metadata` says.
    """
    pieces: dict[str, list[_Piece]] = {}
    written: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        pieces[name], first = [], 0
        for key, shape in (parts[name] if parts else {name: spec.shape}).items():
            pieces[name].append(_Piece(key, first, math.prod(shape)))
            written[key] = TensorSpec(shape, spec.dtype)
            first += math.prod(shape)
    stored = {
        name: TensorSpec(spec.shape, dtype if dtype and spec.dtype.is_floating_point else spec.dtype)
        for name, spec in written.items()
    }
    groups = _split(stored, max_shard_bytes)
    numbers = [f"-{number:05d}-of-{len(groups):05d}" for number in range(1, len(groups) + 1)]
    names = [f"{stem}{number}.safetensors" for number in (numbers if len(groups) > 1 else [""])]
    _allow_open_files(len(groups) + 3 * num_workers)
    with ExitStack() as stack:
        outputs = [_Output(directory / name, group, metadata) for name, group in zip(names, groups, strict=True)]
        for output in outputs:
            stack.enter_context(output)
        _Export(tensors, written, pieces, outputs, num_workers, check_digest).run()
        digests = Digests(
            {output.path.name: output.digest.hexdigest() for output in outputs},
            {name: digest for output in outputs for name, digest in output.digests.items()},
        )
    total = sum(spec.num_bytes for spec in stored.values())
    if len(groups) > 1:
        weight_map = {name: file for file, group in zip(names, groups, strict=True) for name in group}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(directory / f"{stem}.safetensors.index.json", index)
    return digests


def _allow_open_files(needed: int) -> None:
    """Raise the number of files that this process may open to the most that is allowed.

    Raises:
        StageError: that is fewer than are needed at once.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the default of 1 024 is for programs with select()
    if most != resource.RLIM_INFINITY and most < needed + _OTHER_FILES:
        raise StageError(
            f"the model needs {needed + _OTHER_FILES:,} open files, and {most:,} are allowed (`ulimit -Hn`): use a "
            "larger max_shard_size, or a smaller runtime.num_workers"
        )


def _split(specs: Mapping[str, TensorSpec], max_shard_bytes: float) -> list[dict[str, TensorSpec]]:
    """Groups of tensors, in the model's order, one for each file."""
    groups: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        # A group has at least one tensor, so one that is larger than the limit gets a file of its own.
        if groups[-1] and size + spec.num_bytes > max_shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = spec
        size += spec.num_bytes
    return groups


class _Output:
    """A safetensors file: the length of the header (8 bytes), the header, then tensor after tensor."""

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> None:
        """Write the header, which contains the offsets of all tensors, and reserve the space of these."""
        # Readers map the file into memory and use a tensor where it is, which needs an address that is a multiple of
        # the item size. So the data starts at a multiple of 8, and wider dtypes come first, as safetensors itself
        # orders them.
        self.specs = dict(sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize))
        self.path = path
        header: dict[str, Any] = {"__metadata__": metadata}
        places, end = {}, 0
        for name, spec in self.specs.items():
            places[name], end = end, end + spec.num_bytes
            code = BY_NAME[spec.dtype_name].code
            header[name] = {"dtype": code, "shape": list(spec.shape), "data_offsets": [places[name], end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # JSON may end with spaces
        content = len(text).to_bytes(8, "little") + text
        self.places = {name: len(content) + place for name, place in places.items()}
        self.digest = hashlib.sha256(content)
        """Of what is hashed so far."""
        self.digests: dict[str, str] = {}
        """Of each tensor that is hashed."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        os.ftruncate(self._file, len(content) + end)
        self.write(content, 0)

    def __enter__(self) -> "_Output":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._file, rest, offset)
            rest, offset = rest[written:], offset + written

    def hash(self, name: str) -> None:
        """Hash a tensor, after those before it in the file."""
        digest, offset = hashlib.sha256(), self.places[name]
        end = offset + self.specs[name].num_bytes
        while offset < end:
            data = os.pread(self._file, min(1 << 20, end - offset), offset)
            digest.update(data)
            self.digest.update(data)
            offset += len(data)
        self.digests[name] = digest.hexdigest()
        # The kernel begins to write these pages to the disk, instead of waiting until there are too many of them.
        os.posix_fadvise(self._file, self.places[name], self.specs[name].num_bytes, os.POSIX_FADV_DONTNEED)


class _Part(NamedTuple):
    """Elements of a tensor in a block."""

    name: str
    first: int
    """The first element's place in the tensor."""
    start: int
    """Where they are in the block."""
    stop: int


class _Block(NamedTuple):
    """Bytes of a file of a checkpoint."""

    start: int
    stop: int
    parts: list[_Part]
    """What is in them."""


class _Input:
    """A file of a checkpoint, which is read from its beginning to its end, in blocks."""

    def __init__(
        self, path: Path, parts: list[_Stored], specs: Mapping[str, TensorSpec],
        pieces: Mapping[str, list[_Piece]], block: int, number: int,
    ) -> None:  # fmt: skip
        self.path, self.number = path, number
        self.digest = hashlib.sha256()
        self.size = path.stat().st_size
        self._parts, self._specs, self._pieces, self._block = parts, specs, pieces, block
        self._file: io.FileIO | None = None

    def blocks(self) -> Iterator[tuple["_Input", _Block]]:
        """All of the file; no element is in two blocks."""
        data = [place for part in self._parts for place in self._places(part)]
        start = index = 0
        while start < self.size:
            stop = min(start + self._block, self.size)
            inside = []
            for offset, name, place, count in data[index:]:
                if offset >= stop:
                    break
                itemsize = self._specs[name].dtype.itemsize
                end = offset + count * itemsize
                begin = max(offset, start)
                if end <= stop:
                    index += 1
                else:
                    stop -= (stop - offset) % itemsize
                if begin < min(end, stop):
                    first = place + (begin - offset) // itemsize
                    inside.append(_Part(name, first, begin - start, min(end, stop) - start))
            yield self, _Block(start, stop, inside)
            start = stop

    def _places(self, part: _Stored) -> Iterator[tuple[int, str, int, int]]:
        """What is in `part` of the tensors to write: the offset in the file, the name, the first element, how many."""
        pieces = self._pieces[part.name]
        itemsize = self._specs[pieces[0].name].dtype.itemsize
        offset = self._data_offset(part, part.num_elements * itemsize)
        for name, first, count in pieces:
            begin, end = max(part.first, first), min(part.first + part.num_elements, first + count)
            if begin < end:
                yield offset + (begin - part.first) * itemsize, name, begin - first, end - begin

    def _data_offset(self, part: _Stored, num_bytes: int) -> int:
        """Where the elements are: each tensor is an archive by itself, as torch.save writes it, not compressed."""
        problem = StageError(f"{self.path} is damaged: {part.name} is not where .metadata says")
        try:
            archive = _create_file_view(self.open(), part.offset, part.length)
            reader: Any = torch._C.PyTorchFileReader(cast(IO[bytes], archive))
            offset = int(reader.get_record_offset("data/0")) if num_bytes else 0
            size = int(reader.get_record_size("data/0")) if num_bytes else 0
        except RuntimeError:
            raise problem from None
        if size != num_bytes or offset + size > part.length:
            raise problem
        return part.offset + offset

    def open(self) -> io.FileIO:
        """The file, which is opened once."""
        if self._file is None:
            self._file = io.FileIO(self.path)
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, block: _Block) -> bytearray:
        """Read and hash the next block."""
        data, start = bytearray(block.stop - block.start), block.start
        rest = memoryview(data)
        while rest:
            count = os.preadv(self.open().fileno(), [rest], start)
            if not count:
                raise StageError(f"{self.path} has become shorter while it was read")
            rest, start = rest[count:], start + count
        self.digest.update(data)
        return data


class _Export:
    """Threads that read, cast, write and hash; all else is decided by the one that starts them."""

    def __init__(
        self, tensors: ShardedTensors, specs: Mapping[str, TensorSpec], pieces: Mapping[str, list[_Piece]],
        outputs: list[_Output], num_workers: int, check_digest: Callable[[Path, str], None],
    ) -> None:  # fmt: skip
        self._specs, self._outputs, self._num_workers = specs, outputs, num_workers
        self._check_digest = check_digest
        self._most = 3 * num_workers  # blocks at once
        block = min(BLOCK, MEMORY // self._most)
        self._inputs = [
            _Input(tensors.directory / name, parts, specs, pieces, block, number)
            for number, (name, parts) in enumerate(tensors.files.items())
        ]
        self._output_of = {name: output for output in outputs for name in output.specs}
        self._missing = {name: math.prod(spec.shape) for name, spec in specs.items()}  # elements
        self._next = {output: deque(output.specs) for output in outputs}  # tensors to hash
        self._hashes: list[Future[None]] = []

    def run(self) -> None:
        """Write all tensors."""
        total = sum(spec.num_bytes for output in self._outputs for spec in output.specs.values())
        with (
            ExitStack() as stack,
            _one_thread_each(),
            ThreadPoolExecutor(self._num_workers, "cast") as casting,
            _lanes(self._num_workers, "read") as reading,
            _lanes(self._num_workers, "hash") as hashing,
            tqdm(total=total, desc="consolidate", unit="B", unit_scale=True, disable=None) as progress,
        ):
            for source in self._inputs:
                stack.callback(source.close)
            pending: deque[Future[Future[list[_Part]]]] = deque()

            def finish_one() -> None:
                for part in pending.popleft().result().result():
                    count = (part.stop - part.start) // self._specs[part.name].dtype.itemsize
                    self._missing[part.name] -= count
                    progress.update(count * self._output_of[part.name].specs[part.name].dtype.itemsize)
                self._hash_complete(hashing)

            try:
                for source, block in self._blocks():
                    if len(pending) == self._most:
                        finish_one()
                    lane = reading[source.number % self._num_workers]
                    pending.append(lane.submit(self._read, source, block, casting))
                while pending:
                    finish_one()
                self._hash_complete(hashing)  # a model without elements
                if incomplete := [name for name, count in self._missing.items() if count]:
                    raise StageError(f"{incomplete[0]} is incomplete: .metadata does not say where all of it is")
                for hashed in self._hashes:
                    hashed.result()
            except BaseException:
                for hashed in self._hashes:
                    hashed.cancel()
                raise

    def _blocks(self) -> Iterator[tuple[_Input, _Block]]:
        """All blocks of all files.

        The ranks have the same tensors in the same order, so files are read side by side: a tensor is complete soon
        after its first block.
        """
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        # While a file's blocks are not read yet, those of the next may already be planned.
        at_once = len(self._inputs)
        if most != resource.RLIM_INFINITY:
            at_once = max(1, most - _OTHER_FILES - len(self._outputs) - self._most)
        for first in range(0, len(self._inputs), at_once):
            files = [source.blocks() for source in self._inputs[first : first + at_once]]
            yield from heapq.merge(*files, key=lambda item: item[1].start / item[0].size)

    def _read(self, source: _Input, block: _Block, casting: ThreadPoolExecutor) -> Future[list[_Part]]:
        data = source.read(block)
        if block.stop == source.size:
            source.close()
            self._check_digest(source.path, source.digest.hexdigest())
        return casting.submit(self._write, data, block.parts)

    def _write(self, data: bytearray, parts: list[_Part]) -> list[_Part]:
        for part in parts:
            source, output = self._specs[part.name].dtype, self._output_of[part.name]
            target = output.specs[part.name].dtype
            raw = torch.frombuffer(data, dtype=torch.uint8)[part.start : part.stop]
            # Only bytes at a multiple of the item size can be viewed as items.
            items = (raw.clone() if part.start % source.itemsize else raw).view(source)
            content = _cast(part.name, items, target).view(torch.uint8).numpy().data  # NumPy has no bfloat16
            output.write(content, output.places[part.name] + part.first * target.itemsize)
        return parts

    def _hash_complete(self, hashing: list[ThreadPoolExecutor]) -> None:
        """Start to hash the next tensors of each file, as far as they are written."""
        for number, (output, names) in enumerate(self._next.items()):
            while names and not self._missing[names[0]]:
                self._hashes.append(hashing[number % len(hashing)].submit(output.hash, names.popleft()))


@contextmanager
def _lanes(count: int, name: str) -> Iterator[list[ThreadPoolExecutor]]:
    """Threads with a queue each: what is in one is done in order."""
    with ExitStack() as stack:
        yield [stack.enter_context(ThreadPoolExecutor(1, name)) for _ in range(count)]


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
