"""Runs a command and prints what it asks nameservers, and where it listens; in a network namespace of its own.

    unshare -rnu python tests/network.py COMMAND...

The only interface there is loopback, which answers for all addresses: so each query to a nameserver arrives here,
whichever one the machine uses. No name is found, and /etc/hosts does not have that of this machine.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

CAN_UNSHARE = subprocess.run(["unshare", "-rnu", "true"], capture_output=True, check=False).returncode == 0
"""Whether this machine allows network namespaces."""

IN_A_NAMESPACE = ("unshare", "-rnu", "python", __file__)
"""What comes before a command that is to be observed."""

_LISTENING = "0A"  # a state in /proc/net/tcp
_LOOPBACK = ("0100007F", "0" * 24 + "01000000")  # 127.0.0.1 and ::1, as it writes them


def main() -> None:
    socket.sethostname("without-address")
    for arguments in ("link set lo up", "route add local default dev lo"):
        subprocess.run(["ip", *arguments.split()], check=True)
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("0.0.0.0", 53))
    queries: list[str] = []
    threading.Thread(target=answer, args=(server, queries), daemon=True).start()
    with suppress(OSError):
        socket.gethostbyaddr("10.0.0.1")
    is_observed = bool(queries)  # else this machine does not ask a nameserver for names, or not through the network
    queries.clear()

    process = subprocess.Popen(sys.argv[1:])
    listening: set[str] = set()
    while process.poll() is None:
        listening |= listening_addresses()
        time.sleep(0.02)
    everywhere = sorted(listening - set(_LOOPBACK))
    observed = {"names": queries if is_observed else [], "is_listening": bool(listening), "everywhere": everywhere}
    print("observed", json.dumps(observed), flush=True)
    sys.exit(process.returncode)


def answer(server: socket.socket, queries: list[str]) -> None:
    """Note each query, and answer that there is no such name: without an answer, each would take seconds."""
    while True:
        query, client = server.recvfrom(512)
        labels = query[12:].partition(b"\0")[0]
        queries.append("".join(chr(byte) if 33 <= byte < 127 else "." for byte in labels))
        server.sendto(query[:2] + b"\x81\x83" + query[4:6] + bytes(6) + query[12:], client)


def listening_addresses() -> set[str]:
    found = set()
    for family in ("tcp", "tcp6"):
        with suppress(FileNotFoundError), open(f"/proc/net/{family}") as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == _LISTENING:
                    found.add(fields[1].partition(":")[0])
    return found


if __name__ == "__main__":
    main()
