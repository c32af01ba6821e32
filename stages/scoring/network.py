"""No socket leaves this machine: what is tried is refused, and noted, as libraries may go on without an answer."""

import ipaddress
import sys
from typing import Any

refused: list[str] = []
"""Addresses that were asked for, by this process."""
is_allowed = False
"""Whether all is let through, for what was named and is fetched."""


def refuse() -> None:
    """Refuse, until this process ends, each address and each name that is not of this machine."""
    sys.addaudithook(_check)


def _check(event: str, args: tuple[Any, ...]) -> None:
    if is_allowed:
        return
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        host = args[1][0] if isinstance(args[1], tuple) else None  # a path is of this machine
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = args[0]
    else:
        return
    name = host.decode() if isinstance(host, bytes) else str(host or "localhost")
    if not _is_here(name):
        refused.append(name)
        raise ConnectionRefusedError(f"score opens no connection to other machines, such as {name}")


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
