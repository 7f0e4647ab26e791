"""Ports for ranks to meet at."""

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DRAWS = random.SystemRandom()  # tests seed the other one, each of them alike


def free_port() -> int:
    """Return a port of this machine on which no program listens.

    It is below those that the system gives away by itself. One of those could go to any
    connection of another test between this call and the ranks that are to listen there.
    """
    below = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32768
    while True:
        port = _DRAWS.randrange(10_000, below)
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
