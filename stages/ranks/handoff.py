"""What the ranks tell the process that has started them: errors, and how they have ended."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stages.base import process, publish

DIRECTORY = "TRAINING_DIRECTORY"
"""Environment variable with a directory that the ranks share for one start of them: on one machine the file through
which they find each other, and everywhere the errors that one of them has printed and how they have ended."""

STDERR = "TRAINING_STDERR"
"""Environment variable with the descriptor that is the launcher's stderr. That of torchrun is a file: what it prints is
of interest only where no rank has said why it ended. torchrun passes on no descriptors but 0, 1 and 2."""

LAUNCH = "TRAINING_LAUNCH"
"""Environment variable with what the launcher has decided."""

PARENT = "TRAINING_PARENT"
"""Environment variable with the process id of the torchrun on this node."""

TRAINING = "training"
"""What a rank tells its launcher when it begins to train: from there on, a signal to stop is followed by a save."""

_TOLD = "told-"


@contextmanager
def rank() -> Iterator[None]:
    """Around a whole rank: its stderr is that of the launcher, which is told the status with which the rank exits."""
    if descriptor := os.environ.pop(STDERR, None):
        os.dup2(int(descriptor), 2)
    try:
        yield
    except SystemExit as end:
        if isinstance(end.code, int):
            tell_launcher(end.code)
        raise


def has_launcher() -> bool:
    """Whether a launcher of ours has started this rank, and holds the lock of the run."""
    return LAUNCH in os.environ


def die_with_torchrun(number: signal.Signals) -> None:
    """Have this rank get a signal when its torchrun ends; exit where our launcher's has ended already."""
    parent = os.environ.get(PARENT)
    process.die_with_parent(number, int(parent) if parent else None)


def tell_launcher(what: int | str) -> None:
    """Tell the launcher, if there is one, the status with which this rank decides to exit, or `TRAINING`."""
    if directory := os.environ.get(DIRECTORY):
        with suppress(OSError):  # then it takes the end for a crash, or a signal for one before the training
            Path(directory, f"{_TOLD}{what}").touch()


def told(directory: Path) -> set[str]:
    """What ranks have told: statuses, and `TRAINING`."""
    return {path.name.removeprefix(_TOLD) for path in directory.glob(f"{_TOLD}*")}


def claim_error(message: str) -> bool:
    """Claim to print an error; False where another rank of this machine has claimed the same one.

    An error that all ranks find, each by itself, would otherwise be printed as often as there are ranks.
    """
    if directory := os.environ.get(DIRECTORY):
        shared = Path(directory)
    elif file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun's: of this rank, in a directory of this start
        shared = Path(file).parents[1]
    else:
        return True
    try:
        # Creating a file is atomic and needs no other rank, which may have ended.
        (shared / f"error-{publish.sha256_json(message)[:16]}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # a full disk: rather twice than not at all
        return True
    return True
