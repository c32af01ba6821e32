"""What the steps of a training cost: time by the clock, divided into phases, and memory."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

PHASES = ("data", "forward", "backward", "update", "validation", "saving")
"""What is timed; the rest of the time is the phase `other`."""


class Timers:
    """Seconds by phase. On a GPU the times are those of its work, not of queueing it."""

    def __init__(self, on_phase: Callable[[str], None]) -> None:
        self._on_phase = on_phase
        self._start = time.perf_counter()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to phase `name`; `on_phase` is called as it starts. Phases do not overlap."""
        self._on_phase(name)
        if torch.cuda.is_available():
            # Events are read when the times are reported: reading a clock here would have to wait for the GPU.
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            start_time = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - start_time

    def read(self) -> dict[str, float]:
        """The seconds of each phase since it was read before. With `other`, the sum is the time that has passed.

        What a GPU has not finished counts at the next read: it is not waited for.
        """
        while self._events and self._events[0][2].query():
            name, start, end = self._events.popleft()
            self._seconds[name] += start.elapsed_time(end) / 1000
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        begun, self._start = self._start, time.perf_counter()
        return {**seconds, "other": self._start - begun - sum(seconds.values())}


def memory_gib() -> tuple[float, float]:
    """Memory of this rank now and at its peak, in GiB: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
    with open("/proc/self/status") as file:  # getrusage would include the peak of the parent process
        kib = {name: value.split()[0] for name, _, value in (line.partition(":") for line in file) if value.strip()}
    return int(kib["VmRSS"]) / 2**20, int(kib["VmHWM"]) / 2**20


def reset_peak_memory() -> None:
    """From here on, the peak is that since this call."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    # 5 resets VmHWM (see proc_pid_clear_refs(5)). Where /proc is read-only, the peak remains that since the start.
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
