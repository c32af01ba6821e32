"""Train the model: one rank of it. `dvc repro train` runs `python -m stages.launch`, which runs torchrun.

Reads    data/tokens/train, data/tokens/validation, data/model.json and the model's own files
Writes   outputs/<experiment_name>/checkpoints/<run_id>/step-N
Example  torchrun --nproc-per-node 2 -m stages.train
"""

import os
import signal
import sys

from stages.base import command
from stages.base.command import USER_ERROR
from stages.base.errors import StageError
from stages.base.process import paused_collector
from stages.ranks import handoff
from stages.ranks.signals import INTERRUPTED, StopSignal


def main() -> None:
    command.parser(__doc__).parse_args()
    # A rank whose launcher is gone must not write: the next launch may have started. One that another launcher has
    # started holds the lock of the run itself, so there is time to save.
    handoff.die_with_torchrun(signal.SIGKILL if handoff.has_launcher() else signal.SIGTERM)
    # Before numpy and torch are imported: the threads that they start must not get the signals.
    stop_signal = StopSignal()
    try:
        is_finished = _train(stop_signal)
    except (StageError, OSError) as error:
        if not handoff.claim_error(str(error)):
            sys.exit(USER_ERROR)
        raise
    if not is_finished:
        sys.exit(INTERRUPTED)


def _train(stop_signal: StopSignal) -> bool:
    from stages.launching.runtime import read_launch
    from stages.training.environment import set_environment

    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    if handoff.DIRECTORY not in os.environ:  # else the ranks of one machine find each other through a file there
        names += ["MASTER_ADDR", "MASTER_PORT"]
    if missing := [name for name in names if name not in os.environ]:
        raise StageError(
            f"{', '.join(missing)} must be set, as torchrun does: `python -m stages.launch` starts the ranks, also "
            "on several nodes of Slurm"
        )
    launched = read_launch()
    # Before torch is imported, which sets some of these itself.
    set_environment(launched[0].params, int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]))

    with paused_collector():  # an eighth of the time that these imports take
        from stages.launching.rank import train
        from stages.ranks.torch_errors import LostConnection

    try:
        return train(*launched, stop_signal)
    except LostConnection as error:
        sys.exit(f"error: {error}")  # status 1: unlike a StageError, it may not occur again


if __name__ == "__main__":
    with handoff.rank():
        command.run(main)
