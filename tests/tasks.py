"""What tests have worker processes do. Apart from the tests, whose imports take long."""

import os
import signal
import sys
import time
from pathlib import Path

from stages.artifacts.command import StageError


def place(_: int) -> tuple[str, int, int]:
    """Where a task runs: the working directory, the process, and its parent."""
    return os.getcwd(), os.getpid(), os.getppid()


def fail(kind: str) -> None:
    """End in one of the ways that a task may end in."""
    print("a task speaks")
    if kind == "StageError":
        raise StageError("the value is 1, at most 0 are allowed: lower it")
    if kind == "OSError":
        raise FileNotFoundError(2, "No such file or directory", "gone")
    if kind == "bug":
        raise ZeroDivisionError("of a task")
    os.kill(os.getpid(), signal.SIGKILL)


def wait(directory: Path) -> bool:
    """Say that the task has begun, by a file, and wait for another file, `go`."""
    (directory / f"{os.getpid()}").touch()
    while not (directory / "go").exists():
        time.sleep(0.02)
    return True


def be_slow(number: int) -> int:
    """Take longer the smaller the number is, so that results come in another order than tasks."""
    time.sleep(0.2 * (number == 0))
    print(f"task {number}", file=sys.stderr)
    return -number
