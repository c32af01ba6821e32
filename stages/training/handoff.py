"""What the launcher passes on to the ranks, through their environment.

The launcher reads the parameters once, for all ranks and all restarts. A rank that read params.yaml itself could train
something else than the others, or after a restart another run inside the directory of the first one.
"""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from stages.artifacts import publish
from stages.artifacts.errors import StageError
from stages.artifacts.identity import RunIdentity
from stages.training.params import TrainParams, TrainRuntime

LAUNCHER = "TRAINING_LAUNCHER_PID"
"""Environment variable with the process id of the parent of the ranks: the launcher, or the agent of their node."""

DIRECTORY = "TRAINING_DIRECTORY"
"""Environment variable with a temporary directory that the ranks of one machine share, for one start of them: the file
through which they find each other, their heartbeats, and the errors that one of them has printed."""

_LAUNCH = "TRAINING_LAUNCH"


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
        field = ".".join(map(str, error.errors()[0]["loc"]))
        raise StageError(
            f"the code has changed since the launch ({field} is not what it was): launch it again"
        ) from None


def is_first_start() -> bool:
    """Whether `resume: never` is to delete the checkpoints of the run here: they are not of an earlier start.

    The launcher does it for the ranks that it starts. Slurm counts the starts of a job; torchrun counts those after a
    failure, not those after a change of its nodes (`--nnodes 1:4`).
    """
    counts = [os.environ.get(name, "0") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
    return LAUNCHER not in os.environ and set(counts) == {"0"}


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
