"""Where a training prints: the terminal, and the log of each rank of a `debug` run."""

import errno
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from stages.base.names import printable

SILENT_SECONDS = 30.0
"""After so long without a line, a log that is no terminal gets one."""

_PRINTED = threading.Event()
"""Set by each line."""


@contextmanager
def droppable(stream: TextIO) -> Iterator[None]:
    """Drop what is printed in the block if it cannot be: that must not end a training that has yet to save.

    A terminal that is closed sends a signal to stop, too; so does Ctrl-C, which also ends a `tee` that reads the lines.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EIO, errno.EPIPE):  # for ever, unlike a full disk: also for what Python still holds
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


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

    def line(self, text: str) -> None:
        """Print one line, with the time, above the bar."""
        if self._rank == 0:
            with droppable(sys.stdout):
                self._bar.write(f"{_now()} {text}")
                sys.stdout.flush()  # into a pipe, Python would keep kilobytes of lines back
            _PRINTED.set()

    def close(self) -> None:
        """Leave the terminal tidy."""
        self._bar.close()


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print one line at once, also into a pipe; None: to the standard output."""
    stream = stream or sys.stdout
    with droppable(stream):
        print(printable(text), file=stream, flush=True)
    _PRINTED.set()


@contextmanager
def never_silent(activity: Callable[[], str], seconds: float = SILENT_SECONDS) -> Iterator[None]:
    """Print what this rank does, in the block, when nothing was printed for `seconds`, as in a step that takes long."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            _PRINTED.clear()
            if not _PRINTED.wait(seconds):
                print_line(f"{_now()} working: {activity()}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        while thread.is_alive():  # it may clear this once more before it sees the end
            _PRINTED.set()
            thread.join(0.1)


def _now() -> str:
    return f"{datetime.now().astimezone():%m-%d %H:%M:%S}"


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
