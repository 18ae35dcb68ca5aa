"""From options to a listening server."""

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from localllm.errors import RequestError
from localllm.server.app import create_app
from localllm.server.catalog import Catalog
from localllm.server.front.catalog import ForeignCatalog
from localllm.server.limits import IDLE_SECONDS
from localllm.server.loading import MemoryLoader
from localllm.server.options import ServerOptions
from localllm.server.protocol import GuardedProtocol
from localllm.settings import Settings

BACKLOG = 2048
_HINTS = {
    errno.EADDRINUSE: "Stop the program that uses the port (Ollama, say), or choose another with --port.",
    errno.EACCES: "Choose another port with --port: low ones are the administrator's.",
}


class Server(uvicorn.Server):
    """uvicorn's server, which ends loads as soon as it is to stop: before it waits for what is under way."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop."""
        self._app.state.service.manager.stop_loading()
        await super().shutdown(sockets)


def serve(
    settings: Settings, options: ServerOptions, catalog: Catalog | ForeignCatalog, ready: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM: then refuse what is new, end loads, let requests end within the grace
    time, cancel the rest.

    ready is told the address before the first request is taken. Raises RequestError where the address cannot be had.
    """
    _allow_many_connections()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every client that leaves while it is written to
    with listen(options) as listener:
        host, port = listener.getsockname()[:2]
        app = create_app(options, catalog, MemoryLoader(settings, options))
        config = uvicorn.Config(
            app,
            http=GuardedProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=round(options.grace_s),
        )
        server = Server(config, app)
        ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        # uvicorn raises the signal again once everything is closed; for a user who pressed Ctrl-C that is the end.
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def listen(options: ServerOptions) -> socket.socket:
    """Bind the address. Raises RequestError saying why it cannot be had."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "Give an address of this machine with --host.")
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror  # no name: its own words
        raise RequestError(f"Cannot listen on {options.host} port {options.port}: {why}. {hint}") from error


def is_local(host: str) -> bool:
    """Whether only this machine can connect to the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _allow_many_connections() -> None:
    """Raise the number of open files to what the system grants: each connection is one."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard > 0 else 65536, hard))
