"""Access checks and limits on bodies, before any route.

A page on the internet can reach this port through the user's browser; it is recognised by the Origin header. A page
that has rebound its own name to this machine (DNS rebinding) is recognised by the Host header, which scripts cannot
change.
"""

import asyncio
import contextlib
import ipaddress
import re
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.server.errors import RETRY_AFTER, ApiError, ErrorBody, Refusal
from localllm.server.keys import CLIENT, NAMESPACE, namespace_of, namespace_of_key
from localllm.server.limits import BODY_SECONDS, DISCARD_SECONDS, DISCARDED_BYTES, MAX_BODIES_BYTES, MAX_BODY_BYTES
from localllm.server.options import ServerOptions
from localllm.server.page import is_page
from localllm.server.refusals import REASON

# Routes that need no API key.
OPEN_PATHS = frozenset({"/health", "/v1/health"})
# Names that are not in the public DNS: RFC 6761, RFC 6762, and ICANN's for private use (host.docker.internal).
LOCAL_NAMES = (".localhost", ".local", ".internal")
# Programs of this machine: pages of its own servers, desktop programs, editors and browser extensions.
LOCAL_ORIGINS = (
    *(
        f"{scheme}://{host}{port}"
        for scheme in ("http", "https")
        for host in ("localhost", "127.0.0.1", "[[]::1]")
        for port in ("", ":*")
    ),
    *(f"{scheme}://*" for scheme in ("app", "tauri", "vscode-webview", "vscode-file")),
    *(f"{scheme}://*" for scheme in ("chrome-extension", "moz-extension", "safari-web-extension")),
)
# RFC 6454, section 6.1: a scheme, a host and a port. Patterns are matched only with these.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._~!$&'()*+,;=%-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_SLASHES = re.compile(r"//+")
UPLOADS = "/api/blobs/"

_TOO_LARGE = (413, f"the body is larger than {MAX_BODY_BYTES} bytes")
_CORS_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"


