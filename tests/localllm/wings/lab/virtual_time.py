"""An event loop whose time jumps to the next timer when idle, and a model server in that time.

Waiting takes no real time, and every latency is exactly as configured.
"""

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx2

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits; advances the loop's clock instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits and no timer would wake anybody"
        self.now += max(0.0, timeout)
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time, which begins at 0."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


def now() -> float:
    """The virtual time."""
    return asyncio.get_running_loop().time()


@dataclass
class TimedServer(httpx2.AsyncBaseTransport):
    """Serves `slots` requests at once, first come, first served. An answer has as many tokens as requested.

    prefill_s: until the first token; token_s: between two. A word is a token, and the template adds three. hangs: the
    answer with this number (from 0) never arrives. status: of every response but the model list.
    """

    slots: int = 1
    prefill_s: float = 0.5
    token_s: float = 0.125
    hangs: int | None = None
    status: int = 200
    counts: bool = True
    asked: list[tuple[float, httpx2.URL, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            return httpx2.Response(200, json={"data": [{"id": "timed"}]})
        body = json.loads(await request.aread())
        self.asked.append((now(), request.url, body))
        if self.status != httpx2.codes.OK:
            return httpx2.Response(self.status, json={"error": {"message": "not today"}})
        words = 3 + sum(len(message["content"].split()) for message in body["messages"])
        usage = {"prompt_tokens": words, "completion_tokens": body["max_tokens"]} if self.counts else {}
        if not body["stream"]:
            return httpx2.Response(200, json={"choices": [], "usage": usage})
        hangs = self.hangs is not None and len(self.asked) > self.hangs
        return httpx2.Response(200, stream=_Stream(self._answer(body["max_tokens"], usage, hangs)))

    async def _answer(self, tokens: int, usage: dict[str, int], hangs: bool) -> AsyncIterator[bytes]:
        async with self._free:
            await asyncio.sleep(1e9 if hangs else self.prefill_s)
            for number in range(tokens):
                if number:
                    await asyncio.sleep(self.token_s)
                yield b'data: {"choices": [{"delta": {"content": "word "}}]}\n\n'
        yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"


class _Stream(httpx2.AsyncByteStream):
    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._parts

    async def aclose(self) -> None:
        await self._parts.aclose()  # type: ignore[attr-defined] # it is a generator
