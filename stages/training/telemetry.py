"""What a person sees of a training: timers, lines, the history."""

import faulthandler
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import torch
from tqdm import tqdm

COLUMNS = ("step", "epoch", "tokens", "loss", "lr", "grad_norm", "validation_loss")
"""Of history.tsv. It holds no clock times: the file is as reproducible as the weights."""

PHASES = ("data", "forward", "backward", "update")


class Timers:
    """Seconds spent in each phase of a step. On a GPU the times are those of its work, not of its queueing."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to phase `name`, which is noted as it begins."""
        self._note(name)
        if torch.cuda.is_available():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            began = time.perf_counter()
            yield
            self.seconds[name] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by phase."""
        for name, start, end in self._events:
            end.synchronize()
            self.seconds[name] += start.elapsed_time(end) / 1000
        self._events.clear()
        taken, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return taken


class History:
    """The rows of history.tsv."""

    def __init__(self, text: str = "") -> None:
        self._lines = text.splitlines() or ["\t".join(COLUMNS)]

    def add(self, **values: float | None) -> None:
        """Add a row; columns that are not given, or None, stay empty."""
        self._lines.append("\t".join(_cell(values.get(name)) for name in COLUMNS))

    def text(self) -> str:
        """The whole file."""
        return "\n".join(self._lines) + "\n"


def _cell(value: float | None) -> str:
    return "" if value is None else repr(value)


class Console:
    """A line every `log_freq` steps, and a progress bar where there is a terminal. Silent on all ranks but one."""

    def __init__(self, rank: int, step: int, total_steps: int) -> None:
        self._rank = rank
        self._bar = tqdm(
            total=total_steps, initial=step, desc="train", unit="step", disable=True if rank else None, file=sys.stderr
        )

    def step(self) -> None:
        """Move the bar on."""
        self._bar.update()

    def line(self, text: str) -> None:
        """Print one line, with time and rank, above the bar."""
        if self._rank == 0:
            clock = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S")
            self._bar.write(f"{clock} [rank {self._rank}] {text}")
            sys.stdout.flush()

    def close(self) -> None:
        """Leave the terminal tidy."""
        self._bar.close()


def memory_gib() -> tuple[float, float]:
    """Memory of this rank now and at its highest, in GiB: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
    with open("/proc/self/status") as file:  # getrusage would count the parent's peak, too
        kib = {name: value.split()[0] for name, _, value in (line.partition(":") for line in file) if value.strip()}
    return int(kib["VmRSS"]) / 2**20, int(kib["VmHWM"]) / 2**20


def reset_peak_memory() -> None:
    """From here on, the highest memory is that since this call."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    # 5 resets VmHWM (see proc_pid_clear_refs(5)). Where /proc cannot be written to, the peak is that since the start.
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def log_to(path: Path) -> None:
    """Append the debug messages of the training to a file, and the stacks of a crash or at SIGUSR2."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8")
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(message)s", "%Y-%m-%d %H:%M:%S"))
    logger = logging.getLogger("stages")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR2, file)
