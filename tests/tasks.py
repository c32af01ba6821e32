"""Functions that tests run in worker processes. In a module of their own, as the tests' imports are slow."""

import os
import signal
import sys
import time
from pathlib import Path

from stages.base.errors import StageError


def place(_: int) -> tuple[str, int, int]:
    """Where a task runs: the working directory, the process, and its parent."""
    return os.getcwd(), os.getpid(), os.getppid()


def fail(kind: str) -> None:
    """End in one of the ways that a task may end in."""
    print("printed by a task")
    if kind == "StageError":
        raise StageError("the value is 1, at most 0 are allowed: lower it")
    if kind == "OSError":
        raise FileNotFoundError(2, "No such file or directory", "gone")
    if kind == "bug":
        raise ZeroDivisionError("of a task")
    os.kill(os.getpid(), signal.SIGKILL)


def wait(directory: Path) -> bool:
    """Create a file, to show that the task has begun, and wait for another file, `go`."""
    (directory / f"{os.getpid()}").touch()
    while not (directory / "go").exists():
        time.sleep(0.02)
    return True


def be_slow(number: int) -> int:
    """Return last if the number is 0, so that the results are there in another order than that of the tasks."""
    time.sleep(0.2 * (number == 0))
    print(f"task {number}", file=sys.stderr)
    return -number


def write_for_long(directory: Path) -> None:
    """Write new files, for longer than a test lasts."""
    for number in range(6000):
        directory.joinpath(f"{os.getpid()}-{number}").touch()  # an error where the directory is gone
        time.sleep(0.01)


def fail_or_write(directory: Path | None) -> None:
    """Fail where nothing is given, otherwise write for long."""
    if directory is None:
        time.sleep(0.5)  # meanwhile others begin to write
        raise StageError("of a task")
    write_for_long(directory)


def send_much(_: int) -> bytes:
    """Return what is longer than a pipe holds."""
    return bytes(50_000_000)
