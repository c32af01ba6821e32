"""Ranks on several nodes of an allocation of Slurm: srun starts an agent on each (stages/training/node_agent.py).

srun is only asked to start the agents. Signals, notes and the end of the ranks go over the connections of the agents:
srun answers a SIGTERM by killing all tasks.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from queue import Empty, Queue
from typing import Any

from stages.artifacts.errors import StageError
from stages.training import node_agent
from stages.training.local_ranks import Failure
from stages.training.node_agent import LOST_SECONDS, Endpoint, detect_loss
from stages.training.params import TrainRuntime
from stages.training.run import packages
from stages.training.watchdog import Note, check_interval

_OF_TASKS = ("SLURM_CPU", "SLURM_GPU", "SLURM_HINT", "SLURM_NTASKS_PER", "SLURM_TRES_PER_TASK", "SRUN_CPUS_PER_TASK")
"""What the tasks of the job get, which srun would read as its options: an agent must have its whole node."""


def num_nodes(runtime: TrainRuntime) -> int | None:
    """On how many nodes srun is to start the ranks; None: they are started on this machine, without it.

    Raises:
        StageError: there are not as many nodes as `runtime` asks for.
    """
    is_allocated = "SLURM_JOB_ID" in os.environ
    allocated = int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) if is_allocated else 1
    wanted = runtime.num_nodes or allocated
    if runtime.launcher == "torchrun" or (runtime.launcher != "srun" and wanted == 1):
        if (runtime.num_nodes or 1) > 1:
            raise StageError(
                f"runtime.num_nodes is {wanted}, but launcher torchrun starts the ranks of one machine: use srun"
            )
        return None
    if not is_allocated or wanted > allocated:
        here = f"an allocation of {allocated}" if is_allocated else "no allocation of Slurm"
        nodes = f"{wanted} nodes" if wanted > 1 else "1 node"
        raise StageError(
            f"runtime.launcher {runtime.launcher} and runtime.num_nodes {runtime.num_nodes} need {nodes}, but this is "
            f"in {here}: start it with `sbatch --nodes={wanted}` or in `salloc --nodes={wanted}`"
        )
    if shutil.which("srun") is None:
        raise StageError(f"runtime.launcher {runtime.launcher} needs the command srun, which is not on PATH")
    return wanted


_START_SECONDS = 600
"""Within so long all nodes must answer: each starts Python and torch, of a slow disk where many start at once."""

_SRUN_SECONDS = 5
"""The ranks may outlive srun for so long: each agent ends by itself."""

_Hello = tuple[dict[str, Any], "Connection[Any, Any]"]
"""What an agent has reported of its node, and its connection."""


@contextmanager
def srun_ranks(runtime: TrainRuntime, num_nodes: int, stopping: threading.Event) -> Iterator["SrunRanks"]:
    """Start an agent on each node, and yield them when all have answered. At the end of the block all have ended.

    Args:
        runtime: Where the launcher is reached, and how long a rank may take for one thing.
        num_nodes: So many of the allocation.
        stopping: Set when the ranks are to save and exit.

    Raises:
        StageError: a node cannot train, or its files or packages are not those of this node.
        LostNode: not all nodes answer.
    """
    host, port = _endpoint(runtime.rdzv_endpoint)
    key = secrets.token_hex(16)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_TASKS)}
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(port, num_nodes, key))
        Endpoint(host, listener.address[1], key).hand_over(environment)
        srun = subprocess.Popen(
            ["srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1", "--cpu-bind=none",
             "--overlap", "--export=ALL", "--quiet", "--kill-on-bad-exit=1", "--wait=0",
             sys.executable, "-u", "-m", node_agent.__name__],
            env=environment, stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in a terminal is for this process, which asks the ranks to save
        )  # fmt: skip
        ranks = SrunRanks(srun, stopping, check_interval(60 * runtime.timeout_minutes * 0.9))
        stack.callback(ranks.close)
        hellos = _accept(listener, num_nodes)
        import torch.distributed  # noqa: F401  # seconds, while the nodes start

        ranks.join(hellos, num_nodes, _START_SECONDS)
        yield ranks


class LostNode(Exception):
    """A node did not start, or was lost; the message names it."""


@dataclass
class _Node:
    """A node whose agent has answered."""

    name: str
    connection: "Connection[Any, Any]"
    num_local: int
    notes: list[Note] = field(default_factory=list)
    silent: float = 0
    """Seconds since it was heard."""

    def activity(self) -> str:
        """What its ranks were doing last."""
        return ", ".join(f"rank {note.rank} in {note.activity}" for note in self.notes) or "its ranks were starting"


class SrunRanks:
    """The ranks of several nodes, each started by the agent of its node."""

    def __init__(
        self,
        srun: "subprocess.Popen[bytes]",
        stopping: threading.Event,
        interval: float,
        lost_seconds: float = LOST_SECONDS,
    ) -> None:
        self._srun, self._stopping, self._interval, self._lost_seconds = srun, stopping, interval, lost_seconds
        self._hellos: dict[int, _Hello] = {}
        self._nodes: list[_Node] = []
        self._lock = threading.Lock()  # the watchdog sends from another thread

    @property
    def num_local(self) -> int:
        """Ranks of each node."""
        return self._nodes[0].num_local

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.num_local * len(self._nodes)

    def join(self, hellos: "Queue[_Hello]", num_nodes: int, limit: float) -> None:
        """Wait for the agents of all nodes, at most `limit` seconds, or until the ranks are to stop.

        Raises:
            StageError: they cannot train together.
            LostNode: not all answer.
        """
        found = self._hellos
        waited = 0.0
        while len(found) < num_nodes:
            if self._stopping.is_set():
                return
            try:
                hello, connection = hellos.get(timeout=0.1)
                found[hello["index"]] = (hello, connection)
            except Empty:
                waited += 0.1
                names = ", ".join(hello["node"] for hello, _ in found.values()) or "none"
                answered = f"{len(found)} of {num_nodes} nodes have answered ({names})"
                if (status := self._srun.poll()) is not None:
                    raise LostNode(f"srun ended with status {status}, as shown above: {answered}") from None
                if waited > limit:
                    raise LostNode(f"{answered} within {limit:.0f} s") from None
        in_order = [found[index] for index in sorted(found)]
        self._nodes = [_Node(hello["node"], connection, hello["num_local"]) for hello, connection in in_order]
        _refuse_different_nodes([hello for hello, _ in in_order])

    def notes(self) -> list[Note]:
        """The newest note of each rank."""
        return [note for node in self._nodes for note in node.notes]

    def node(self, rank: int) -> str:
        """The node of a rank."""
        return self._nodes[rank // self.num_local].name

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all ranks."""
        self._ask({"do": "send", "number": int(number)}, *self._nodes)

    def run(self) -> dict[int, Failure]:
        """Start the ranks and wait until all have ended; returns the failures.

        Raises:
            LostNode: a node was lost; the ranks of the others have been killed.
        """
        import torch.distributed as dist

        address = self._address()
        # Here, where the kernel chooses a free port, another one for each start. The ranks find each other through it
        # as those of torchrun through the store of its agent.
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        environment = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        for index, node in enumerate(self._nodes):
            start = {"first": index * node.num_local, "num_ranks": self.num_ranks, "interval": self._interval}
            self._ask({**start, "environment": environment}, node)
        failures: dict[int, Failure] = {}
        running = list(self._nodes)
        lost: str | None = None
        asked_to_stop, without_srun, since_loss = False, 0.0, 0.0
        while running and since_loss < self._lost_seconds:
            if self._stopping.is_set() and not asked_to_stop:
                self.send(signal.SIGTERM)
                asked_to_stop = True
            before = time.monotonic()
            heard = wait([node.connection for node in running], timeout=0.2)
            # Not more, where this process was suspended together with the nodes.
            passed = min(time.monotonic() - before, 1.0)
            without_srun += passed if self._srun.poll() is not None else 0
            since_loss += passed if lost else 0
            for node in list(running):
                node.silent = 0 if node.connection in heard else node.silent + passed
                message = _receive(node.connection) if node.connection in heard else {}
                if message is None:
                    reason = "its agent ended"
                elif node.silent > self._lost_seconds:
                    reason = f"nothing was heard of it for {self._lost_seconds:.0f} s"
                elif without_srun > _SRUN_SECONDS:  # nobody shows what the ranks print
                    reason = f"srun ended with status {self._srun.returncode}"
                else:
                    if "notes" in message:
                        node.notes = [Note(*values) for values in message["notes"]]
                    if "failures" in message:
                        running.remove(node)
                        failures |= {rank: Failure(*values) for rank, values in message["failures"].items()}
                        if failures:
                            self._ask({"do": "end"}, *running)
                    continue
                running.remove(node)
                if lost is None:  # those that follow are a consequence
                    # slurm/job.sh looks for this, to start the job again.
                    lost = f"node {node.name} was lost ({reason}): {node.activity()}"
                    self.send(signal.SIGKILL)
        if lost:
            raise LostNode(lost)
        return failures

    def close(self) -> None:
        """End the agents, and srun."""
        for _, connection in self._hellos.values():
            connection.close()
        if self._nodes:  # all have answered, so they notice
            with suppress(subprocess.TimeoutExpired):
                self._srun.wait(15)
        for number in (signal.SIGTERM, signal.SIGKILL):  # at the first one, srun kills its tasks
            if self._srun.poll() is None:
                self._srun.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    self._srun.wait(15)

    def _ask(self, message: dict[str, Any], *nodes: _Node) -> None:
        """Send a message to the agents of some nodes."""
        with self._lock:
            for node in nodes:
                with suppress(OSError):  # it has ended, or is lost: `run` notices
                    node.connection.send(message)

    def _address(self) -> str:
        """The address of this machine at which all nodes reach it."""
        pairs: list[tuple[str, str]] = []
        for node in self._nodes:
            with socket.socket(fileno=os.dup(node.connection.fileno())) as connected:
                pairs.append((connected.getsockname()[0], connected.getpeername()[0]))
        # An agent on this machine may have come over loopback, where the others cannot.
        return next((own for own, theirs in pairs if own != theirs), pairs[0][0])


