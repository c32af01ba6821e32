"""The list of tensors in a checkpoint, `.metadata`, which torch.distributed.checkpoint writes as a pickle.

torch reads it with `pickle.load`, which calls whatever a file names: a checkpoint from somewhere else could run any
command. This reader knows only what torch 2.11 to 2.15 write for tensors. Other objects are not among them, because
torch unpickles those, too.
"""

import pickle
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from stages.base.errors import explained
from stages.base.files import damaged
from stages.base.names import is_file_name
from stages.base.process import paused_collector
from stages.checkpointing.layout import METADATA, REMEDY

_OF_METADATA = (
    *("Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "ChunkStorageMetadata"),
    *("MetadataIndex", "StorageMeta"),
)
_KNOWN = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _OF_METADATA),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


class Reader(dcp.FileSystemReader):
    """torch's reader of a directory, for `dcp.load`, with the list of tensors from `read`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._listed = read(directory)  # here, where errors are ours: torch would print theirs

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The list, as torch asks for it."""
        return self._listed


def read(directory: Path) -> Metadata:
    """The list of the tensors in a directory, `model` or `optimizer` of a checkpoint.

    Raises:
        DamagedFile: it is none, has something else in it, or names a file elsewhere.
    """
    path = directory / METADATA
    with understood(path), path.open("rb") as file, paused_collector():
        metadata = _Unpickler(file).load()
        _check(metadata)
    return metadata  # type: ignore[no-any-return]


def stored_tensors(directory: Path) -> list[Any]:
    """Which bytes of which file are which part of which tensor, as JSON; without the random id that torch adds.

    Raises:
        DamagedFile: as `read` does.
    """
    metadata: Any = read(directory)
    with understood(directory / METADATA):
        tensors = [
            [name, str(entry.properties.dtype), str(entry.size), str(entry.chunks)]
            for name, entry in metadata.state_dict_metadata.items()
        ]
        chunks = [[index.fqn, str(index.offset), str(stored)] for index, stored in metadata.storage_data.items()]
        return [sorted(tensors), sorted(chunks)]


def understood(path: Path) -> AbstractContextManager[None]:
    """Have an error of any class, as pickles make Python and torch raise them, be a `DamagedFile` that names `path`."""
    return explained(
        lambda problem: damaged(path, f"torch {torch.__version__} does not write it so ({problem})", REMEDY)
    )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The object that a pickle names."""
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module in ("pathlib", "pathlib._local") and name == "PosixPath":  # where it was written, which nobody reads
            return _join
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _join(*parts: str) -> str:
    return "/".join(parts)


def _check(metadata: Any) -> None:
    """Raises an error of any class where that is not what `dcp.save` makes of tensors."""
    for entry in metadata.state_dict_metadata.values():
        is_tensor = isinstance(entry, TensorStorageMetadata) and isinstance(entry.properties.dtype, torch.dtype)
        if not is_tensor or not all(isinstance(chunk, ChunkStorageMetadata) for chunk in entry.chunks):
            raise TypeError(f"{type(entry).__name__} is no tensor")  # not itself, which may have any length as text
    names = set()
    for stored in metadata.storage_data.values():
        if not isinstance(stored.relative_path, str):
            raise TypeError(f"{type(stored.relative_path).__name__} is no name")
        names.add(stored.relative_path)
        if stored.offset < 0 or stored.length < 0:
            raise ValueError(f"{stored.offset} and {stored.length} are no part of a file")
    for name in names:
        if not is_file_name(name):
            raise ValueError(f"{name!r} is no file of the checkpoint")
