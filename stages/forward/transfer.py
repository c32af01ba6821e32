"""Batches to the device and numbers back, without a wait for what the device is computing."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


def own_thread(name: str) -> ThreadPoolExecutor:
    """A thread that uses the GPU of this rank: a new one uses the first, whichever that is. It starts with a task."""
    setup = (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_available() else (None, ())
    return ThreadPoolExecutor(1, name, *setup)


def pinned(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch in memory that a GPU copies while the CPU does something else; where there is no GPU, as it is."""
    if not torch.cuda.is_available():
        return batch
    return {name: value.pin_memory() if isinstance(value, Tensor) else value for name, value in batch.items()}


def to_device(batch: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    """The batch on `device`. The copy is queued; without pinned memory, the CPU would wait until it is made."""
    if torch.device(device).type != "cuda":
        return batch
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in pinned(batch).items()
    }


class Readback:
    """Numbers on their way to the CPU. `.tolist()` of a tensor on a GPU would wait for all that was queued since."""

    def __init__(self, numbers: Tensor) -> None:
        self._copied = torch.cuda.Event() if numbers.is_cuda else None
        self._numbers = numbers.detach().to("cpu", non_blocking=True)  # torch pins a copy that is not to be waited for
        if self._copied:
            self._copied.record()

    def read(self) -> list[float]:
        """The numbers, as soon as the device has computed them."""
        if self._copied:
            self._copied.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers


def read_late(readbacks: Iterable[Readback]) -> Iterator[list[float]]:
    """The numbers of each, read when the next one is queued: the device always has something to compute."""
    previous = None
    for readback in readbacks:
        if previous:
            yield previous.read()
        previous = readback
    if previous:
        yield previous.read()