@contextmanager
def _listen(port: int, num_nodes: int, key: str) -> Iterator[Listener]:
    """Listen for the agents.

    Raises:
        StageError: another process does so at this port.
    """
    try:
        listener = Listener(("", port), backlog=num_nodes, authkey=key.encode())
    except OSError as error:
        raise StageError(
            f"the launcher cannot listen at port {port} ({error.strerror}): name another one in "
            "runtime.rdzv_endpoint, or only the host"
        ) from None
    try:
        yield listener
    finally:
        # Closing alone does not end an `accept` that waits in another thread: the port would stay in use.
        with suppress(OSError, AttributeError):
            listener._listener._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        listener.close()


def _accept(listener: Listener, num_nodes: int) -> "Queue[_Hello]":
    """Accept the agents of so many nodes, in a thread; the queue gets them."""
    hellos: Queue[_Hello] = Queue()

    def accept() -> None:
        missing = num_nodes
        while missing:
            try:
                connection = listener.accept()
                detect_loss(connection)
                hellos.put((connection.recv(), connection))
                missing -= 1
            except (AuthenticationError, EOFError, ConnectionError):  # somebody else, who does not know the key
                continue
            except OSError:  # the listener is closed
                return
        listener.close()  # nobody else is to connect

    threading.Thread(target=accept, daemon=True).start()
    return hellos


