"""A progress bar that moves while tasks run, in any process and on any machine.

Each task writes its progress into a file of its own, and the stage adds up the files twice a second. Files, because all
workers share a disk with the stage anyway, while a queue would need another channel for each executor. Where no bar is
shown, because the output is not a terminal, no files are written.
"""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

_SECONDS_TO_WRITE = 0.2
_SECONDS_TO_READ = 0.5


class Meter:
    """How far a task is; a context manager around its work."""

    def __init__(self, file: Path | None, total: int) -> None:
        """Begin at 0.

        Args:
            file: One of a `Bar`; None: nothing is written.
            total: Where the task is when it ends without an error.
        """
        self._file, self._total = file, total
        self._written = time.monotonic()

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if self._file and error is None:
            self._file.write_text(f"{self._total}\n")  # the line end: nothing follows

    def set(self, done: int) -> None:
        """The task is at `done` of its total. It may be called often, as it writes at most five times a second."""
        if self._file and time.monotonic() - self._written > _SECONDS_TO_WRITE:
            self._file.write_text(str(done))
            self._written = time.monotonic()


class Bar:
    """The files of the tasks of one bar."""

    def __init__(self, directory: Path, bar: "tqdm[NoReturn]") -> None:
        self._directory, self._bar = directory, bar
        self._finished: dict[str, int] = {}

    def file(self, name: object) -> Path | None:
        """The file for the `Meter` of a task; each task needs another name."""
        return None if self._bar.disable else self._directory / str(name)

    def refresh(self) -> None:
        """Move the bar to what the files show."""
        done = 0
        with os.scandir(self._directory) as entries:
            for entry in entries:
                text = Path(entry).read_text()
                if text.endswith("\n"):
                    # By name: a task whose Dask worker was lost after its end runs again.
                    self._finished[entry.name] = int(text)
                    os.unlink(entry)  # so that the next time only those that run are read
                elif text and entry.name not in self._finished:  # it is empty for a moment while it is written
                    done += int(text)
        done += sum(self._finished.values())
        self._bar.update(max(0, done - self._bar.n))  # a task that is repeated begins at 0 again; the bar does not


@contextmanager
def show(directory: Path, total: int, **tqdm_arguments: Any) -> Iterator[Bar]:
    """Show a bar while tasks run.

    Args:
        directory: For the files, on a disk that all workers share; it must not exist, and is removed at the end.
        total: Of all tasks.
        tqdm_arguments: What it is and its unit.
    """
    with tqdm(total=total, disable=None, **tqdm_arguments) as bar:
        files = Bar(directory, bar)
        if bar.disable:
            yield files
            return
        directory.mkdir()
        is_over = threading.Event()

        def refresh() -> None:
            while not is_over.wait(_SECONDS_TO_READ):
                files.refresh()

        thread = threading.Thread(target=refresh, daemon=True)
        thread.start()
        try:
            yield files
        finally:
            is_over.set()
            thread.join()
            files.refresh()
            shutil.rmtree(directory, ignore_errors=True)  # a Dask worker that was lost may still write into it
