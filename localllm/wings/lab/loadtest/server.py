"""The server under test: which model it offers, and sending one request and timing its answer.

Only the address that the user gave is contacted: proxies of the environment and redirects are ignored.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import httpx2

from localllm.errors import RequestError, reason
from localllm.library.names import plain
from localllm.remote.connection import reachable, refusal
from localllm.wings.lab.latency import Outcome
from localllm.wings.lab.loadtest.protocols import PROTOCOLS, Line, Protocol, TimedJob

CONNECT_S = 10.0
LOOKUP_S = 30.0
LONGEST_LINE = 2**20
LONGEST_REFUSAL = 2**14
CUT_SHORT = "the stream ended before the answer did"


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The user's choice of server. api: a name of PROTOCOLS, None to detect it; model: None for the only one.

    extra: fields added to every request.
    """

    url: str
    api: str | None
    model: str | None
    raw: bool
    extra: Mapping[str, Any]
    key: str | None = None


class MeasuredServer:
    """Sends requests over at most `connections` connections. Use it as an asynchronous context, on one event loop.

    protocol: set by `look_up`, which comes first.
    """

    protocol: Protocol

    def __init__(
        self,
        target: LoadTarget,
        connections: int,
        clock: Callable[[], float],
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """clock: seconds, such as time.perf_counter. Raises RequestError for an invalid address."""
        self._target = target
        self._clock = clock
        self._free = asyncio.Semaphore(connections)
        headers = {"Accept-Encoding": "identity"}
        if target.key:
            headers["Authorization"] = f"Bearer {target.key}"
        self._client = httpx2.AsyncClient(
            base_url=_base(target.url),
            headers=headers,
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=False,
            follow_redirects=False,
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._client.aclose()

    async def look_up(self) -> None:
        """Detect protocol and model. Raises RequestError if there is no server or the model is ambiguous."""
        target, refused = self._target, ""
        for name in (target.api,) if target.api else ("openai", "ollama"):
            kind = PROTOCOLS[name]
            answer = await self._get(kind.models_route)
            if isinstance(answer, str):
                refused = refused or answer
                continue
            try:
                names = kind.model_names(answer)
            except (KeyError, TypeError) as error:
                raise RequestError(f"{target.url}{kind.models_route} does not list models ({error!r}).") from error
            self.protocol = kind(_chosen(target, names), target.raw, target.extra)
            return
        raise RequestError(f"{target.url} is not a server of Ollama's or OpenAI's protocol: {refused}.")

    async def count_prompt(self, job: TimedJob, patience_s: float) -> int | None:
        """The server's count of a prompt's tokens, including the chat template's; None if it reports none.

        Raises RequestError if the server does not answer.
        """
        protocol = self.protocol
        try:
            async with asyncio.timeout(patience_s):
                answer = await self._client.post(protocol.route, json=protocol.body(job, stream=False))
        except (httpx2.HTTPError, TimeoutError) as error:
            raise RequestError(f"{self._target.url} does not answer: {reason(error)}.") from error
        if answer.status_code != httpx2.codes.OK:
            words = _refused(answer.status_code, answer.text)
            raise RequestError(f"{self._target.url} {words}.")
        try:
            return protocol.prompt_tokens(answer.json())
        except (ValueError, AttributeError) as error:
            raise RequestError(f"{self._target.url}{protocol.route} does not return an answer.") from error

    async def ask(self, job: TimedJob, began: float, due: float | None, patience_s: float) -> Outcome:
        """Send a request and follow its answer. began: the clock's time from which the outcome counts.

        due: when it should be sent, in seconds from then; None means now. Gives up patience_s after `due`. Never raises
        for a server's errors; the outcome contains them.
        """
        due = self._clock() - began if due is None else due
        answer = _Answer(due)
        try:
            async with asyncio.timeout(max(0.0, due + patience_s - (self._clock() - began))), self._free:
                answer.sent = self._clock() - began
                await self._follow(job, began, answer)
        except TimeoutError:
            answer.fails(f"no complete answer within {patience_s:g} s")
        except httpx2.HTTPError as broken:
            answer.fails(f"the connection broke: {reason(broken)}")
        except (ValueError, KeyError, TypeError, AttributeError) as strange:
            answer.fails(f"the server's response does not follow {self.protocol.name}'s protocol: {strange!r}")
        return answer.outcome(self._clock() - began)

    async def _follow(self, job: TimedJob, began: float, answer: "_Answer") -> None:
        """Send a request and record its lines until the stream ends, so that its connection can serve the next one."""
        protocol, rest = self.protocol, b""
        async with self._client.stream("POST", protocol.route, json=protocol.body(job)) as response:
            if response.status_code != httpx2.codes.OK:
                answer.fails(_refused(response.status_code, await _beginning(response)))
                return
            async for part in response.aiter_bytes():
                now = self._clock() - began
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    answer.take(protocol.read(line.decode(errors="replace")), now)
                if len(rest) > LONGEST_LINE:
                    raise ValueError(f"a line of more than {LONGEST_LINE} bytes")
            answer.take(protocol.read(rest.decode(errors="replace")), self._clock() - began)

    async def _get(self, route: str) -> Any:
        """A route's JSON, or a text that says why there is none. Raises RequestError if the server is unreachable."""
        try:
            answer = await self._client.get(route, timeout=LOOKUP_S)
        except httpx2.HTTPError as error:
            raise RequestError(
                f"{self._target.url} cannot be reached: {reason(error)}. Is the server running?"
            ) from error
        if answer.status_code != httpx2.codes.OK:
            return f"{route} {_refused(answer.status_code, answer.text)}"
        try:
            return answer.json()
        except ValueError:
            return f"{route} answers no JSON"


class _Answer:
    """An answer in progress. It counts as failed until its last line has arrived."""

    def __init__(self, due: float) -> None:
        self.due = self.sent = due
        self._pieces: list[float] = []
        self._counts: dict[str, int] = {}
        self._ended: float | None = None
        self._error: str | None = None

    def take(self, line: Line | None, now: float) -> None:
        """Record a line's content."""
        if line is None:
            return
        if line.text:
            self._pieces.append(now)
        for name in ("prompt_tokens", "cached_tokens", "generated_tokens"):
            if (count := getattr(line, name)) is not None:
                self._counts[name] = int(count)
        if line.error:
            self.fails(f"the server failed: {line.error}")
        if line.last:
            self._ended = now

    def fails(self, error: str) -> None:
        """Record an error, unless there was an earlier one or the answer is already complete."""
        if self._ended is None and self._error is None:
            self._error = error

    def outcome(self, now: float) -> Outcome:
        """The outcome as of now."""
        self.fails(CUT_SHORT)
        ended = now if self._ended is None else self._ended
        return Outcome(self.due, self.sent, tuple(self._pieces), ended, **self._counts, error=self._error)


def _base(url: str) -> httpx2.URL:
    """The server's base address. A trailing /v1, as OpenAI's clients are configured with, is removed."""
    try:
        parsed = httpx2.URL(url if "://" in url else f"http://{url}")
    except httpx2.InvalidURL as error:
        raise RequestError(f"{url!r} is not the address of a server ({error}); give http://host:port.") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo or parsed.query:
        raise RequestError(f"{url!r} is not the address of a server; give http://host:port.")
    path = parsed.path.rstrip("/").removesuffix("/v1") or "/"
    return parsed.copy_with(host=reachable(parsed.host), path=path)


def _chosen(target: LoadTarget, names: list[str]) -> str:
    listed = f"{', '.join(names[:10])}{' ...' if len(names) > 10 else ''}"
    if target.model is not None:
        # sglang-router lists no models, or one called unknown.
        if names not in ([], ["unknown"]) and plain(target.model) not in map(plain, names):
            raise RequestError(f"{target.url} has no model {target.model!r}. It offers: {listed}.")
        return target.model
    if len(names) != 1:
        raise RequestError(f"{target.url} offers {len(names)} models; choose one with --model: {listed or 'none'}.")
    return names[0]


async def _beginning(answer: httpx2.Response) -> str:
    """The beginning of a refusal's body."""
    data = b""
    async for part in answer.aiter_bytes():
        data += part
        if len(data) >= LONGEST_REFUSAL:
            break
    return data[:LONGEST_REFUSAL].decode(errors="replace")


def _refused(status: int, text: str) -> str:
    advice = "; set the server's key, LOCALLLM_REMOTE_KEY" if status in (401, 403) else ""
    return f"refuses with {status}: {refusal(text)}{advice}"
