"""What the launcher and the ranks tell each other: what to train, through the environment, and how a rank has ended.

The launcher reads the parameters once, for all ranks and all restarts. A rank that read params.yaml itself could train
something else than the others, or after a restart another run inside the directory of the first one.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from stages.artifacts import publish
from stages.artifacts.errors import StageError
from stages.artifacts.identity import RunIdentity
from stages.artifacts.record import first_problem
from stages.training.params import TrainParams, TrainRuntime

DIRECTORY = "TRAINING_DIRECTORY"
"""Environment variable with a directory that the ranks share for one start of them: on one machine the file through
which they find each other, and everywhere the errors that one of them has printed and how they have ended."""

STDERR = "TRAINING_STDERR"
"""Environment variable with the descriptor that is the launcher's stderr. That of torchrun is a file: what it prints is
of interest only where no rank has said why it ended. torchrun passes on no descriptors but 0, 1 and 2."""

_LAUNCH = "TRAINING_LAUNCH"
_ENDED, _TRAINING = "ended-", "training"


@dataclass(frozen=True)
class Launch:
    """What the launcher read."""

    params: TrainParams
    runtime: TrainRuntime
    identity: RunIdentity

    def hand_over(self) -> None:
        """Pass it on to the processes that this one starts."""
        # json, not pydantic's dump: that writes null for the infinity of `max_grad_norm: .inf`.
        os.environ[_LAUNCH] = json.dumps(dataclasses.asdict(self))


def received() -> Launch | None:
    """What the launcher read, in a rank that it started; None without a launcher.

    Raises:
        StageError: the code of this rank has other parameters than the launcher's.
    """
    if _LAUNCH not in os.environ:
        return None
    try:
        return TypeAdapter(Launch).validate_python(json.loads(os.environ[_LAUNCH]))
    except ValidationError as error:
        raise StageError(f"the code has changed since the launch ({first_problem(error)}): launch it again") from None


def has_launcher() -> bool:
    """Whether a launcher of ours has started this rank, and holds the lock of the run."""
    return _LAUNCH in os.environ


def is_first_start() -> bool:
    """Whether `resume: never` is to delete the checkpoints of the run here: they are not of an earlier start.

    Slurm counts the starts of a job; torchrun counts those after a failure, not those after a change of its nodes
    (`--nnodes 1:4`). The launcher asks for `auto` at a restart.
    """
    return {os.environ.get(name, "0") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")} == {"0"}


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


def tell_launcher(status: int) -> None:
    """Tell the launcher, if there is one, that this rank exits with a status by its own decision."""
    if directory := os.environ.get(DIRECTORY):
        with suppress(OSError):  # then the launcher takes it for a crash
            Path(directory, f"{_ENDED}{status}").touch()


def told_statuses(directory: Path) -> set[int]:
    """The statuses with which ranks have exited by their own decision."""
    return {int(path.name.removeprefix(_ENDED)) for path in directory.glob(f"{_ENDED}*")}


def tell_training() -> None:
    """Tell the launcher, if there is one, that from here on a signal to stop is followed by a save."""
    if directory := os.environ.get(DIRECTORY):
        Path(directory, _TRAINING).touch()


def was_training(directory: Path) -> bool:
    """Whether a rank has begun to train."""
    return Path(directory, _TRAINING).exists()


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
