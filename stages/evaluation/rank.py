"""Measure a finished model and have it write samples: one rank of it. `python -m stages.evaluate` starts the ranks.

Reads    outputs/<experiment_name>/model/, data/tokens/validation, and the request of `evaluate`
Writes   the measurements, for `evaluate`
Example  python -m stages.evaluation.rank
"""

import os
import signal
import sys
from pathlib import Path

from stages.base import command
from stages.base.command import USER_ERROR
from stages.base.errors import StageError
from stages.evaluation.request import MEASUREMENTS, REQUEST, Request, remedies
from stages.ranks import handoff

_LOST = 3
"""Exit status of a rank that lost the connection to another one, which prints its own reason."""


def main() -> None:
    """Measure as one of the ranks that `evaluate` has started."""
    command.parser(__doc__).parse_args()
    if handoff.DIRECTORY not in os.environ:
        raise StageError("`python -m stages.evaluate` starts the ranks: run that")
    handoff.die_with_torchrun(signal.SIGKILL)
    # There is nothing to save: where another rank fails, this one is ended, and says nothing.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    directory = Path(os.environ[handoff.DIRECTORY])
    request = Request.read(directory / REQUEST)

    # Below, as they take seconds: a rank must die with its torchrun from the first moment on.
    from stages.evaluation.measure import measure
    from stages.forward.distributed import is_rank0
    from stages.ranks.process_group import process_group
    from stages.ranks.torch_errors import LostConnection, explain_torch_errors
    from stages.ranks.watchdog import Heartbeat, watched

    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    heartbeat = Heartbeat()
    try:
        with (
            explain_torch_errors(f"rank {rank}", f"use {remedies(request, num_ranks)}"),
            process_group(request.timeout_minutes, os.environ[handoff.DIRECTORY]),
            watched(heartbeat, request.timeout_minutes),
        ):
            measurements = measure(request, heartbeat)
            if is_rank0():
                measurements.write(directory / MEASUREMENTS)
    except LostConnection:
        sys.exit(_LOST)
    except (StageError, OSError):
        if not handoff.claim_error(""):  # whatever it is: the first rank that fails speaks for all
            sys.exit(USER_ERROR)
        raise


if __name__ == "__main__":
    with handoff.rank():
        command.run(main)
