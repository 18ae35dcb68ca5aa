"""Downloads one file over HTTP: chunks in parallel, each resumed where it broke off, hashed while the rest arrives."""

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator

import httpx2

from localllm.library.errors import PullError
from localllm.library.partial import PartialFile
from localllm.library.web import (
    MAX_FAILURES,
    PassingError,
    Remote,
    backoff,
    check_range,
    check_status,
    get,
    landed,
    persistently,
)

log = logging.getLogger(__name__)

CONNECTIONS = 8
_EXPIRED = frozenset({400, 401, 403, 404, 410})
_TICK_S = 0.1
_JOIN_S = 0.2


class Download:
    """Fills a PartialFile from an address. Use `run` once.

    what: names the file in messages.
    """

    def __init__(self, client: httpx2.Client, remote: Remote, file: PartialFile, what: str) -> None:
        self._client = client
        self._remote = remote
        self._file = file
        self._what = what
        self._direct: Remote | None = None  # the redirects' target, until it expires
        self._stop = threading.Event()
        self._changed = threading.Event()
        self._chunks: deque[int] = deque()
        self._failure: BaseException | None = None

    def run(self, progress: Callable[[int], None]) -> str:
        """Fetch what is missing and return the digest of the whole file. progress receives the bytes present so far.

        Raises PullError; what arrived stays in the partial file. An exception in progress stops the download.
        """
        try:
            if missing := self._file.missing():
                if self._takes_ranges(missing[0]):
                    self._fetch_chunks(missing, progress)
                else:
                    persistently(lambda: self._fetch_whole(progress), self._stop.wait)
            return self._file.digest(lambda: progress(self._file.bytes_done()))
        except OSError as error:
            raise disk_error(error) from error
        finally:
            self._stop.set()
            try:
                self._file.checkpoint()
            except OSError as error:  # an earlier checkpoint holds; this must not hide why the download ended
                log.warning("The progress of %s cannot be noted: %s", self._what, error.strerror)

    def _takes_ranges(self, chunk: int) -> bool:
        """Request one byte to see whether ranges work. Detects a different file before anything is written."""
        at = self._file.span(chunk)[0]

        def ask() -> bool:
            with get(self._client, self._remote, {"Range": f"bytes={at}-{at}"}) as response:
                check_status(response, self._what)
                return check_range(response, (at, at + 1), self._file.size, self._what)

        return persistently(ask, self._stop.wait)

    def _fetch_chunks(self, missing: list[int], progress: Callable[[int], None]) -> None:
        self._chunks.extend(missing)
        count = min(CONNECTIONS, len(missing))
        threads = [threading.Thread(target=self._work, name="download", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads) and self._failure is None:
                self._changed.wait(_TICK_S)
                self._changed.clear()
                progress(self._file.bytes_done())
                while not self._changed.is_set() and self._file.hash_more():
                    pass
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(_JOIN_S)
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            while not self._stop.is_set() and (chunk := self._next()) is not None:
                self._fetch_chunk(chunk)
        except BaseException as error:  # raised by the waiting thread
            self._failure = self._failure or error
        finally:
            self._changed.set()

    def _next(self) -> int | None:
        try:
            return self._chunks.popleft()
        except IndexError:
            return None

    def _fetch_chunk(self, chunk: int) -> None:
        """Fetch a chunk, resuming where the connection broke off. Raises PullError when attempts bring nothing more."""
        at, stop = self._file.span(chunk)
        failures = 0
        while at < stop and not self._stop.is_set():
            try:
                for piece in self._range(at, stop):
                    self._file.write(at, piece)
                    at += len(piece)
                    failures = 0
                    if self._stop.is_set():
                        return
            except PassingError as error:
                failures += 1
                if failures == MAX_FAILURES:
                    raise PullError(f"{error}. What has arrived is kept; pull again to resume.") from error
                self._stop.wait(backoff(failures, error))

    def _range(self, start: int, stop: int) -> Iterator[bytes]:
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        if self._remote.etag:
            headers["If-Range"] = self._remote.etag
        with get(self._client, self._direct or self._remote, headers) as response:
            if response.status_code in _EXPIRED and response.url != httpx2.URL(self._remote.url):
                self._direct = None
                raise PassingError(f"{response.url.host} answers {response.status_code} to a redirect")
            check_status(response, self._what)
            if not check_range(response, (start, stop), self._file.size, self._what):
                raise PullError(
                    f"{response.url.host} sends all of {self._what} for bytes {start}-{stop - 1}. Pull again."
                )
            self._direct = landed(self._remote, response)
            left = stop - start
            for piece in response.iter_raw():
                if len(piece) > left:
                    raise PullError(f"{response.url.host} sends more of {self._what} than requested.")
                left -= len(piece)
                yield piece
        if left:
            raise PassingError(f"{response.url.host} ended the connection early")

    def _fetch_whole(self, progress: Callable[[int], None]) -> None:
        """Download in one piece from a server without ranges; each attempt starts over."""
        at = 0
        self._file.restart()
        with get(self._client, self._remote, {}) as response:
            check_status(response, self._what)
            check_range(response, (0, self._file.size), self._file.size, self._what)
            for piece in response.iter_raw():
                if at + len(piece) > self._file.size:
                    raise PullError(f"{response.url.host} sends more of {self._what} than its listing says.")
                self._file.write(at, piece)
                at += len(piece)
                progress(at)
        if at < self._file.size:
            raise PassingError(f"{response.url.host} ended the connection early")


def disk_error(error: OSError) -> PullError:
    """The error to show when a file of a model cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PullError("The disk is full. What has arrived is kept: free some space and pull again to resume.")
    return PullError(f"The model cannot be written: {error.strerror}: {error.filename or 'its partial file'}.")
