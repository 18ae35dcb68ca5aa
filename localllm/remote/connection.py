"""One HTTP request to a server: sent, read line by line, and ended by any thread at any moment.

Uses http.client, because cancelling must end a read in which another thread waits, and that takes the socket itself.
Redirects are not followed, so that a key is sent only to the host that it is for.
"""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from localllm.errors import LocalLLMError, reason

# Only connecting has a time limit: a server may read a long prompt for minutes before it answers.
CONNECT_S = 10.0
LONGEST_LINE = 2**24
LONGEST_REFUSAL = 2**14

DEFAULT_PATH = "/v1"


class RemoteError(LocalLLMError):
    """A server cannot be reached, refuses, or breaks off. The message has its address and its own words.

    status is the HTTP status that it refused with, None for everything else.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's address, and the key that it asks for. path comes before every route, such as /v1."""

    secure: bool
    host: str
    port: int
    path: str
    key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(
        cls, address: str, key: str | None = None, path: str = DEFAULT_PATH, port: int | None = None
    ) -> "Endpoint":
        """Read host:port or a URL. path and port are for an address without; port None is 80 or 443.

        Raises RemoteError.
        """
        parts = urlsplit(address if "://" in address else f"http://{address}")
        try:
            named = parts.port
        except ValueError:
            named = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or named == 0 or parts.query:
            raise RemoteError(f"{address!r} is not the address of a server: give http://host:port.")
        if parts.username or parts.password:
            raise RemoteError("Others can see a password in an address: set LOCALLLM_REMOTE_KEY instead.")
        secure = parts.scheme == "https"
        usual = 443 if secure else port or 80
        return cls(secure, parts.hostname, named or usual, parts.path.rstrip("/") or path, key)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}{self.path}"


class Call:
    """A request and its answer. One thread reads, any may cancel; read it once, to the end."""

    def __init__(
        self, endpoint: Endpoint, method: str, route: str, body: object = None, patience_s: float | None = None
    ) -> None:
        """route: below the endpoint's path. body: sent as JSON. patience_s: the longest silence, None is for ever."""
        self._endpoint = endpoint
        self._method = method
        self._route = route
        self._content = None if body is None else json.dumps(body).encode()
        self._patience_s = patience_s
        self._lock = threading.Lock()  # guards _wire and _cancelled, so that neither thread misses the other
        self._wire: socket.socket | None = None
        self._cancelled = False
        self._held = contextlib.ExitStack()  # connection and response, until they are read or have failed
        self._response: http.client.HTTPResponse | None = None

    @property
    def cancelled(self) -> bool:
        """Whether somebody asked to stop."""
        return self._cancelled

    def cancel(self) -> None:
        """End the connection, which ends the request at the server, and whatever waits here."""
        with self._lock:
            self._cancelled = True
            if self._wire is not None:
                with contextlib.suppress(OSError):  # it has ended by itself
                    self._wire.shutdown(socket.SHUT_RDWR)

    def open(self) -> None:
        """Send, and wait until the server has accepted. Raises RemoteError, with its status where it refuses."""
        endpoint = self._endpoint
        kind = http.client.HTTPSConnection if endpoint.secure else http.client.HTTPConnection
        with contextlib.ExitStack() as held, self._broken():
            connection = held.enter_context(
                contextlib.closing(kind(endpoint.host, endpoint.port, timeout=self._patience_s or CONNECT_S))
            )
            self._response = held.enter_context(contextlib.closing(self._send(connection)))
            self._held = held.pop_all()

    def close(self) -> None:
        """Give back what is held; on the thread that reads. Idempotent."""
        self._held.close()

    def json(self) -> dict[str, Any]:
        """Send, and return the whole answer. Raises RemoteError."""
        text = b"".join(self.lines())
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise RemoteError(f"{self._endpoint}{self._route} does not answer JSON. Is it a model server?") from error
        if not isinstance(answer, dict):
            raise RemoteError(f"{self._endpoint}{self._route} answers what is not an object: {text[:80]!r}.")
        return answer

    def lines(self) -> Iterator[bytes]:
        """Send, if that is still to be done, and yield the answer's lines as they come. Raises as open does."""
        if self._response is None:
            self.open()
        assert self._response is not None
        with self._held, self._broken():
            while line := self._response.readline(LONGEST_LINE):
                if len(line) == LONGEST_LINE:
                    raise RemoteError(f"{self._endpoint} sends a line longer than {LONGEST_LINE // 2**20} MiB.")
                yield line

    @contextlib.contextmanager
    def _broken(self) -> Iterator[None]:
        """Raise what breaks the connection as a RemoteError."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise RemoteError(f"The connection to {self._endpoint} broke: {reason(error)}.") from error

    def _send(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        """Send the request and read the answer's head."""
        endpoint = self._endpoint
        try:
            connection.connect()
        except OSError as error:
            raise RemoteError(f"{endpoint} cannot be reached: {reason(error)}. Is the server running?") from error
        with self._lock:
            if self._cancelled:
                raise RemoteError("cancelled")
            self._wire = connection.sock
            self._wire.settimeout(self._patience_s)
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if endpoint.key:
            headers["Authorization"] = f"Bearer {endpoint.key}"
        connection.request(self._method, f"{endpoint.path}{self._route}", self._content, headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            with contextlib.closing(response):
                text = response.read(LONGEST_REFUSAL).decode(errors="replace")
            words = refusal(text) or response.reason
            raise RemoteError(f"{endpoint} refuses: {words}.{_advice(response.status, endpoint)}", response.status)
        return response


def refusal(text: str) -> str:
    """The reason in the body of a refusal, in any of the shapes that servers give it."""
    try:
        content = json.loads(text)
    except ValueError:
        return text[:200].strip()
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and content.get(key):
            content = content[key]
    return str(content).rstrip(".")


def _advice(status: int, endpoint: Endpoint) -> str:
    if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
        return " Set the server's key: LOCALLLM_REMOTE_KEY, or remote_key_file."
    if status == http.client.NOT_FOUND:
        address = ", and the address: most servers need /v1 at its end" if endpoint.path else ""
        return f" Check the model's name{address}."
    if status == http.client.SERVICE_UNAVAILABLE:
        return " It is busy or still loads its model: try again later."
    return ""
