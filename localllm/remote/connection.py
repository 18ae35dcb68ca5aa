"""HTTP requests whose responses are read line by line, and which any thread may cancel at any time.

Uses http.client, because cancelling must interrupt another thread's blocking read, which requires access to the socket.
Does not follow redirects, so that a key is only sent to its own host.
"""

import contextlib
import http.client
import ipaddress
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from localllm.bounded_json import parsed
from localllm.errors import LocalLLMError, reason

CONNECT_S = 10.0  # only connecting has a timeout: prefill of a long prompt may take minutes
LONGEST_LINE = 2**24
LONGEST_JSON = 2**28
LONGEST_REFUSAL = 2**14

DEFAULT_PATH = "/v1"

# How servers word that a prompt is too long: OpenAI's and vLLM's, vLLM's for what it need not tokenise, Anthropic's.
_TOO_LONG = (
    re.compile(
        r"maximum context length is (?P<most>\d{1,12}) tokens.{0,80}?"
        r"(?:resulted in|requested|contains)(?: at least)? (?P<tokens>\d{1,12})(?! characters)\b",
        re.S,
    ),
    re.compile(r"maximum context length is (?P<most>\d{1,12}) tokens.{0,80}? contains \d{1,12} characters", re.S),
    re.compile(r"prompt is too long: (?P<tokens>\d{1,12}) tokens > (?P<most>\d{1,12})"),
)


class RemoteError(LocalLLMError):
    """A server cannot be reached, refuses a request, or fails. The message has its address and error message.

    status: the HTTP status of a refusal, else None. too_long: a prompt's tokens and the most that fit, if the server
    refuses it for that.
    """

    def __init__(self, message: str, status: int | None = None, too_long: tuple[int, int] | None = None) -> None:
        self.status = status
        self.too_long = too_long
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's address and API key. path: the prefix of every route, such as /v1."""

    secure: bool
    host: str
    port: int
    path: str
    key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(
        cls, address: str, key: str | None = None, path: str = DEFAULT_PATH, port: int | None = None
    ) -> "Endpoint":
        """Parse host:port or a URL. path and port: defaults for an address without them; port None is 80 or 443.

        Raises RemoteError.
        """
        invalid = RemoteError(f"{address!r} is not a server's address; write http://host:port.")
        try:
            parts = split_address(address)
            named = parts.port
            (parts.hostname or "").encode("idna")  # as connecting does it
        except ValueError as error:
            raise invalid from error
        host = parts.hostname or ("127.0.0.1" if named else "")  # :PORT is one of this machine
        if parts.scheme not in ("", "http", "https") or not host or named == 0 or parts.query:
            raise invalid
        if parts.username or parts.password:
            raise RemoteError("An address must not contain a password; set LOCALLLM_REMOTE_KEY instead.")
        secure = parts.scheme == "https"
        usual = 443 if secure else port or 80
        return cls(secure, reachable(host), named or usual, parts.path.rstrip("/") or path, key)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}{self.path}"


def split_address(text: str) -> SplitResult:
    """The parts of an address in the forms that Ollama takes; scheme "" if there is none.

    HOST, HOST:PORT, :PORT, a URL, IPv6 with or without brackets, in quotation marks. Raises ValueError.
    """
    scheme, separator, rest = text.strip(" \t\r\n\"'").rpartition("://")
    host, slash, path = rest.partition("/")
    with contextlib.suppress(ValueError):
        host = f"[{ipaddress.IPv6Address(host)}]"
    parts = urlsplit(f"{scheme}{separator or '//'}{host}{slash}{path}")
    _ = parts.port  # raises ValueError
    return parts


