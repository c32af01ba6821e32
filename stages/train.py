"""Train the model: one rank of it. `dvc repro train` runs `python -m stages.launch`, which runs torchrun.

Reads    data/tokens/train, data/tokens/validation, data/model.json and the model's own files
Writes   outputs/<experiment_name>/checkpoints/<run_id>/step-N
Example  torchrun --nproc-per-node 2 -m stages.train
"""

import signal
import sys

from stages.base import command
from stages.base.command import USER_ERROR
from stages.base.errors import StageError
from stages.ranks import handoff
from stages.ranks.signals import INTERRUPTED, StopSignal


def main() -> None:
    command.parser(__doc__).parse_args()
    # A rank whose launcher is gone must not write: the next launch may have started. One that another launcher has
    # started holds the lock of the run itself, so there is time to save.
    handoff.die_with_torchrun(signal.SIGKILL if handoff.has_launcher() else signal.SIGTERM)
    # Before numpy and torch are imported: the threads that they start must not get the signals.
    stop_signal = StopSignal()
    from stages.launching.rank import train
    from stages.ranks.torch_errors import LostConnection

    try:
        is_finished = train(stop_signal)
    except LostConnection as error:
        sys.exit(f"error: {error}")  # status 1: unlike a StageError, it may not occur again
    except (StageError, OSError) as error:
        if not handoff.claim_error(str(error)):
            sys.exit(USER_ERROR)
        raise
    if not is_finished:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    with handoff.rank():
        command.run(main)
