"""HTTP for pulls. Redirects are followed here, one by one, so that a token is sent to its own host only."""

import email.utils
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

import httpx2

from localllm.errors import reason
from localllm.library.errors import LibraryError, PullError

MAX_REDIRECTS = 5
MAX_FAILURES = 6  # in a row, without a byte between them
LONGEST_WAIT_S = 60.0
MAX_DIGITS = 19  # of a number in a header
STALL_S = 30.0  # a connection that is silent for this long is dropped

ResultT = TypeVar("ResultT")

_ELSEWHERE = "Try again later, or from another host."
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Remote:
    """An address, and a token for its host only. etag: serve ranges of this version only."""

    url: str
    token: str | None = None
    etag: str = ""


class PassingError(Exception):
    """A transient failure: the next attempt may succeed.

    wait_s: how long the server asks clients to wait, if it says. unreachable: there was no connection at all.
    """

    def __init__(self, message: str, wait_s: float | None = None, unreachable: bool = False) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        self.unreachable = unreachable


def new_client() -> httpx2.Client:
    """A client for all requests of one pull; thread-safe. Raises LibraryError if the environment's proxy is invalid."""
    try:
        return httpx2.Client(
            timeout=httpx2.Timeout(STALL_S, connect=15.0, pool=None),
            follow_redirects=False,
            # Ranges count bytes as stored, so the content must not be compressed.
            headers={"User-Agent": f"localllm/{version('localllm')}", "Accept-Encoding": "identity"},
        )
    except (httpx2.InvalidURL, ValueError, ImportError) as error:  # ImportError: SOCKS without the package socksio
        raise LibraryError(
            f"The proxy that the environment names cannot be used: {str(error).rstrip('.')}. "
            "Correct or unset HTTPS_PROXY, HTTP_PROXY and ALL_PROXY."
        ) from error


@contextmanager
def get(client: httpx2.Client, remote: Remote, headers: Mapping[str, str]) -> Iterator[httpx2.Response]:
    """Open a response, following redirects. Its status may be any other; its body has not been read.

    Raises PassingError for network failures, and PullError for redirects that are endless or lead from https to http.
    """
    try:
        url = httpx2.URL(remote.url)
        home = _origin(url)
        for _ in range(MAX_REDIRECTS + 1):
            sent = dict(headers)
            if remote.token and _origin(url) == home:
                sent["Authorization"] = f"Bearer {remote.token}"
            with client.stream("GET", url, headers=sent) as response:
                if not response.has_redirect_location:
                    yield response
                    return
                url = _redirected(url, response.headers["location"])
    except httpx2.TransportError as error:
        if isinstance(error, httpx2.ConnectError):
            raise PassingError(f"{url.host} cannot be reached: {reason(error)}", unreachable=True) from error
        raise PassingError(f"{url.host}: {reason(error)}") from error
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
        raise PullError(f"{remote.url}: is not an address that can be opened: {error}.") from error
    raise PullError(f"{remote.url}: redirects more than {MAX_REDIRECTS} times.")


def landed(remote: Remote, response: httpx2.Response) -> Remote:
    """The target of a remote's redirects, with its token only if that is the same host."""
    same = _origin(response.url) == _origin(httpx2.URL(remote.url))
    return Remote(str(response.url), remote.token if same else None, remote.etag)


def check_status(response: httpx2.Response, what: str) -> None:
    """Raise PassingError or PullError unless the request succeeded (200 or 206)."""
    status, host = response.status_code, response.url.host
    if status in (200, 206):
        return
    if status in PASSING:
        raise PassingError(f"{host} answers {status} {response.reason_phrase}", _retry_after(response))
    reasons = {
        401: f"{host} requires a token for {what} or lacks it. Check the name; set HF_TOKEN, or `hf auth login`.",
        403: f"{host} forbids {what}. Accept the model's terms on its page, and set HF_TOKEN.",
        404: f"{host} does not have {what}. Check the name.",
        410: f"{host} no longer has {what}.",
    }
    raise PullError(reasons.get(status, f"{host} answers {status} {response.reason_phrase} for {what}."))