def reachable(host: str) -> str:
    """The host to connect to for one that a server may listen at: this machine for all addresses."""
    host = host.strip("[]")
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def is_local(host: str) -> bool:
    """Whether only this machine can connect to the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class RemoteCall:
    """A request and its response. One thread reads it, once; any thread may cancel it."""

    def __init__(
        self, endpoint: Endpoint, method: str, route: str, body: object = None, patience_s: float | None = None
    ) -> None:
        """route: below the endpoint's path. body: sent as JSON. patience_s: the socket timeout; None: no limit."""
        self._endpoint = endpoint
        self._method = method
        self._route = route
        self._content = None if body is None else json.dumps(body).encode()
        self._patience_s = patience_s
        self._lock = threading.Lock()  # guards _wire and _cancelled, so that a cancel while connecting is not lost
        self._wire: socket.socket | None = None
        self._cancelled = False
        self._held = contextlib.ExitStack()  # connection and response
        self._response: http.client.HTTPResponse | None = None

    def cancel(self) -> None:
        """Shut down the connection, which ends the request on the server and any blocking read here."""
        with self._lock:
            self._cancelled = True
            if self._wire is not None:
                with contextlib.suppress(OSError):  # already closed
                    self._wire.shutdown(socket.SHUT_RDWR)

    def open(self) -> None:
        """Send the request, and wait for the response's head. Raises RemoteError, with the status of a refusal."""
        endpoint = self._endpoint
        kind = http.client.HTTPSConnection if endpoint.secure else http.client.HTTPConnection
        with contextlib.ExitStack() as held, self._broken():
            connection = held.enter_context(
                contextlib.closing(kind(endpoint.host, endpoint.port, timeout=self._patience_s or CONNECT_S))
            )
            self._response = held.enter_context(contextlib.closing(self._send(connection)))
            self._held = held.pop_all()

    def close(self) -> None:
        """Close connection and response. Call it on the reading thread. Idempotent."""
        self._held.close()

    def json(self) -> dict[str, Any]:
        """Send the request and parse the response as a JSON object. Raises RemoteError."""
        text = bytearray()
        for line in self.lines():
            text += line
            if len(text) > LONGEST_JSON:
                self.close()
                raise RemoteError(f"{self._endpoint}{self._route} sends more than {LONGEST_JSON // 2**20} MiB.")
        try:
            answer = parsed(text)
        except ValueError as error:
            raise RemoteError(f"{self._endpoint}{self._route} does not send JSON. Is it a model server?") from error
        if not isinstance(answer, dict):
            raise RemoteError(f"{self._endpoint}{self._route} does not send a JSON object: {bytes(text[:80])!r}.")
        return answer

    def lines(self) -> Iterator[bytes]:
        """Send the request if not sent yet, and yield the response's lines as they arrive. Raises RemoteError."""
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
        """Convert connection errors to RemoteError."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise RemoteError(f"The connection to {self._endpoint} failed: {reason(error)}.") from error

    def _send(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        """Send the request and read the response's head."""
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
            if endpoint.path and response.status == http.client.NOT_FOUND and words == response.reason:
                # vLLM has routes only for what its model is for.
                words = f"it has no {endpoint.path}{self._route}, so its model is not for that, or the address is wrong"
                raise RemoteError(f"{endpoint} refuses: {words}: most servers need /v1 at its end.", 501)
            advice = _advice(response.status, endpoint)
            raise RemoteError(f"{endpoint} refuses: {words}.{advice}", response.status, _too_long(text))
        return response


def refusal(text: str) -> str:
    """The error message in a refusal's body, in the formats of various servers."""
    try:
        content = parsed(text)
    except ValueError:
        return text[:200].strip()
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and content.get(key):
            content = content[key]
    return str(content).rstrip(".")


def _too_long(text: str) -> tuple[int, int] | None:
    """The tokens of a prompt that a refusal's body calls too long, and the most that fit: llama.cpp's fields, or words.

    One more than fit, if it does not tell how many. None if it says nothing of the kind.
    """
    fields = [re.search(rf'"{name}"\s*:\s*(\d{{1,12}})', text) for name in ("n_prompt_tokens", "n_ctx")]
    if fields[0] and fields[1]:
        return int(fields[0][1]), int(fields[1][1])
    for pattern in _TOO_LONG:
        if found := pattern.search(text):
            most = int(found["most"])
            return int(found.groupdict().get("tokens", most + 1)), most
    return None


def _advice(status: int, endpoint: Endpoint) -> str:
    if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
        return " Set the server's key: LOCALLLM_REMOTE_KEY, or remote_key_file."
    if status == http.client.NOT_FOUND:
        address = ", and the address: most servers need /v1 at its end" if endpoint.path else ""
        return f" Check the model's name{address}."
    if status == http.client.SERVICE_UNAVAILABLE:
        return " It is busy or still loads its model: try again later."
    return ""
