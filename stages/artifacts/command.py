"""How a stage runs from the command line, and how it reports errors."""

import argparse
import os
import signal
import sys
from collections.abc import Callable

from stages.artifacts import process
from stages.artifacts.errors import StageError

USER_ERROR = 2
"""Exit status after a `StageError`."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """An argument parser whose help is the docstring `doc` of the stage's module."""
    # Before Python 3.14 argparse itself shows `extract.py`, which is not the command that works.
    spec = sys.modules["__main__"].__spec__
    prog = f"python -m {spec.name}" if spec else None
    return argparse.ArgumentParser(prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def format_gib(size: float) -> str:
    """A number of bytes for people, in GiB: three decimals, so that small ones are not zero."""
    return f"{size / 2**30:.3f} GiB"


def run(main: Callable[[], None]) -> None:
    """Run `main`; a `StageError`, or an error of the operating system, is one message and exit status 2.

    A stage that DVC runs ends with it: DVC itself leaves its child alive when it is killed.
    """
    if "DVC_STAGE" in os.environ:
        process.die_with_parent(signal.SIGTERM)  # not SIGKILL: a training saves a checkpoint first
    try:
        main()
    except StageError as error:
        sys.exit(_fail(str(error)))
    except OSError as error:  # a full disk, a missing permission: the user's to fix, like a StageError
        sys.exit(_fail(f"{error.filename or 'input/output'}: {error.strerror or error}"))
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, as shells report it, and no traceback: DVC ignores Ctrl-C and waits for this end


def _fail(message: str) -> int:
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return USER_ERROR
