"""What safetensors files hold: names, shapes, dtypes and byte ranges, read without a weight.

A file is the length of its header (8 bytes, little endian), the header (JSON), and the bytes of the tensors.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from stages.artifacts.command import StageError

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_MAX_HEADER = 100_000_000  # the format's own limit
_ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}

_AGAIN = "the file is incomplete or damaged: fetch it again"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a safetensors file."""

    file: str
    """Name of the file in the model's directory."""
    key: str
    """Name of the tensor in the file."""
    dtype: str
    """Safetensors' code, such as `BF16`."""
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the file."""
    end: int
    """Offset behind its last byte in the file."""


def weight_files(directory: Path) -> list[str]:
    """The safetensors files that make up the model in `directory`: those its index names, or the only one."""
    index = directory / INDEX
    if index.is_file():
        try:
            return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StageError(f"{index} is no index of safetensors files: fetch it again") from None
    return [SINGLE_FILE] if (directory / SINGLE_FILE).is_file() else []


def read(directory: Path, files: list[str]) -> dict[str, StoredTensor]:
    """The tensors of several files, by name.

    Raises:
        StageError: naming the file that is missing, truncated or damaged, or the tensor that two files hold.
    """
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        for tensor in _read_file(directory, name):
            if tensor.key in tensors:
                raise StageError(f"{directory}: both {tensors[tensor.key].file} and {name} hold {tensor.key!r}")
            tensors[tensor.key] = tensor
    return tensors


def _read_file(directory: Path, name: str) -> list[StoredTensor]:
    path = directory / name
    if not path.is_file():
        raise StageError(f"{path} is missing, though {INDEX} names it: fetch it again")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise StageError(f"{path} has {size} bytes, less than its header needs: {_AGAIN}")
        header = file.read(length)
    start = 8 + length
    tensors = []
    try:
        for key, entry in json.loads(header).items():
            if key == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            tensors.append(StoredTensor(name, key, entry["dtype"], tuple(entry["shape"]), start + begin, start + end))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StageError(f"{path} has no valid safetensors header: {_AGAIN}") from None
    _check_offsets(path, size, start, tensors)
    return tensors


def _check_offsets(path: Path, size: int, start: int, tensors: list[StoredTensor]) -> None:
    """The format allows no gap and no overlap, so the offsets also tell the size of the file."""
    expected = start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != expected:
            raise StageError(f"{path}: {tensor.key!r} begins at byte {tensor.begin} instead of {expected}: {_AGAIN}")
        item_size = _ITEM_SIZES.get(tensor.dtype)
        if item_size is not None and tensor.end - tensor.begin != item_size * math.prod(tensor.shape):
            raise StageError(f"{path}: {tensor.key!r} has a size that does not fit its shape: {_AGAIN}")
        expected = tensor.end
    if size != expected:
        raise StageError(f"{path} has {size} bytes instead of {expected}: {_AGAIN}")
