"""torchrun starts the ranks, ends all when one fails, and passes signals on: here, or with srun on nodes of Slurm.

On one machine torchrun and the ranks find each other through files, and bind sockets to 127.0.0.1 alone. On several
nodes the first one has torchrun's store, which the ranks use too, and says in a file where it is. No name has to
resolve.

A rank that decides itself to end says so (`handoff.tell_launcher`). Otherwise torchrun's report is shown.
"""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from stages.base import process, publish
from stages.base.command import USER_ERROR
from stages.base.errors import StageError
from stages.base.shared_disk import refresh, wait_for_file
from stages.ranks import handoff
from stages.ranks.gpus import num_devices
from stages.ranks.signals import INTERRUPTED, on_stop_signals

CRASHED = 1
"""Exit status where a rank crashed or hung."""

_LOG = "torchrun-"
"""A file in the directory of the ranks with what torchrun prints, and the name of the node."""

_ENDPOINT = "TRAINING_ENDPOINT"
"""Environment variable of torchrun on one of several nodes, with `runtime.rdzv_endpoint`, which may be empty."""

_START_SECONDS = 15 * 60
"""A node waits for the others for so long, as torchrun does."""

_OF_TASKS = ("SLURM_CPU", "SLURM_GPU", "SLURM_HINT", "SLURM_NTASKS_PER", "SLURM_TRES_PER_TASK", "SRUN_CPUS_PER_TASK")
"""What the tasks of the job get, which srun would read as its options: torchrun must have its whole node."""

_START = f'exec "$@" <&2 2>"${handoff.DIRECTORY}/{_LOG}${{SLURMD_NODENAME:-here}}"'
"""The shell that becomes torchrun, whose stdin is the terminal: see `handoff.STDERR`."""

_ON_A_NODE = f"""
if ! [ -d "${handoff.DIRECTORY}" ]; then
    echo "error: node $SLURMD_NODENAME does not see ${handoff.DIRECTORY} of the launcher: put the checkpoints on a" \\
        "disk that all nodes share (set CHECKPOINT_ROOT)" >&2
    exit {USER_ERROR}
fi
{_START}
"""
"""The same on one node of several."""


class Ranks(NamedTuple):
    """How many ranks to start, and where."""

    num_local: int
    """On each node."""
    num_nodes: int | None = None
    """Nodes on which srun starts them; None: this machine, without srun."""

    @property
    def total(self) -> int:
        """Ranks of all nodes."""
        return self.num_local * (self.num_nodes or 1)


def count_local_ranks(nproc_per_node: int | None, num_nodes: int | None = None) -> int:
    """The ranks to start on each node: `nproc_per_node`, or if that is None one for each GPU here, or two on CPUs.

    Args:
        nproc_per_node: `runtime.nproc_per_node`.
        num_nodes: On which srun starts them; None: on this machine.

    Raises:
        StageError: there are GPUs, but torch cannot use them; or those of the nodes are not known here.
    """
    if nproc_per_node is not None:
        return nproc_per_node
    if num_nodes and "SLURMD_NODENAME" not in os.environ:  # as in `salloc` on a login node
        raise StageError(
            "this machine is none of the nodes of the job, so it does not know their GPUs: set runtime.nproc_per_node "
            "to the number of each node, 2 on CPUs"
        )
    if not num_devices() and not Path("/dev/kfd").exists():  # without importing torch, which takes seconds
        return 2
    from stages.ranks.process_group import check_devices

    return check_devices(None) or 2


def count_srun_nodes(launcher: str, num_nodes: int | None) -> int | None:
    """On how many nodes srun is to start the ranks; None: they are started on this machine, without it.

    Args:
        launcher: `runtime.launcher`.
        num_nodes: `runtime.num_nodes`.

    Raises:
        StageError: there are not so many nodes.
    """
    is_allocated = "SLURM_JOB_ID" in os.environ
    allocated = int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) if is_allocated else 1
    wanted = num_nodes or allocated
    if launcher == "torchrun" or (launcher != "srun" and wanted == 1):
        if (num_nodes or 1) > 1:
            raise StageError(
                f"runtime.num_nodes is {wanted}, but launcher torchrun starts the ranks of one machine: use srun"
            )
        return None
    if not is_allocated or wanted > allocated:
        here = f"an allocation of {allocated}" if is_allocated else "no allocation of Slurm"
        nodes = f"{wanted} nodes" if wanted > 1 else "1 node"
        raise StageError(
            f"runtime.launcher {launcher} and runtime.num_nodes {num_nodes or 'null'} need {nodes}, but this is "
            f"in {here}: start it with `sbatch --nodes={wanted}` or in `salloc --nodes={wanted}`"
        )
    if shutil.which("srun") is None:
        raise StageError(f"runtime.launcher {launcher} needs the command srun, which is not on PATH")
    return wanted


