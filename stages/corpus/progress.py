"""A progress bar that moves while tasks run, in any process and on any machine.

Each task writes its progress into a file of its own, and the stage adds up the files twice a second. Files, because all
workers share a disk with the stage anyway, while a queue would need another channel for each executor. Where no bar is
shown, because the output is not a terminal, no files are written.
"""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

_SECONDS_TO_WRITE = 0.2
_SECONDS_TO_READ = 0.5


class Meter:
    """How far a task is."""

    def __init__(self, file: Path | None) -> None:
        """`file`: of this task, in the directory of `show`; None: nothing is written."""
        self._file, self._written = file, time.monotonic()

    def set(self, done: int, is_end: bool = False) -> None:
        """The task is at `done` of its total. It may be called often, as it writes at most five times a second."""
        if self._file and (is_end or time.monotonic() - self._written > _SECONDS_TO_WRITE):
            self._file.write_text(str(done))
            self._written = time.monotonic()


@contextmanager
def show(directory: Path, total: int, **tqdm_arguments: Any) -> Iterator[Path | None]:
    """Show a bar while tasks run; yields the directory for their files, None if no bar is shown.

    Args:
        directory: On a disk that all workers share; it must not exist, and is removed at the end.
        total: Of all tasks.
        tqdm_arguments: What it is and its unit.
    """
    with tqdm(total=total, disable=None, **tqdm_arguments) as bar:
        if bar.disable:
            yield None
            return
        directory.mkdir()
        is_over = threading.Event()

        def refresh() -> None:
            is_last = False
            while not is_last:
                is_last = is_over.wait(_SECONDS_TO_READ)
                # A file is empty for a moment while it is written, and a task that is repeated begins at 0 again.
                bar.update(max(0, sum(int(file.read_text() or 0) for file in directory.iterdir()) - bar.n))

        thread = threading.Thread(target=refresh, daemon=True)
        thread.start()
        try:
            yield directory
        finally:
            is_over.set()
            thread.join()
            shutil.rmtree(directory, ignore_errors=True)  # a Dask worker that was lost may still write into it
