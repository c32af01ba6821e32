"""Ranks from their start to their end, and why they have failed, in words."""

import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stages.artifacts.command import USER_ERROR
from stages.training.local_ranks import Failure, LocalRanks
from stages.training.signals import INTERRUPTED
from stages.training.watchdog import Watchdog, rank_name

if TYPE_CHECKING:
    from stages.training.slurm import SrunRanks

CRASHED = 1
"""Exit status where a rank crashed or hung."""


def run_ranks(
    ranks: "LocalRanks | SrunRanks", timeout_minutes: float, dump_stacks: bool, remedies: str
) -> tuple[int, str]:
    """Run the ranks until all have ended.

    Args:
        ranks: Not started yet.
        timeout_minutes: That of their process group.
        dump_stacks: As for the watchdog.
        remedies: What to use where the machine ran out of memory.

    Returns:
        An exit status, and the reason where none of the ranks has printed it.
    """
    # A little earlier than the process group's own timeout, after which the other ranks would exit: they cannot name
    # what the rank at fault was doing.
    with Watchdog(ranks, 60 * timeout_minutes * 0.9, dump_stacks) as watchdog:
        failures = ranks.run()
    statuses = {failure.exitcode for failure in failures.values()}
    if not failures:
        return 0, ""
    for status in (INTERRUPTED, USER_ERROR):  # the others lost the connection, or were ended
        if status in statuses:
            return status, ""
    if watchdog.hang is not None:
        return CRASHED, watchdog.hang
    rank = first_to_fail(failures)
    code = failures[rank].exitcode
    how = f"was killed by signal {-code}" if code < 0 else "failed as shown above"
    activity = next((note.activity for note in ranks.notes() if note.rank == rank), "start")
    reason = f"{rank_name(rank, ranks.node(rank))} {how}: {activity}"
    if code == -signal.SIGBUS:
        reason += " (a file in use, as of data/tokens, was truncated, or its disk did not answer)"
    if code == -signal.SIGKILL:
        reason += f" (if the machine ran out of memory, use {remedies})"
    return CRASHED, reason


def first_to_fail(failures: Mapping[int, Failure]) -> int:
    """The rank that failed by itself, as far as exit statuses show it."""
    first = min(failure.timestamp for failure in failures.values())
    # Within a second those that it leaves behind lose the connection, or torch ends them with SIGTERM; those that do
    # not react, as in a collective of NCCL, torch kills after 30 seconds. A rank that was killed at once comes first.
    return min(
        (failure.timestamp > first + 20, failure.exitcode == -signal.SIGTERM, failure.exitcode, rank)
        for rank, failure in failures.items()
    )[-1]