class Gate:
    """ASGI middleware that checks Host, Origin, API key and the body's size, in this order.

    error_body_at: the error format for a path.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, error_body_at: Callable[[str], ErrorBody]) -> None:
        self._app = app
        self._error_body_at = error_body_at
        self._keys = options.keys
        own = socket.gethostname()
        self._hosts = {host.lower() for host in (options.settings.host, *options.hosts, own, f"{own}.local")}
        self._origins = [origin.lower().rstrip("/").replace("[", "[[]") for origin in options.origins]
        self._room = _BodyRoom()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Clients join addresses that end with a slash and routes that begin with one; many lose the body in a redirect.
        scope["path"] = _SLASHES.sub("/", scope["path"]).rstrip("/") or "/"
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get(b"origin")
        with contextlib.ExitStack() as held:
            try:
                self._check_source(scope, headers.get(b"host", ""), origin)
                if origin:
                    send = _with_origin(send, origin)
                    if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                        await _preflight(headers)(scope, receive, send)
                        return
                self._check_key(scope, headers)
                CLIENT.set(namespace_of(scope) or (scope.get("client") or ("",))[0])
                if not scope["path"].startswith(UPLOADS):
                    take = held.enter_context(self._room.taken(CLIENT.get()))
                    receive = _replay(await _read_body(headers, receive, take), receive)
            except ApiError as error:
                await self._refuse(scope, receive, send, error)
                return
            await self._app(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
        scope[REASON] = str(error)
        body = self._error_body_at(scope["path"])(Refusal(error.status, str(error)))
        # The unread rest of a body must not be parsed as the next request.
        headers = {"Connection": "close"} | (RETRY_AFTER if error.status == 503 else {})
        await JSONResponse(body, error.status, headers=headers)(scope, receive, send)

    def _check_source(self, scope: Scope, host: str, origin: str | None) -> None:
        if not self._knows_host(host, scope):
            raise ApiError(403, "this Host is not allowed; allow it with --allow-hosts")
        if origin is not None and not self._knows_origin(origin, host):
            raise ApiError(403, "this Origin is not allowed; allow it with --origins")

    def _knows_host(self, header: str, scope: Scope) -> bool:
        """Whether Host is a private address, or a name that no stranger can own and therefore rebind."""
        if not header:
            return True  # HTTP/1.0 without it; browsers always send one
        host = _host_of(header)
        if host is None:
            return False
        if host in self._hosts or host == "localhost" or host.endswith(LOCAL_NAMES):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        server = scope.get("server") or ("", 0)
        return address.is_private or str(address) == server[0]

    def _knows_origin(self, origin: str, host: str) -> bool:
        """Whether the page comes from this server, belongs to a local program, or is allowed by the user."""
        origin = origin.lower().rstrip("/")
        if origin != "null" and not _ORIGIN.fullmatch(origin):
            return False
        if host and origin in (f"http://{host.lower()}", f"https://{host.lower()}"):
            return True
        return any(fnmatchcase(origin, pattern) for pattern in (*LOCAL_ORIGINS, *self._origins))

    def _check_key(self, scope: Scope, headers: dict[bytes, str]) -> None:
        """Write the user's cache namespace into the scope. Raises ApiError 401 without a valid key if one is needed."""
        path = scope["path"]
        if not self._keys or path in OPEN_PATHS or is_page(path, scope["method"], headers):
            return
        scheme, _, token = headers.get(b"authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get(b"x-api-key", "")
        namespace = namespace_of_key(given.encode("latin-1"), self._keys)
        if namespace is None:
            raise ApiError(401, "an API key is required: send it as Authorization: Bearer ...")
        scope[NAMESPACE] = namespace


class _BodyRoom:
    """Counts the bytes of bodies that are received or answered, by client. For the event loop."""

    def __init__(self) -> None:
        self._held = Counter[str]()

    @contextlib.contextmanager
    def taken(self, client: str) -> Iterator[Callable[[int], None]]:
        """Within the block, a function that takes bytes for a client.

        It raises ApiError 503 if the client would have more than remains free, as in Service.admit.
        """
        mine = 0

        def take(count: int) -> None:
            nonlocal mine
            if self._held[client] + count > MAX_BODIES_BYTES - self._held.total() - count:
                raise ApiError(503, "too many large requests are in progress; send this one again in a moment")
            mine += count
            self._held[client] += count

        try:
            yield take
        finally:
            self._held[client] -= mine
            self._held += Counter()  # drops clients that hold nothing


def _host_of(header: str) -> str | None:
    """The header's host in lower case, without its port; None if it is malformed."""
    try:
        parts = urlsplit(f"//{header}")
        host, _ = parts.hostname, parts.port
    except ValueError:
        return None
    return host if host and parts.netloc == header and "@" not in header else None


async def _discard(receive: Receive) -> None:
    """Read the rest of a refused body, within bounds.

    Closing at once would reset the connection before the client reads the response.
    """
    left = DISCARDED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while left > 0:
                message = await receive()
                left = left - len(message.get("body", b"")) if message.get("more_body") else 0


def _check_framing(headers: dict[bytes, str]) -> None:
    """Raise ApiError for a body that its headers already rule out."""
    if _encoding(headers) not in ("identity", "gzip"):
        raise ApiError(415, "Content-Encoding must be gzip, or missing: other compressed bodies are not accepted")
    if b"content-length" in headers and b"transfer-encoding" in headers:  # request smuggling: RFC 9112, section 6.1
        raise ApiError(400, "Content-Length and Transfer-Encoding exclude each other")
    length = headers.get(b"content-length", "0")
    if not (length.isascii() and length.isdigit() and len(length) <= 19 and int(length) <= MAX_BODY_BYTES):
        raise ApiError(*_TOO_LARGE)


def _encoding(headers: dict[bytes, str]) -> str:
    given = headers.get(b"content-encoding", "identity").strip().lower()
    return "gzip" if given == "x-gzip" else given  # RFC 9110, section 8.4.1.3


class _Gzip:
    """Unpacks a body that arrives in parts. Raises ApiError 400 for what is not one member of gzip's format."""

    def __init__(self) -> None:
        self._reader = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    def unpacked(self, part: bytes, most: int) -> bytes:
        """The bytes of the next part, at most so many."""
        try:
            found = self._reader.decompress(part, most)
        except zlib.error as error:
            raise ApiError(400, "the body is not compressed by gzip, as its Content-Encoding says") from error
        if self._reader.unused_data:
            raise ApiError(400, "the body has bytes after the end of its gzip data")
        return found

    def check_end(self) -> None:
        if not self._reader.eof:
            raise ApiError(400, "the body's gzip data ends early")


async def _read_body(headers: dict[bytes, str], receive: Receive, take: Callable[[int], None]) -> bytes:
    """The whole body, unpacked. Raises ApiError, after reading the rest, if it is too large, too slow or malformed.

    take: called with the bytes of each part; may raise ApiError.
    """
    body = bytearray()
    try:
        _check_framing(headers)
        gzip = _Gzip() if _encoding(headers) == "gzip" else None
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the body ended early")
                part = message.get("body", b"")
                if gzip:
                    part = gzip.unpacked(part, MAX_BODY_BYTES + 1 - len(body))
                take(len(part))
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(*_TOO_LARGE)
                if not message.get("more_body", False):
                    if gzip:
                        gzip.check_end()
                    return bytes(body)
    except TimeoutError:
        await _discard(receive)
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} seconds") from None
    except ApiError:
        await _discard(receive)
        raise


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replayed


def _preflight(headers: dict[bytes, str]) -> JSONResponse:
    answer = {"Access-Control-Allow-Methods": _CORS_METHODS, "Access-Control-Max-Age": "600"}
    wanted = headers.get(b"access-control-request-headers")
    if wanted:
        answer["Access-Control-Allow-Headers"] = wanted
    return JSONResponse(None, headers=answer)


def _with_origin(send: Send, origin: str) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            allow = (b"access-control-allow-origin", origin.encode("latin-1"))
            message["headers"] = [*message.get("headers", []), allow, (b"vary", b"Origin")]
        await send(message)

    return sent
