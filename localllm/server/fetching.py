"""Fetches pictures that requests name by http(s) URLs, from public addresses only, bounded in size and time.

A client must not reach through the server what it cannot reach itself: other services of this machine and of its
network. So a host is resolved once, all of its addresses must be public, and the connection goes to one of those, also
after each redirect.
"""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from urllib.parse import SplitResult, urljoin, urlsplit

from gguf_io.pictures import MAX_BYTES
from localllm.server.errors import ApiError

SECONDS = 10.0  # for a picture, from the first connection to its last byte
MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_UNICAST = ipaddress.ip_network("2000::/3")  # all other public addresses; older Pythons call more of them global

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def resolved(host: str, port: int) -> list[str]:
    """The addresses of a host. Raises OSError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet; one that contains another only if both do."""
    ip: Address = ipaddress.ip_address(address)
    inner: Sequence[Address | None] = ()
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())
        if ip in _NAT64:
            inner = (*inner, ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        elif ip.ipv4_mapped is None and ip not in _UNICAST:
            return False
    return all(one is None or (one.is_global and not one.is_multicast) for one in (ip, *inner))


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Fetches files. resolve: the addresses of a host and a port. connect: a connection to one of them."""

    resolve: Callable[[str, int], Sequence[str]] = resolved
    connect: Callable[[tuple[str, int], float], socket.socket] = socket.create_connection

    def fetch(self, url: str) -> bytes:
        """The content at a URL. Raises ApiError 400, whose message names the URL's host and no address."""
        with _deadline() as kept:
            for _ in range(MOST_REDIRECTS + 1):
                parts = _checked(url)
                host = str(parts.hostname)
                try:
                    answer = self._get(parts, kept)
                    if isinstance(answer, bytes):
                        return answer
                except (OSError, http.client.HTTPException, UnicodeError) as error:
                    why = "it took too long" if kept.is_over else "the connection failed"
                    raise _refused(host, why) from error
                try:
                    url = urljoin(url, answer)
                except ValueError as error:
                    raise _refused(host, "it redirects to an invalid URL") from error
        raise _refused(host, f"there are more than {MOST_REDIRECTS} redirects")

    def _get(self, parts: SplitResult, kept: "_Deadline") -> bytes | str:
        """The content, or where a redirect leads. Raises ApiError, and what connecting and reading raise."""
        host = str(parts.hostname)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        addresses = self.resolve(host, port)
        if not addresses or not all(map(is_public, addresses)):
            raise _refused(host, "it has no public address")
        connection = http.client.HTTPConnection(host, port)
        connection.sock = kept.keep(self.connect((addresses[0], port), SECONDS))
        if parts.scheme == "https":
            secure = ssl.create_default_context().wrap_socket(
                connection.sock, server_hostname=host, do_handshake_on_connect=False
            )
            connection.sock = kept.keep(secure)
            secure.do_handshake()
        headers = {"User-Agent": f"localllm/{version('localllm')}", "Accept": "image/*", "Connection": "close"}
        connection.request("GET", f"{parts.path or '/'}{'?' * bool(parts.query)}{parts.query}", headers=headers)
        with connection.getresponse() as answer:
            if answer.status in _REDIRECTS and (place := answer.getheader("Location")):
                return place
            if answer.status != http.client.OK:
                raise _refused(host, f"it answered with status {answer.status}")
            data = answer.read(MAX_BYTES + 1)
            left = answer.length
        if len(data) > MAX_BYTES:
            raise _refused(host, f"it has more than {MAX_BYTES:,} bytes")
        if kept.is_over or left:  # the rest of what was announced did not come
            raise _refused(host, "it took too long" if kept.is_over else "it was cut off")
        return data


class _Deadline:
    """Ends connections at a time, however slowly their bytes come."""

    def __init__(self) -> None:
        self.is_over = False
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()

    def keep(self, connection: socket.socket) -> socket.socket:
        with self._lock:
            self._open.append(connection)
        if self.is_over:
            self.end()
        return connection

    def expire(self) -> None:
        self.is_over = True
        self.end()

    def end(self) -> None:
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):  # it was closed by the other side, or replaced by TLS
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            for connection in self._open:
                connection.close()


@contextlib.contextmanager
def _deadline() -> Iterator[_Deadline]:
    kept = _Deadline()
    timer = threading.Timer(SECONDS, kept.expire)
    timer.daemon = True
    timer.start()
    try:
        yield kept
    finally:
        timer.cancel()
        kept.close()


def _checked(url: str) -> SplitResult:
    """A URL's parts. Raises ApiError 400 if it is none of http(s) with a host and nothing secret."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ApiError(400, "an image's URL is not valid") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ApiError(400, "an image's URL must be http or https, with a host and without a user's name")
    if not url.isascii() or any(not " " < letter < "\x7f" for letter in url):
        raise ApiError(400, "an image's URL must be ASCII without white space; write %20 for a space")
    return parts


def _refused(host: str, why: str) -> ApiError:
    return ApiError(400, f"the image at {host[:200]} cannot be fetched: {why}; send the image itself as a data: URL")


FETCHER = Fetcher()