@contextmanager
def shared_directory(ranks: Ranks, parent: Path | None = None) -> Iterator[Path]:
    """A directory for one start of the ranks, below `parent` where that is on several nodes; removed at the end."""
    prefix = "ranks-"
    if ranks.num_nodes is None:
        parent = None  # /tmp: locks in it are fast, and it is there when the disk of the checkpoints is full
    elif parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
        for leftover in parent.glob(f"{prefix}*"):  # of a launcher that was killed
            shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def run(
    module: str, ranks: Ranks, directory: Path, endpoint: str | None = None, stopping: threading.Event | None = None
) -> int:
    """Run a module as so many ranks, until all have ended.

    Args:
        module: What each rank runs.
        ranks: How many, and where.
        directory: That they share for this start.
        endpoint: On several nodes `host` or `host:port` where all of them reach the first one; None: found by itself.
        stopping: Set when the ranks are to save and exit, however long that takes; the watchdog ends those that hang.
            None: they never are.

    Returns:
        An exit status. Why it is not 0 is printed, by the ranks or here.
    """
    stopping = stopping or threading.Event()
    at_death = signal.SIGKILL if ranks.num_nodes is None else signal.SIGTERM  # at which srun kills its tasks
    started = subprocess.Popen(
        _command(module, ranks, directory),
        env=_environment(ranks, directory, endpoint),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in a terminal is for this process, which asks the ranks to save
        preexec_fn=partial(process.die_with_parent, at_death, os.getpid()),
    )
    try:
        _wait(started, stopping)
    finally:  # the ranks die with torchrun
        if started.poll() is None:
            started.send_signal(at_death)
            started.wait()
    if started.returncode == 0:
        return 0
    refresh([directory])  # other nodes have written into it
    told, is_stopping = handoff.told(directory), stopping.is_set()
    # The others lost the connection, or were ended: one that srun ends early says that it was interrupted.
    for status in (INTERRUPTED, USER_ERROR) if is_stopping else (USER_ERROR, INTERRUPTED):
        if str(status) in told:
            return status
    # A signal may end torchrun, or a rank, before it can say a word: then no rank has trained a step.
    if is_stopping and handoff.TRAINING not in told:
        return INTERRUPTED
    with suppress(OSError):  # a terminal that is closed: `max_restarts` may start them again nevertheless
        for line in _reports(directory, ranks.num_nodes):
            print(line, file=sys.stderr, flush=True)
    return CRASHED


def _command(module: str, ranks: Ranks, directory: Path) -> list[str]:
    """That runs torchrun with a module: here, or by srun on each node."""
    torchrun = [
        sys.executable, "-m", "stages.ranks.torchrun",
        f"--nnodes={ranks.num_nodes or 1}", f"--nproc-per-node={ranks.num_local}", f"--log-dir={directory}",
        "--signals-to-handle=SIGQUIT",  # not those of `_ask_ranks_to_stop`
    ]  # fmt: skip
    if ranks.num_nodes is None:
        torchrun += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={directory / 'rendezvous'}",
            "--rdzv-conf=store_type=file",
            "--local-addr=127.0.0.1",
        ]
        return ["sh", "-c", _START, "sh", *torchrun, "-m", module]
    # Not c10d: it gives the ranks the full name of the first node, which need not resolve elsewhere.
    torchrun += ["--rdzv-backend=static", f"--rdzv-id={secrets.token_hex(4)}"]
    srun = [
        "srun", f"--nodes={ranks.num_nodes}", f"--ntasks={ranks.num_nodes}", "--ntasks-per-node=1", "--relative=0",
        "--cpu-bind=none", "--overlap", "--export=ALL", "--quiet", "--kill-on-bad-exit=1", "--wait=0",
    ]  # fmt: skip
    return [*srun, "sh", "-c", _ON_A_NODE, "sh", *torchrun, "-m", module]


