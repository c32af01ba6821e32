"""The ranks of one node of several. srun starts an agent on each node, for the launcher, which is on one of them.

    launcher                                 agent
    waits for all of them          <- hello  its node, its ranks, what differs from the launcher's files
    start: first rank, environment ->        starts its ranks
    shows and watches the notes    <- notes  the newest note of each rank, every second
    send: a signal; end            ->        sends it to its ranks; ends them
    decides about a restart        <- ended  how its ranks have ended

Messages are dicts of built-in types, pickled by multiprocessing's connections, which are made with a secret key. If the
connection ends, so does the agent, and its ranks with it: a launcher that is gone cannot keep the next one from
starting, and that one would write where these ranks write.
"""

import json
import os
import signal
import socket
import sys
import threading
from contextlib import closing
from multiprocessing.connection import Client, Connection
from typing import Any, NamedTuple

from stages.artifacts.errors import StageError, describe
from stages.artifacts.shared_disk import refresh
from stages.model.manifest import MANIFEST
from stages.tokens.packed import TRAIN, VALIDATION
from stages.training import handoff, run
from stages.training.local_ranks import LocalRanks, count_local_ranks
from stages.training.signals import on_stop_signal, stop_ranks

LOST_SECONDS = 60
"""A node from which nothing was heard for so long is lost."""

_ENDPOINT = "TRAINING_ENDPOINT"


class Endpoint(NamedTuple):
    """Where agents find the launcher."""

    host: str | None
    """None: the address of the machine on which srun runs, which Slurm gives to the processes it starts."""
    port: int
    key: str
    """Secret, as whoever knows it can have code executed."""

    def hand_over(self, environment: dict[str, str]) -> None:
        """Put it into the environment of the agents."""
        environment[_ENDPOINT] = json.dumps(self)


def main() -> None:
    """Serve the launcher until the ranks of this node have ended."""
    on_stop_signal(stop_ranks)  # before torch is imported: the threads that it starts must not receive the signals
    endpoint = Endpoint(*json.loads(os.environ.pop(_ENDPOINT)))
    hello = _hello()
    host = endpoint.host or os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    try:
        connection = Client((host, endpoint.port), authkey=endpoint.key.encode())
    except OSError as error:
        sys.exit(
            f"error: node {hello['node']} cannot reach the launcher at {host}:{endpoint.port} "
            f"({error.strerror or error}): set runtime.rdzv_endpoint to a name or address of the launcher's "
            "node that all nodes reach"
        )
    with closing(connection):
        detect_loss(connection)
        try:
            connection.send(hello)
            start = connection.recv()
        except (EOFError, OSError):  # the launcher does not start the ranks, and has printed why
            return
        os.environ |= start["environment"]
        with LocalRanks(hello["num_local"], start["num_ranks"], start["first"], hello["node"]) as ranks:
            ranks.start()
            _serve(connection, ranks, start["interval"])


def detect_loss(connection: "Connection[Any, Any]") -> None:
    """Have a connection end when the other machine is gone, which sends no end itself."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Of what was sent but not confirmed; the default is a quarter of an hour.
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000)


def _hello() -> dict[str, Any]:
    """What the launcher must know of this node before it starts the ranks."""
    hello: dict[str, Any] = {
        "index": int(os.environ["SLURM_PROCID"]), "node": os.environ.get("SLURMD_NODENAME", os.uname().nodename),
        "error": None, "differences": [], "num_local": 0,
    }  # fmt: skip
    from stages.training.precision import check_precision

    try:
        refresh([TRAIN, VALIDATION, MANIFEST.parent])  # what the node of the launcher has written a moment ago
        launch = handoff.received()
        assert launch is not None, "the launcher puts it into the environment"
        described = run.describe(launch.params)
        hello["differences"] = run.differences(launch.identity, described.identity)
        hello["packages"] = run.packages()
        hello["num_local"] = count_local_ranks(launch.runtime.nproc_per_node)
        check_precision(launch.params, described.seq_length)
    except (StageError, OSError) as error:
        hello["error"] = describe(error) if isinstance(error, OSError) else str(error)
    return hello


def _serve(connection: "Connection[Any, Any]", ranks: LocalRanks, interval: float) -> None:
    """Report the notes of the ranks and do what the launcher asks, until the ranks have ended."""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(interval):
            _send(connection, {"notes": [list(note) for note in ranks.notes()]})

    # A thread, as ending the ranks may take half a minute, and a silent node would count as lost.
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    while (failures := ranks.poll()) is None:
        if connection.poll(0.1):
            try:
                message = connection.recv()
            except (EOFError, OSError):
                _end_at_once()
            if message["do"] == "end":
                ranks.end()
            else:
                ranks.send(signal.Signals(message["number"]))
    ended.set()
    reporter.join()
    notes = [list(note) for note in ranks.notes()]
    _send(connection, {"notes": notes, "failures": {rank: list(failure) for rank, failure in failures.items()}})


def _send(connection: "Connection[Any, Any]", message: dict[str, Any]) -> None:
    try:
        connection.send(message)
    except OSError:
        _end_at_once()


def _end_at_once() -> None:
    os._exit(1)  # the kernel kills the ranks with it


if __name__ == "__main__":
    main()
