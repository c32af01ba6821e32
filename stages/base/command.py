"""How a stage runs from the command line, and how it reports errors."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from stages.base import process
from stages.base.errors import StageError, as_stage_error, is_out_of_memory, one_line

USER_ERROR = 2
"""Exit status after a `StageError`."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """An argument parser whose help is the docstring `doc` of the stage's module."""
    # Before Python 3.14 argparse itself shows `extract.py`, which is not the command that works.
    spec = sys.modules["__main__"].__spec__
    prog = f"python -m {spec.name}" if spec else None
    found = argparse.ArgumentParser(
        prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
    )
    found.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)  # it has no need to describe itself
    return found


def positive_integer(text: str) -> int:
    """The type of an argument of such a parser."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def format_gib(size: float) -> str:
    """A number of bytes for people, in GiB: three decimals, so that small ones are not zero."""
    return f"{size / 2**30:.3f} GiB"


def run(main: Callable[[], None], after_interrupt: str = "run it again") -> None:
    """Run `main`; a `StageError`, or an error of the operating system, is one message and exit status 2.

    Ctrl-C and SIGTERM raise a KeyboardInterrupt in it, once: what cleans up after the first one is not interrupted by
    others. They are one message, too, and the exit status that shells give them, 130 and 143.

    A stage that DVC runs ends with it: DVC itself leaves its child alive when it is killed. DVC ignores Ctrl-C and
    waits for the stage.

    Args:
        main: The stage; it may handle the signals in a way of its own.
        after_interrupt: What to do then, for the message.
    """
    if sys.flags.optimize > 1:
        sys.exit(_fail("Python runs with -OO or PYTHONOPTIMIZE=2, and transformers needs docstrings: run it without"))
    if problem := _other_code():
        sys.exit(_fail(problem))
    if "DVC_STAGE" in os.environ:
        process.die_with_parent(signal.SIGTERM)  # not SIGKILL: a training saves a checkpoint first
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao, which warns that it lacks libraries
        logging.getLogger(name).setLevel(logging.ERROR)
    with process.raise_on_interrupt() as received:
        try:
            main()
            sys.stdout.flush()  # here, where its error has words
        except BaseException as error:
            if received:  # whatever the error is: the interrupt caused it
                print(f"interrupted: {after_interrupt}", file=sys.stderr)
                sys.exit(128 + received[0])
            if isinstance(error, OSError) and error.filename is None and _is_lost(sys.stdout):
                sys.exit(_fail(f"standard output: {error.strerror}"))
            if isinstance(error, (StageError, OSError)):  # a full disk, a missing permission: the user's to fix, too
                sys.exit(_fail(str(as_stage_error(error))))
            if is_out_of_memory(error):
                remedy = "lower runtime.num_workers or raise its limit, and run again"
                sys.exit(_fail(f"memory ran out ({one_line(repr(error))}): {remedy}"))
            raise


def _other_code() -> str | None:
    """What is wrong where the code that runs is not that of this directory, whose hashes DVC writes into dvc.lock."""
    ours, theirs = Path("stages"), Path(__file__).parents[1]
    if not ours.is_dir() or ours.samefile(theirs):
        return None
    return (
        f"the code that runs is {theirs}, and DVC watches {ours.absolute()}: unset PYTHONPATH "
        f"({os.environ.get('PYTHONPATH')}) and PYTHONSAFEPATH ({os.environ.get('PYTHONSAFEPATH')})"
    )


def _fail(message: str) -> int:
    with suppress(OSError):  # the status is left to say it
        for line in message.splitlines():
            print(f"error: {line}", file=sys.stderr)
    return USER_ERROR


def _is_lost(stream: TextIO) -> bool:
    """Whether nothing can be written to a stream any more, not even a line end; what it still holds is then dropped."""
    try:
        stream.write("\n")
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return True
    return False
