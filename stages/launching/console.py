"""Where a training prints: the terminal, and the log of each rank of a `debug` run."""

import faulthandler
import logging
import signal
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from stages.base.names import printable

T = TypeVar("T")


class Console:
    """Lines with the time, and a progress bar where there is a terminal. Silent on all ranks but one."""

    def __init__(self, rank: int, step: int, total_steps: int) -> None:
        self._rank = rank
        # disable=None: tqdm then shows the bar only where stderr is a terminal, not in a log file.
        self._bar = tqdm(
            total=total_steps, initial=step, desc="train", unit="step", disable=True if rank else None, file=sys.stderr
        )

    def advance(self) -> None:
        """Advance the bar by one step."""
        self._bar.update()

    def progress(self, batches: Iterable[T], total: int, name: str) -> Iterable[T]:
        """Show a second bar while `batches` are used, below that of the steps."""
        bar: Iterable[T] = tqdm(
            batches, total=total, desc=name, unit="batch", leave=False, disable=self._bar.disable, file=sys.stderr
        )
        return bar

    def line(self, text: str) -> None:
        """Print one line, with the time, above the bar."""
        if self._rank == 0:
            self._bar.write(f"{datetime.now().astimezone():%m-%d %H:%M:%S} {text}")
            sys.stdout.flush()  # into a pipe, Python would keep kilobytes of lines back

    def close(self) -> None:
        """Leave the terminal tidy."""
        self._bar.close()


def print_line(text: str) -> None:
    """Print one line at once, also into a pipe."""
    print(printable(text), flush=True)


def log_to(path: Path) -> None:
    """Append the debug messages of the training to a file, and the stacks of all threads at a crash or SIGUSR2."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8")
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(message)s", "%Y-%m-%d %H:%M:%S"))
    logger = logging.getLogger("stages")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    # The handler above keeps the file open: faulthandler writes to its descriptor, also in a crash of C code.
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR2, file)
