"""Run a function in a process of its own; measure its time, memory and disk use."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import psutil

MB = 1_000_000


class Timing(NamedTuple):
    """What a measured function returns."""

    seconds: float
    """From when everything is imported to when the result is on the disk."""
    num_bytes: int
    """Of input."""
    note: str = ""


Measurable = Callable[[Path, Path, int], Timing]
"""Called with an empty directory to work in, the directory of the input and the number of processes."""


class Result(NamedTuple):
    """What one run of a function used."""

    timing: Timing
    peak_mb: float
    """Memory of the process and its descendants; pages that they share are counted in each."""
    disk_mb: float
    """Written and not deleted."""

    @property
    def rate(self) -> float:
        """Megabytes of input per second."""
        return self.timing.num_bytes / MB / self.timing.seconds


def measure(function: Measurable, corpus: Path, num_processes: int) -> Result:
    """Run `function` in a new process and a new directory beside `corpus`."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(dir=corpus.parent) as work:
        process = context.Process(target=_send, args=(sender, function, Path(work), corpus, num_processes))
        process.start()
        assert process.pid
        peak = 0
        while not receiver.poll(0.02) and process.is_alive():
            peak = max(peak, resident_bytes(psutil.Process(process.pid)))
        if not receiver.poll():
            raise SystemExit(f"{function.__name__} ended with status {process.exitcode}")
        timing = receiver.recv()
        process.join()
        found = (path.stat() for path in Path(work).rglob("*") if path.is_file())
        disk = sum({status.st_ino: status.st_size for status in found}.values())  # a file with several names once
        return Result(timing, peak / MB, disk / MB)


def _send(sender: "Connection[Timing, None]", function: Measurable, work: Path, corpus: Path, number: int) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    sender.send(function(work, corpus, number))


def resident_bytes(process: psutil.Process) -> int:
    """Resident bytes of a process and its descendants."""
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