def _receive(connection: "Connection[Any, Any]") -> dict[str, Any] | None:
    try:
        message: dict[str, Any] = connection.recv()
    except (EOFError, OSError):
        return None
    return message


def _refuse_different_nodes(hellos: list[dict[str, Any]]) -> None:
    """Refuse nodes that cannot train, or not together.

    Raises:
        StageError: naming the nodes.
    """
    own = packages()
    lines = []
    for hello in hellos:
        node = f"node {hello['node']}"
        different = [*hello["differences"]]
        if hello["error"]:
            lines.append(f"{node}: {hello['error']}")
        else:
            theirs = hello["packages"]
            names = [name for name in own if own[name] != theirs[name]]
            different += [f"{name}: {own[name]} there, {theirs[name]} here" for name in names]
        if different:
            lines.append(f"{node} has other files than the node of the launcher (there):")
            lines += different
    counts = {hello["num_local"]: hello["node"] for hello in hellos}
    if not lines and len(counts) > 1:
        found = ", ".join(f"{count} on {node}" for count, node in sorted(counts.items()))
        lines.append(f"each node must have as many ranks: {found}; set runtime.nproc_per_node to {min(counts)}")
    if lines:
        raise StageError("\n".join(lines))


def _endpoint(text: str | None) -> tuple[str | None, int]:
    """Host and port of `runtime.rdzv_endpoint`; port 0: any that is free."""
    if text is None:
        return None, 0
    host, _, port = text.partition(":")
    if int(port or 0) > 65535:
        raise StageError(f"runtime.rdzv_endpoint is {text}: ports are numbers up to 65535")
    return host, int(port or 0)
