"""Ask a finished model the questions of tasks: one rank of it. `python -m stages.score` starts the ranks.

Reads    the models, tasks/, and the request of `score`
Writes   the measurements, for `score`
Example  python -m stages.scoring.rank
"""

import logging
import os
import signal
import sys
from pathlib import Path

from stages.base import command
from stages.base.command import USER_ERROR
from stages.base.errors import StageError
from stages.ranks import handoff
from stages.scoring import network
from stages.scoring.request import MEASUREMENTS, REMEDY, REQUEST, Request

_LOST = 3
"""Exit status of a rank that lost the connection to another one, which prints its own reason."""


def main() -> None:
    """Measure as one of the ranks that `score` has started."""
    command.parser(__doc__).parse_args()
    if handoff.DIRECTORY not in os.environ:
        raise StageError("`python -m stages.score` starts the ranks: run that")
    handoff.die_with_torchrun(signal.SIGKILL)
    # There is nothing to save: where another rank fails, this one is ended, and says nothing.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    directory = Path(os.environ[handoff.DIRECTORY])
    request = Request.read(directory / REQUEST)
    prepare(request.packages)

    # Below, as they take seconds, and read what was prepared.
    from stages.forward.distributed import is_rank0
    from stages.ranks.process_group import process_group
    from stages.ranks.torch_errors import LostConnection, explain_torch_errors
    from stages.ranks.watchdog import Heartbeat, watched
    from stages.scoring.measure import measure

    heartbeat = Heartbeat()
    try:
        with (
            explain_torch_errors(f"rank {os.environ['RANK']}", REMEDY),
            process_group(request.timeout_minutes, os.environ[handoff.DIRECTORY]),
            watched(heartbeat, request.timeout_minutes),
        ):
            measurements = measure(request, heartbeat, directory / f"datasets-{os.environ['RANK']}")
            if is_rank0():
                measurements.write(directory / MEASUREMENTS)
    except LostConnection:
        sys.exit(_LOST)
    except (StageError, OSError):
        if not handoff.claim_error(""):  # whatever it is: the first rank that fails speaks for all
            sys.exit(USER_ERROR)
        raise


def prepare(packages: str) -> None:
    """Make lm-eval importable from the directory `packages`, and keep it to this machine."""
    os.environ |= dict.fromkeys(("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "TQDM_DISABLE"), "1")  # bars of lm-eval
    os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.path.append(packages)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    network.refuse()


if __name__ == "__main__":
    with handoff.rank():
        command.run(main)