def length_of(response: httpx2.Response) -> int | None:
    """Bytes of the whole file of which a response has a range or everything; None if it does not say."""
    if response.status_code == 200:
        return decimal(response.headers.get("content-length", ""))
    return decimal(response.headers.get("content-range", "").rpartition("/")[2])


def check_range(response: httpx2.Response, span: tuple[int, int], size: int, what: str) -> bool:
    """Return whether a response has bytes span[0]..span[1]-1 of a file of `size` bytes; False if it has all of them.

    Raises PullError for other bytes and for a file of another length.
    """
    host, content_range = response.url.host, response.headers.get("content-range", "")
    wanted = f"bytes {span[0]}-{span[1] - 1}"
    if (length := length_of(response)) not in (None, size):
        raise PullError(f"{host} has {length} bytes of {what}, but its listing says {size}. {_ELSEWHERE}")
    if response.status_code != 200 and content_range != f"{wanted}/{size}":
        raise PullError(f"{host} sends {content_range[:60]!r} of {what} for {wanted}. {_ELSEWHERE}")
    return response.status_code != 200


def get_small(client: httpx2.Client, remote: Remote, headers: Mapping[str, str], what: str, limit: int) -> bytes:
    """A body of at most `limit` bytes, retried after transient failures. what: for messages. Raises PullError."""

    def attempt() -> bytes:
        with get(client, remote, headers) as response:
            check_status(response, what)
            data = bytearray()
            for piece in response.iter_raw():
                data += piece
                if len(data) > limit:
                    raise PullError(f"{remote.url}: sends more than {limit} bytes for {what}.")
            return bytes(data)

    return persistently(attempt, time.sleep)


def persistently(attempt: Callable[[], ResultT], wait: Callable[[float], object]) -> ResultT:
    """Call until it succeeds, waiting longer after each PassingError. Raises PullError after MAX_FAILURES of them.

    A host that cannot be reached is given up after the second: there is probably no network.
    """
    for failures in range(1, MAX_FAILURES + 1):
        try:
            return attempt()
        except PassingError as error:
            if failures == (2 if error.unreachable else MAX_FAILURES):
                raise PullError(f"{error}. Tried {failures} times; pull again later.") from error
            wait(backoff(failures, error))
    raise AssertionError  # the loop returns or raises


def backoff(failures: int, error: PassingError) -> float:
    """Seconds to wait after `failures` failures in a row: what the server requests, else doubling, with jitter."""
    if error.wait_s is not None:
        return min(error.wait_s, LONGEST_WAIT_S)
    return float(min(0.25 * 2**failures, LONGEST_WAIT_S)) * random.uniform(0.5, 1.0)


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    default = {"http": 80, "https": 443}.get(url.scheme)
    return url.scheme, url.host.lower(), url.port or default


def _redirected(url: httpx2.URL, location: str) -> httpx2.URL:
    target = url.join(location)
    if target.scheme not in ("http", "https") or (url.scheme == "https" and target.scheme == "http"):
        raise PullError(f"{url.host} redirects to {target.scheme}://{target.host}, which is not safe.")
    return target


def _retry_after(response: httpx2.Response) -> float | None:
    """Seconds of a Retry-After header, which gives seconds or a date (RFC 9110, 10.2.3)."""
    text = response.headers.get("retry-after", "")
    if (seconds := decimal(text)) is not None:
        return float(seconds)
    try:
        date = email.utils.parsedate_to_datetime(text)
        return max(0.0, date.timestamp() - time.time())
    except (ValueError, TypeError, OverflowError, OSError):  # neither a number nor a date of this calendar
        return None


def decimal(text: str) -> int | None:
    """A number of a header, in ASCII digits and at most 19 of them; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else None
