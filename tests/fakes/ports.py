"""Ports for servers that cannot be told to take any."""

import os
import socket

# Below those that systems give to whoever asks for any port, so that nobody gets one between its choice and its use.
FIRST, LAST = 20_000, 32_000


def free_port() -> int:
    """A port of this machine on which nobody listens; processes that look at the same time begin at others."""
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
