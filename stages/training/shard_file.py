"""The files of a checkpoint that a rank writes, kept in memory: later saves only copy the tensors into it.

torch.distributed.checkpoint handles each tensor in Python: a thread that saves with it holds the interpreter, and the
training waits for it, a tenth of a second for a model of 12 layers. But from one save of a run to the next, only the
values of the tensors change. So torch writes the files once, into memory, and the thread writes each to the disk
and hashes it in two calls, during which the interpreter is free. The plan of the ranks and `.metadata` are made once
as well. With a process of its own nothing more would be gained than the 20 ms of Python that are left on rank 0, for
200 MB of memory with torch, a copy in shared memory, and care that it never outlives its rank.
"""

import hashlib
import io
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.utils import _create_file_view
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stages.artifacts.errors import naming
from stages.artifacts.record import FileEntry
from stages.training.save_plan import PARTS, Planner, Writer, file_name


class ShardFile:
    """The tensors that this rank saves, as the bytes of their files in memory, which is pinned where there is a GPU."""

    def __init__(self, run_directory: Path, tensors: dict[str, Any], group: dist.ProcessGroup) -> None:
        """Divide the tensors among the ranks, and copy those of this rank; a collective.

        Args:
            run_directory: Recorded in `.metadata`; nothing is written there.
            tensors: Nested dictionaries of tensors, without other values.
            group: Of all ranks.

        Raises:
            CheckpointException: on all ranks, with the error of one of them, as when it is out of memory.
        """
        memory = _Memory()
        writer = Writer(run_directory, sync_files=False, per_thread_copy_ahead=0)
        writer.fs = memory
        planner = Planner()
        dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group)
        self._contents = {name: file.getbuffer() for name, file in memory.files.items()}
        self._copied: torch.cuda.Event | None = None
        contents = {
            name: torch.frombuffer(self._contents[name], dtype=torch.uint8)
            for name in (file_name(dist.get_rank(), part) for part in PARTS)
            if self._contents[name]  # else other ranks save all of these tensors
        }
        for content in contents.values() if torch.cuda.is_available() else ():
            with suppress(RuntimeError):  # a limit of locked memory: the copies are then slower
                pin_memory(content.data_ptr(), content.nbytes)
                # Not at exit, when CUDA may have ended before.
                weakref.finalize(self, unpin_memory, content.data_ptr()).atexit = False
        self._places = []
        for result in writer.results:
            place = result.storage_data
            content = contents[place.relative_path]
            # Each tensor is an archive by itself, as torch.save writes it; its values are not compressed.
            archive = _create_file_view(memory.files[place.relative_path], place.offset, place.length)
            reader: Any = torch._C.PyTorchFileReader(cast(IO[bytes], archive))
            path = planner.mappings[result.index.fqn]
            places = []
            for number, part in enumerate(_local_bytes(tensors, path)):
                start = place.offset + reader.get_record_offset(f"data/{number}")
                places.append(content[start : start + part.numel()])
            # The records of a tensor that consists of others are in the order of its attributes, which it might change.
            if len(places) > 1:
                parts = _local_bytes(tensors, path)
                assert all(map(torch.equal, places, (part.cpu() for part in parts))), f"the records of {path}"
            self._places.append((path, places))

    def fill(self, tensors: dict[str, Any]) -> None:
        """Copy the tensors of this rank: the same ones as at first, with other values. Does not wait for a GPU."""
        for path, places in self._places:
            for place, part in zip(places, _local_bytes(tensors, path), strict=True):
                place.copy_(part, non_blocking=True)
        if torch.cuda.is_available():
            # The GPU copies in the order of its work, so before the next update. Only the thread that writes waits for
            # it: with `blocking`, without using a core.
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()

    def write(self, directory: Path) -> dict[str, FileEntry]:
        """Write the files of this rank, on rank 0 with `.metadata`, and sync them; returns what they must be.

        Raises:
            OSError: naming the file.
        """
        if self._copied is not None:
            self._copied.synchronize()
        entries = {}
        for name, content in self._contents.items():
            path = directory / name
            with naming(path), path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            # Of what was to be written: reading it back would cost more, and accept an error on the way to the disk.
            entries[name] = FileEntry(content.nbytes, hashlib.sha256(content).hexdigest())
        return entries


@torch.no_grad()
def _local_bytes(tensors: dict[str, Any], path: tuple[Any, ...]) -> list[Tensor]:
    """This rank's part of a tensor, as the records that torch.save writes of it."""
    tensor: Any = reduce(getitem, path, tensors)
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # A tensor that consists of others, as torchao's of 8 bits, is saved as these.
    parts = [local]
    if is_traceable_wrapper_subclass(local):
        parts = [getattr(local, name) for name in local.__tensor_flatten__()[0]]
    return [part.contiguous().view(-1).view(torch.uint8) for part in parts]


class _Memory(FileSystem):
    """The files that torch writes, in memory."""

    def __init__(self) -> None:
        self.files: dict[str, io.BytesIO] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        yield self.files.setdefault(Path(path).name, _Unclosed())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        pass

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return Path(path).name in self.files


class _Unclosed(io.BytesIO):
    """torch closes a file when it has written it, which would free this one."""

    def close(self) -> None:
        pass
