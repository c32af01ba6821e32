"""Ask a finished model the questions of tasks: one rank of it. `python -m stages.score` starts the ranks.

Reads    the models, evals/, and the request of `score`
Writes   the measurements, for `score`
Example  python -m stages.scoring.rank
"""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stages.base import command
from stages.ranks import asking, handoff
from stages.scoring import network
from stages.scoring.request import Measurements, Request, remedies

if TYPE_CHECKING:
    from stages.ranks.watchdog import Heartbeat


def main() -> None:
    """Measure as one of the ranks that `score` has started."""
    command.parser(__doc__).parse_args()
    os.environ["TQDM_DISABLE"] = "1"  # the bars of lm-eval; tqdm reads it once, when torch imports tqdm
    asking.answer(Request, _measure, remedies)


def _measure(request: Request, heartbeat: "Heartbeat") -> Measurements:
    prepare(request.packages)
    from stages.scoring.measure import measure  # reads what was prepared

    return measure(request, heartbeat, Path(os.environ[handoff.DIRECTORY], f"datasets-{os.environ['RANK']}"))


def prepare(packages: str) -> None:
    """Make lm-eval importable from the directory `packages`, and keep it to this machine."""
    os.environ |= dict.fromkeys(("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"), "1")
    os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.path.append(packages)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    network.refuse()


if __name__ == "__main__":
    with handoff.rank():
        command.run(main)
