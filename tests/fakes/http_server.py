"""Loopback HTTP servers for tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer, ThreadingHTTPServer


class Quiet:
    """A base of handlers that log nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


class ForgivingServer(ThreadingHTTPServer):
    """Ignores errors of connections, which tests break on purpose."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def serving(server: HTTPServer) -> Iterator[str]:
    """Serve until the block ends. Yields host and port."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