def _environment(ranks: Ranks, directory: Path, endpoint: str | None) -> dict[str, str]:
    """That of torchrun and of the ranks."""
    environment = {
        **os.environ,
        handoff.DIRECTORY: str(directory),
        handoff.STDERR: "0",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if ranks.num_nodes is None else "0",
    }
    # Several ranks with one thread per core each would compete for the cores; so would their compilers.
    num_threads = str(max(1, _num_cpus() // ranks.num_local))
    environment.setdefault("OMP_NUM_THREADS", num_threads)
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", num_threads)
    if ranks.num_nodes is None:
        return environment
    environment = {name: value for name, value in environment.items() if not name.startswith(_OF_TASKS)}
    return {**environment, _ENDPOINT: endpoint or ""}


def _wait(started: "subprocess.Popen[bytes]", stopping: threading.Event) -> None:
    """Wait for the end of torchrun or srun, which pass on the signal that the ranks get when they are to stop."""
    was_asked = False
    while started.poll() is None:
        if stopping.is_set() and not was_asked:
            started.send_signal(signal.SIGUSR1)  # srun answers others by killing its tasks
            was_asked = True
        try:
            started.wait(0.1)
        except subprocess.TimeoutExpired:
            continue


def _reports(directory: Path, num_nodes: int | None) -> Iterator[str]:
    """What torchrun has printed on each node: its table of the ranks that failed, or all, where there is none."""
    logs = sorted(directory.glob(f"{_LOG}*"))
    have_started = len(logs) == num_nodes  # otherwise one has not, and srun has ended the others
    for log in logs:
        text = log.read_text(encoding="utf-8", errors="replace")
        if not re.search("Error|Exception|signal", text):
            if num_nodes is None:
                yield "error: torchrun has ended without a word"
            elif have_started:  # slurm/job.sh looks for this, to start the job again
                name = log.name.removeprefix(_LOG)
                yield f"error: node {name} was lost: torchrun has ended there without a word"
        else:
            yield text[max(text.find("=" * 20), 0) :].rstrip()


def find_endpoint(directory: Path, given: str, node: int, num_nodes: int) -> str:
    """Host and port of torchrun's store, which the first node writes into `directory` for all.

    The first node alone knows its free ports. But it may be 127.0.1.1 to itself, and the launcher may be on a login
    node. So the last node says which address it has towards srun, and the first one which address it has towards that.

    Args:
        directory: That the nodes share for this start.
        given: `host`, `host:port`, or "".
        node: The number of this node.
        num_nodes: How many there are.
    """
    from stages.ranks.process_group import own_address

    last, first = directory / "last-node", directory / "first-node"
    host, _, port = given.partition(":")
    if not host and node == num_nodes - 1:
        publish.write_text(last, own_address(os.environ["SLURM_LAUNCH_NODE_IPADDR"]))
    if node == 0:
        host = host or own_address(_wait_for(last))
        publish.write_text(first, f"{f'[{host}]' if ':' in host else host}:{port or _free_port()}")
    return _wait_for(first)


def _wait_for(path: Path) -> str:
    """The text of a file that another node writes."""
    if not wait_for_file(path, None, _START_SECONDS):
        sys.exit(f"RendezvousTimeoutError: the {path.name.replace('-', ' ')} has not started in {_START_SECONDS} s")
    return path.read_text(encoding="utf-8")


def _free_port() -> int:
    """A port that nobody uses here now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _num_cpus() -> int:
    """The CPUs that this process may use: of its affinity, and of Slurm's job where Slurm does not enforce them."""
    own = len(os.sched_getaffinity(0))
    return min(own, int(os.environ.get("SLURM_CPUS_ON_NODE", own)))


def _ask_ranks_to_stop(woken: int) -> None:
    """After a signal, ask the ranks to save; before there are any, end this process.

    torchrun would ask them too, but kill them after a while, which before torch 2.12 is 30 seconds.
    """
    os.read(woken, 1)
    asked: set[psutil.Process] = set()
    while True:
        ranks = set(psutil.Process().children())
        if not ranks | asked:
            handoff.tell_launcher(INTERRUPTED)
            os._exit(INTERRUPTED)
        for rank in ranks - asked:  # also those that torchrun starts only now
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGUSR1)
        asked |= ranks
        time.sleep(0.1)


def _main() -> None:
    """Run torchrun on this node."""
    # Not Python's handlers, which wait until the main thread has found the other nodes: a thread that is woken at once.
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    on_stop_signals(lambda: None)
    threading.Thread(target=_ask_ranks_to_stop, args=(woken,), daemon=True).start()
    os.environ[handoff.PARENT] = str(os.getpid())
    if (given := os.environ.get(_ENDPOINT)) is not None:
        node, num_nodes = (int(os.environ[name]) for name in ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"))
        endpoint = find_endpoint(Path(os.environ[handoff.DIRECTORY]), given, node, num_nodes)
        # Options of torchrun that differ between the nodes are variables, which it reads too.
        os.environ |= {"PET_NODE_RANK": str(node), "PET_RDZV_ENDPOINT": endpoint}
    from torch.distributed.run import main

    # It records the full name of the machine with its events. Where /etc/hosts lacks it, nameservers would be asked.
    socket.getfqdn = lambda name="": name or socket.gethostname()
    main()


if __name__ == "__main__":
    _main()
