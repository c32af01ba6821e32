"""The ranks of one machine: started, watched and ended together, as children of one process.

That process is the launcher where one machine trains, and an agent (stages/training/node_agent.py) where several do.
"""

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stages.training import handoff
from stages.training.signals import send_to_ranks
from stages.training.watchdog import Note, read_notes

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext


class Failure(NamedTuple):
    """How a rank ended that failed, or was ended because another one did."""

    exitcode: int
    """Its exit status; negative: of the signal that killed it."""
    timestamp: int
    """When it was noticed: seconds since 1970, by the clock of its machine."""


def count_local_ranks(nproc_per_node: int | None) -> int:
    """The ranks to start on this machine: `nproc_per_node`, or if that is None one for each GPU, or two on CPUs.

    Raises:
        StageError: it has no GPUs for them.
    """
    from stages.training.distributed import check_devices

    num_gpus = check_devices(nproc_per_node)
    return nproc_per_node or num_gpus or 2


class LocalRanks:
    """Processes of one module, as children of this one; a context manager around their lives.

    With the part of torchrun that starts processes and ends all when one fails, but without its rendezvous and its
    agent: on one machine these only ask the nameserver for the machine's own name, and listen on all interfaces.

    Args:
        num_local: Ranks of this machine.
        num_ranks: Of all machines.
        first: The first rank of this machine.
        node: What messages call this machine, where there are several.
        module: What each of them runs.
    """

    def __init__(
        self, num_local: int, num_ranks: int | None = None, first: int = 0, node: str = "",
        module: str = "stages.train",
    ) -> None:  # fmt: skip
        self.num_local = num_local
        self.num_ranks = num_local if num_ranks is None else num_ranks
        self._first, self._node, self._module = first, node, module

    def __enter__(self) -> "LocalRanks":
        self._processes: PContext | None = None
        self._temporary = tempfile.TemporaryDirectory(prefix="ranks-")
        self.directory = Path(self._temporary.name)
        """What the ranks know as `handoff.DIRECTORY`."""
        return self

    def __exit__(self, *error: object) -> None:
        self.end()  # after an error; else they have ended
        self._temporary.cleanup()

    def notes(self) -> list[Note]:
        """The newest note of each rank."""
        return list(read_notes(self.directory, self._node))

    def node(self, rank: int) -> str:
        """The node of a rank; empty where there is one machine."""
        return self._node

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all ranks."""
        send_to_ranks(number)

    def run(self) -> dict[int, Failure]:
        """Start the ranks and wait until all have ended; returns the failures."""
        self.start()
        while (failures := self.poll(wait=3600)) is None:
            pass
        return failures

    def start(self) -> None:
        """Start the ranks."""
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

        os.environ[handoff.LAUNCHER] = str(os.getpid())
        # Several ranks with one thread per core each would compete for the cores.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cpus() // self.num_local)))
        # torch itself would give the ranks 30 seconds to save, and none at a second signal. So it handles none: the
        # ranks get the signals, save together and exit, and torch sees them exit.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        # The ranks print their own errors; torch would add that they failed.
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
        environment = {
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_local),
            handoff.DIRECTORY: str(self.directory),
        }
        numbers = range(self.num_local)
        self._processes = start_processes(
            name=self._module,
            entrypoint=sys.executable,
            args=dict.fromkeys(numbers, ("-u", "-m", self._module)),
            envs={n: {**environment, "RANK": str(self._first + n), "LOCAL_RANK": str(n)} for n in numbers},
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # the ranks print into the terminal
        )

    def poll(self, wait: float = 0) -> dict[int, Failure] | None:
        """The failures when all ranks have ended; None as long as they run. When one fails, torch ends the others.

        Args:
            wait: Seconds to wait for their end.
        """
        assert self._processes, "`start` comes first"
        result = self._processes.wait(wait, period=0.1)
        if result is None:
            return None
        return {self._first + n: Failure(f.exitcode, f.timestamp) for n, f in result.failures.items()}

    def end(self) -> None:
        """End the ranks, as torch does when one fails: those that do not end within 30 seconds are killed."""
        if self._processes:
            self._processes.close()


def _num_cpus() -> int:
    """The CPUs that this process may use: of its affinity, and of Slurm's job where Slurm does not enforce them."""
    own = len(os.sched_getaffinity(0))
    return min(own, int(os.environ.get("SLURM_CPUS_ON_NODE", own)))
