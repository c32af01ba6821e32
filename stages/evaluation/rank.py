"""Measure a finished model and have it write samples: one rank of it. `python -m stages.evaluate` starts the ranks.

Reads    outputs/<experiment_name>/model/, data/tokens/validation, and the request of `evaluate`
Writes   the measurements, for `evaluate`
Example  python -m stages.evaluation.rank
"""

from typing import TYPE_CHECKING

from stages.base import command
from stages.evaluation.request import Measurements, Request, remedies
from stages.ranks import asking, handoff

if TYPE_CHECKING:
    from stages.ranks.watchdog import Heartbeat


def main() -> None:
    """Measure as one of the ranks that `evaluate` has started."""
    command.parser(__doc__).parse_args()
    asking.answer(Request, _measure, remedies)


def _measure(request: Request, heartbeat: "Heartbeat") -> Measurements:
    from stages.evaluation.measure import measure

    return measure(request, heartbeat)


if __name__ == "__main__":
    with handoff.rank():
        command.run(main)
