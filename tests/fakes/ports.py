"""Ports for servers that cannot choose a free port themselves."""

import os
import socket

# Below the range from which systems assign free ports, so that no other process gets a port between its choice and its
# use.
FIRST, LAST = 20_000, 32_000


def free_port() -> int:
    """A port of this machine on which no program listens; concurrent processes start searching at different ports."""
    for step in range(LAST - FIRST):
        port = FIRST + (os.getpid() * 97 + step) % (LAST - FIRST)
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"there is no free port between {FIRST} and {LAST}")
