"""A real Slurm on this machine: one controller and the nodes n1 and n2, with all their files in one directory.

By hand, as root, until Ctrl-C:

    python -m tests.slurm.cluster
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.project import REPO, wait_for

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")

ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
"""The states of a job that does not run again. (One that waits after a requeue is PENDING.)"""

_CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdSpoolDir={directory}/%n
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmdLogFile={directory}/slurmd-%n.log
SlurmdTimeout=30
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
ReturnToService=2
InactiveLimit=0
KillWait=30
MinJobAge=3600
CompleteWait=0
PropagateResourceLimits=NONE
"""


def missing() -> str:
    """Why there can be no cluster on this machine; empty if there can."""
    if absent := [name for name in PROGRAMS if not _which(name)]:
        return f"Slurm is not installed here ({', '.join(absent)}): apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "only root can start the nodes of a Slurm cluster"
    return ""


class Cluster:
    """A cluster that starts and ends with a `with` block."""

    def __init__(self, cpus: int = 8) -> None:
        """`cpus`: those that each node offers, whatever this machine has."""
        self.cpus = cpus
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Cluster":
        # Directly below /tmp: the path of a socket has at most 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        # Another process, which clears up however this one ends.
        guard = [sys.executable, "-m", "tests.slurm.cluster", str(self.directory)]
        self._guard = subprocess.Popen(guard, cwd=REPO, stdin=subprocess.PIPE, start_new_session=True)
        self.conf = self.directory / "slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self.conf)}
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.communicate()
        for daemon in self.daemons.values():
            daemon.wait()

    def _start(self) -> None:
        self.directory.chmod(0o755)
        for name in ("state", *NODES):
            (self.directory / name).mkdir()
        # Below those that the kernel gives to connections: another process may get one of these at any time.
        controller, *ports = random.sample(range(10_000, 30_000), 1 + len(NODES))
        lines = [_CONF.format(directory=self.directory, controller=controller)]
        for name, port in zip(NODES, ports, strict=True):
            # Slurm knows the name of the node, and the machine knows localhost.
            lines.append(f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} "
                         f"CPUs={self.cpus} RealMemory=16000 State=UNKNOWN")  # fmt: skip
        lines.append(f"PartitionName=test Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP")
        self.conf.write_text("\n".join(lines) + "\n")
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"key-file": key, "socket": self.directory / "munge.socket", "seed-file": self.directory / "munge.seed",
                 "pid-file": self.directory / "munge.pid", "log-file": self.directory / "munge.log"}  # fmt: skip
        # --force: for munged, /tmp is a place that others may write to.
        self._daemon("munged", "--foreground", "--force", *(f"--{name}={file}" for name, file in files.items()))
        wait_for(files["socket"].exists, 10)
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        try:
            wait_for(lambda: self.node_states() == dict.fromkeys(NODES, "idle"), 30)
        except AssertionError:
            raise AssertionError("\n".join(self.logs())) from None

    def _daemon(self, name: str, *arguments: str, node: str = "") -> None:
        program = _which(name)
        assert program, missing()
        with (self.directory / f"{node or name}.out").open("ab") as out:
            self.daemons[node or name] = subprocess.Popen(
                [program, *arguments],
                cwd=self.directory / node,
                env={**self.env, "SLURMD_NODENAME": node},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C is for pytest
            )

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._daemon("slurmd", "-D", "-N", node, node=node)

    def kill_node(self, node: str) -> None:
        """Kill everything that runs on a node, as when it loses power."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()
        _kill_all(self.directory, node)

    def node_states(self) -> dict[str, str]:
        """`idle`, `mixed`, `allocated`, `down*`, ..., of each node; empty if the controller does not answer."""
        done = subprocess.run(["sinfo", "-hNo", "%N %T"], env=self.env, text=True, capture_output=True)
        return dict(line.split() for line in done.stdout.splitlines())

    def run(self, command: list[str], cwd: Path | None = None, status: int = 0, **environment: str) -> str:
        """Run a command of Slurm, check its exit status, and return what it printed."""
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**self.env, **environment},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    def submit(self, *arguments: str, cwd: Path, **environment: str) -> str:
        """Submit a job (`sbatch --parsable ...`) and return its id."""
        return self.run(["sbatch", "--parsable", *arguments], cwd, **environment).strip()

    def job(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`: JobState, Reason, Restarts, ExitCode, NodeList, StdOut, ..."""
        shown = self.run(["scontrol", "--oneliner", "show", "job", job])
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def wait(self, job: str, *states: str, seconds: float = 200) -> dict[str, str]:
        """Wait until a job has ended, or until it is in one of `states`; returns its fields.

        Slurm lets a job that was requeued wait for two minutes, until no credential of its last start is valid; here it
        starts after two seconds. (Within the second in which it was killed, a slurmd takes the new start for the old
        one: "Job credential revoked", and the job fails.)
        """
        wanted = set(states) or ENDED
        end = time.monotonic() + seconds
        hurried = ""
        while (fields := self.job(job))["JobState"] not in wanted:
            log = Path(fields.get("StdOut", os.devnull))
            printed = log.read_text() if log.is_file() else ""
            assert time.monotonic() < end, f"{fields}\n{printed}"
            assert fields["JobState"] not in ENDED, f"{fields}\n{printed}"
            if fields["JobState"] == "PENDING" and fields["Reason"] == "BeginTime" and fields["Restarts"] != hurried:
                hurried = fields["Restarts"]
                self.run(["scontrol", "update", f"JobId={job}", "StartTime=now+2"])
            time.sleep(0.2)
        return fields

    def tasks(self, job: str) -> list[psutil.Process]:
        """The processes of a job on all nodes."""
        found = []
        for process in _processes(self.directory):
            with suppress(psutil.Error):
                if process.environ().get("SLURM_JOB_ID") == job and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until nothing of them is left."""
        self.run(["scancel", "--user=root"])
        wait_for(lambda: not self.run(["squeue", "--noheader"]), 60)

    def logs(self) -> list[str]:
        """The logs of all daemons, for an error."""
        files = sorted([*self.directory.glob("*.log"), *self.directory.glob("*.out")])
        return [f"== {file.name}\n{file.read_text(errors='replace')[-4000:]}" for file in files]


def _processes(directory: Path, node: str | None = None) -> list[psutil.Process]:
    """What runs of the cluster in a directory: its daemons, and the jobs; of one node, or of all."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment, current = process.environ(), Path(process.cwd())
            # A slurmstepd overwrites its environment with its title, but stays in the directory of its slurmd.
            if environment.get("SLURM_CONF") == str(directory / "slurm.conf"):
                its_node = environment.get("SLURMD_NODENAME")
            elif current.parent == directory:
                its_node = current.name
            else:
                continue
            if node in (None, its_node) and process.pid != os.getpid():
                found.append(process)
    return found


def _kill_all(directory: Path, node: str | None = None) -> None:
    """Kill what `_processes` finds, until nothing is left: a process may start others until it is killed."""
    end = time.monotonic() + 10
    while (left := _processes(directory, node)) and time.monotonic() < end:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)


def _clear_up(directory: Path) -> None:
    """End everything that runs of a cluster, and delete its directory."""
    _kill_all(directory)  # not SIGTERM, which a job may ignore
    shutil.rmtree(directory)


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


if __name__ == "__main__":
    if len(sys.argv) > 1:  # the guard of a cluster
        sys.stdin.read()
        _clear_up(Path(sys.argv[1]))
        sys.exit()
    if reason := missing():
        sys.exit(f"error: {reason}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), Cluster() as cluster:
        print(f"export SLURM_CONF={cluster.conf}", flush=True)
        signal.pause()
