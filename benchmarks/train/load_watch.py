"""Count what a rank reads, and the memory that it needs, while it loads its weights."""

import json
import os
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

MIB = 2**20


class LoadWatch:
    """Counts from its construction to `report`; `open` replaces `safe_open` meanwhile.

    Reads from a file that is mapped into memory do not show in /proc/self/io. So the bytes of the tensors that are read
    from safetensors files are counted here, and all other reads, hashing above all, are taken from there.
    """

    def __init__(self) -> None:
        self.mapped = 0
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak of the resident memory
        self._start = {**_counters(), **_status()}

    def open(self, *args: Any, **kwargs: Any) -> "CountedFile":
        """What `safe_open` returns, with its tensors counted."""
        return CountedFile(self, safetensors.safe_open(*args, **kwargs))

    def report(self) -> None:
        """Print the counts of this rank, once."""
        now = {**_counters(), **_status()}
        values = {
            "rank": int(os.environ["RANK"]),
            "mapped_mib": self.mapped / MIB,
            "read_mib": (now["rchar"] - self._start["rchar"]) / MIB,
            "grown_mib": (now["VmHWM"] - self._start["VmRSS"]) / 1024,
        }
        # One write for the line: the ranks share the pipe, and parts of lines would mix.
        os.write(1, f"load {json.dumps(values)}\n".encode())


class CountedFile:
    """A safetensors file whose tensors are counted as they are read."""

    def __init__(self, watch: LoadWatch, file: Any) -> None:
        self._watch, self._file = watch, file

    def __enter__(self) -> "CountedFile":
        self._file.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_slice(self, key: str) -> "CountedSlice":
        return CountedSlice(self._watch, self._file.get_slice(key))

    def get_tensor(self, key: str) -> Tensor:
        return self.get_slice(key)[...]


class CountedSlice:
    """A tensor of such a file, read when it is indexed."""

    def __init__(self, watch: LoadWatch, lazy: Any) -> None:
        self._watch, self._lazy = watch, lazy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lazy, name)

    def __getitem__(self, index: Any) -> Tensor:
        part: Tensor = self._lazy[index]
        self._watch.mapped += part.nbytes
        return part


def _counters() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def _status() -> dict[str, int]:
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Vm")]
    return {name.removesuffix(":"): int(value) for name, value, _ in lines}
