"""A stage asks ranks that it starts on this machine: each reads the request, and rank 0 writes the answer.

The ranks run a module whose `main` calls `answer`.
"""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from stages.base.command import USER_ERROR
from stages.base.errors import StageError
from stages.base.files import JsonFile
from stages.ranks import handoff, torchrun

if TYPE_CHECKING:
    from stages.ranks.watchdog import Heartbeat

REQUEST, ANSWER = "request.json", "answer.json"
"""Their names in the directory that the ranks share."""


@dataclass(frozen=True)
class Request(JsonFile):
    """What a stage asks."""

    timeout_minutes: float
    """After this time without an answer another rank counts as lost."""


AnyRequest = TypeVar("AnyRequest", bound=Request)
Answer = TypeVar("Answer", bound=JsonFile)


def ask(
    module: str, request: AnyRequest, answer_type: type[Answer], nproc_per_node: int | None,
    remedies: Callable[[AnyRequest, int], str],
) -> Answer:  # fmt: skip
    """Start the ranks, and return what they have found. Where they fail, this process ends as they did.

    Args:
        module: What each rank runs.
        request: What they are asked.
        answer_type: What they write.
        nproc_per_node: How many ranks; None: one per GPU, or 2 on CPUs.
        remedies: What needs less memory, in words, with so many ranks.

    Raises:
        StageError: this machine has no GPUs for so many ranks.
    """
    ranks = torchrun.Ranks(torchrun.count_local_ranks(nproc_per_node))
    with torchrun.shared_directory(ranks) as directory:
        request.write(directory / REQUEST)
        # The ranks die with this process, also with one that is killed.
        if not (status := torchrun.run(module, ranks, directory)):
            return answer_type.read(directory / ANSWER)
    if status == torchrun.CRASHED:  # else the ranks have printed the reason
        if_killed = f"if a rank was killed by signal 9 because memory ran out, use {remedies(request, ranks.total)}"
        print(f"error: the measurement failed as shown above; {if_killed}", file=sys.stderr)
    sys.exit(status)


def answer(
    request_type: type[AnyRequest],
    measure: Callable[[AnyRequest, "Heartbeat"], JsonFile],
    remedies: Callable[[AnyRequest, int], str],
) -> None:
    """Be one of the ranks that `ask` has started.

    Args:
        request_type: What they are asked.
        measure: Finds what rank 0 writes. It imports what takes seconds.
        remedies: As in `ask`.
    """
    if handoff.DIRECTORY not in os.environ:
        raise StageError(f"`python -m stages.{request_type.STAGE}` starts the ranks: run that")
    handoff.die_with_torchrun(signal.SIGKILL)
    # There is nothing to save: where another rank fails, this one is ended, and says nothing.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    directory = Path(os.environ[handoff.DIRECTORY])
    request = request_type.read(directory / REQUEST)

    # Below, as they take seconds: a rank must die with its torchrun from the first moment on.
    from stages.ranks.process_group import process_group
    from stages.ranks.torch_errors import LostConnection, explain_torch_errors
    from stages.ranks.watchdog import Heartbeat, watched

    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    heartbeat = Heartbeat()
    try:
        with (
            explain_torch_errors(f"rank {rank}", f"use {remedies(request, num_ranks)}"),
            process_group(request.timeout_minutes, str(directory)),
            watched(heartbeat, request.timeout_minutes),
        ):
            found = measure(request, heartbeat)
            if rank == 0:
                found.write(directory / ANSWER)
    except LostConnection:
        sys.exit(torchrun.CRASHED)  # the other one prints its own reason
    except (StageError, OSError):
        if not handoff.claim_error(""):  # whatever it is: the first rank that fails speaks for all
            sys.exit(USER_ERROR)
        raise
