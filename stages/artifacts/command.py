"""How a stage runs from the command line, and how it says what went wrong."""

import argparse
import os
import signal
import sys
from collections.abc import Callable

from stages.artifacts import process

USER_ERROR = 2
"""Exit status after a `StageError`."""


class StageError(Exception):
    """A mistake that the user can mend. Its message says what was given, what is allowed and what to do."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """An argument parser whose help is the docstring `doc` of the stage's module."""
    spec = sys.modules["__main__"].__spec__
    prog = f"python -m {spec.name}" if spec else None
    return argparse.ArgumentParser(prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def run(main: Callable[[], None]) -> None:
    """Run `main`; a `StageError`, or an error of the operating system, is one message and exit status 2.

    A stage that DVC runs ends with it: DVC itself leaves its child alive when it is killed.
    """
    if "DVC_STAGE" in os.environ:
        process.die_with_parent(signal.SIGTERM)
    try:
        main()
    except StageError as error:
        sys.exit(_fail(str(error)))
    except OSError as error:
        sys.exit(_fail(f"{error.filename or 'input/output'}: {error.strerror or error}"))
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str) -> int:
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return USER_ERROR
