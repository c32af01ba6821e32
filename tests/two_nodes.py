"""Runs a command on the first of two nodes, n1 and n2, which are network namespaces with a cable between them.

    unshare -rnum python tests/two_nodes.py HOSTS COMMAND...

HOSTS is what both have as /etc/hosts. There is no nameserver. tests/fake_slurm/srun starts tasks on both nodes.
"""

import os
import subprocess
import sys
from pathlib import Path

ADDRESSES = ("10.9.0.3", "10.9.0.2")
"""That of the first node is not the smaller one."""

CAN_UNSHARE = subprocess.run(["unshare", "-rnum", "true"], capture_output=True, check=False).returncode == 0
"""Whether this machine allows such namespaces."""

ON_TWO_NODES = ("unshare", "-rnum", "--kill-child", "python", __file__)
"""What comes before HOSTS and the command."""

ALLOCATION = {
    "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "0",
    "PATH": f"{Path(sys.executable).parent}:{Path(__file__).parent / 'fake_slurm'}:{os.environ['PATH']}",
}  # fmt: skip
"""The environment in an allocation of two nodes, whose ranks tests/fake_slurm/srun starts."""


def main() -> None:
    hosts, *command = sys.argv[1:]
    run("mount", "--bind", hosts, "/etc/hosts")
    nodes = []
    for name in ("n1", "n2"):
        started = subprocess.Popen(("unshare", "-nu", "sh", "-c", f"hostname {name}; echo; cat"), stdin=-1, stdout=-1)
        assert started.stdout is not None
        started.stdout.readline()  # it has its namespaces
        nodes.append(started)
    run("ip", "link", "add", "cable1", "type", "veth", "peer", "name", "cable2")
    for number, (node, address) in enumerate(zip(nodes, ADDRESSES, strict=True), start=1):
        run("ip", "link", "set", f"cable{number}", "netns", str(node.pid))
        for arguments in ("link set lo up", f"addr add {address}/24 dev cable{number}", f"link set cable{number} up"):
            run(*on_node(node.pid), "ip", *arguments.split())
    fake = {"FAKE_NODES": " ".join(str(node.pid) for node in nodes), "FAKE_LAUNCH_ADDRESS": ADDRESSES[0]}
    command = ["setpriv", "--pdeathsig", "KILL", *on_node(nodes[0].pid), *command]  # none is left where a test fails
    sys.exit(subprocess.run(command, env={**os.environ, **fake}, check=False).returncode)


def on_node(pid: int) -> tuple[str, ...]:
    return ("nsenter", "-t", str(pid), "-n", "-u")


def run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
