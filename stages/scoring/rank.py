"""Ask a finished model the questions of tasks: one rank of it. `python -m stages.score` starts the ranks.

Reads    the models, evals/, and the request of `score`
Writes   the measurements, for `score`
Example  python -m stages.scoring.rank
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from stages.base import command
from stages.ranks import asking, handoff
from stages.scoring import packages
from stages.scoring.request import Measurements, Request, remedies

if TYPE_CHECKING:
    from stages.ranks.watchdog import Heartbeat


def main() -> None:
    """Measure as one of the ranks that `score` has started."""
    command.parser(__doc__).parse_args()
    os.environ["TQDM_DISABLE"] = "1"  # the bars of lm-eval; tqdm reads it once, when torch imports tqdm
    asking.answer(Request, _measure, remedies)


def _measure(request: Request, heartbeat: "Heartbeat") -> Measurements:
    os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    packages.use(Path(request.packages))
    from stages.scoring.measure import measure  # reads all this

    return measure(request, heartbeat, Path(os.environ[handoff.DIRECTORY], f"datasets-{os.environ['RANK']}"))


if __name__ == "__main__":
    with handoff.rank():
        command.run(main)
