"""Runs the server: binds the address, limits slow clients in uvicorn, and shuts down gracefully."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gguf_io.system import raise_file_limit
from localllm.errors import RequestError
from localllm.server.app import create_app
from localllm.server.limits import (
    HEADER_SECONDS,
    IDLE_SECONDS,
    MAX_HEADER_BYTES,
    MAX_PROBE_SECONDS,
    PROBE_SECONDS,
    STALLED_SECONDS,
)
from localllm.server.options import ServerOptions
from localllm.server.refusals import log_refusal
from localllm.server.served import ServedModels

BACKLOG = 2048
_HINTS = {
    errno.EADDRINUSE: "Stop the program that uses the port (perhaps Ollama), or choose another with --port.",
    errno.EACCES: "Choose another port with --port: low ports need administrator rights.",
}


class Connection(h11.Connection):
    """Writes the chunks of a streamed response by itself: h11's checks take longer, and its state stays the same."""

    _is_chunked = False

    def send(self, event: Any) -> Any:
        if self._is_chunked and type(event) is h11.Data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        sent = super().send(event)
        if type(event) is h11.Response:
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with time limits for sending a request's headers and for reading the response."""

    def __init__(self, *configured: Any, **others: Any) -> None:
        super().__init__(*configured, **others)
        self.conn = Connection(h11.SERVER, MAX_HEADER_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first request's headers."""
        super().connection_made(transport)
        self._clocks: dict[str, asyncio.TimerHandle] = {}
        self._start("headers", HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks."""
        self._stop("headers")
        self._stop("writing")
        self._stop("probe")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse a part of a request. Its headers must be complete within HEADER_SECONDS of their first byte."""
        super().data_received(data)
        waiting = self.cycle is None or self.cycle.response_complete
        if not waiting:
            self._stop("headers")
        elif "headers" not in self._clocks:
            self._start("headers", HEADER_SECONDS)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Go on with a request whose client sends nothing more, since it may still read. Only writing tells."""
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        self._probe(PROBE_SECONDS)
        return True

    def _probe(self, seconds: float) -> None:
        """Send an interim response (102) from time to time, which fails if the client has closed the connection.

        Its system answers the first one with a reset. A response that has begun is written anyway.
        """
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
            return
        if not self.cycle.response_started and self.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        if not self.transport.is_closing():
            longer = min(2 * seconds, MAX_PROBE_SECONDS)
            self._clocks["probe"] = self.loop.call_later(seconds, self._probe, longer)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, and log it like other refusals."""
        log_refusal(400, msg)
        super().send_400_response(msg)

    def pause_writing(self) -> None:
        """Start the clock of a slow client."""
        super().pause_writing()
        self._start("writing", STALLED_SECONDS)

    def resume_writing(self) -> None:
        """Stop the clock: the client has caught up."""
        super().resume_writing()
        self._stop("writing")

    def _start(self, clock: str, seconds: float) -> None:
        """Abort the connection unless the clock is stopped within this time."""
        transport: Any = self.transport
        self._clocks[clock] = self.loop.call_later(seconds, transport.abort)

    def _stop(self, clock: str) -> None:
        if timer := self._clocks.pop(clock, None):
            timer.cancel()


class UvicornServer(uvicorn.Server):
    """uvicorn's server. On shutdown it stops loads and chats, then waits for requests in progress."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop loads and chats, then the server."""
        app: Any = self.config.app
        app.state.service.models.stop_loading()
        app.state.chats.leave()
        await super().shutdown(sockets)


def serve(options: ServerOptions, models: Callable[[], ServedModels], ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM: then refuse connections, stop loads, and cancel requests after the grace time.

    models: called on the event loop. ready: called with the URL before the first request is accepted. Raises
    RequestError if the address cannot be bound.
    """
    raise_file_limit()  # each connection is a file
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns about every client that disconnects during a write
    with listen(options) as listener:
        host, port = listener.getsockname()[:2]
        config = uvicorn.Config(
            create_app(options, models),
            http=GuardedProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=options.settings.grace_s,
        )
        ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        # uvicorn raises the signal again after a clean shutdown; Ctrl-C is not an error here.
        with contextlib.suppress(KeyboardInterrupt):
            UvicornServer(config).run(sockets=[listener])


def listen(options: ServerOptions) -> socket.socket:
    """Bind the address. Connections send each chunk at once (TCP_NODELAY). Raises RequestError."""
    host, port = options.settings.host.strip("[]"), options.settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "Set --host to an address of this machine.")
        why, _, _ = str(error.strerror).partition(" (while ")  # Python adds the address
        raise RequestError(f"Cannot listen on {host} port {port}: {why.rstrip('.')}. {hint}") from error
    # Connections inherit it. asyncio sets it only on sockets that name their protocol, which create_server's do not.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
