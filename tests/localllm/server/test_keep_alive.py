"""Keep-alives during prefill and load, in the form that each protocol's clients expect."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from localllm.errors import RequestError
from localllm.server import limits
from localllm.server.streams import streamed
from tests.localllm.server.conftest import MODEL, SLOWLY, Server, StartServer
from tests.waiting import PATIENCE_S

IMPATIENT = f"{SLOWLY}\nfrom localllm.server import limits\nlimits.KEEP_ALIVE_SECONDS = 0.02\n"
HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def slow(start_server: StartServer) -> Iterator[Server]:
    with start_server(begins=IMPATIENT) as server:
        yield server


async def stream_to(lines: AsyncGenerator[bytes, None], hear: Callable[[bytes], None], leave: asyncio.Event) -> None:
    """Stream lines to a client that hears each one, until they end or it leaves."""
    response = await streamed(lines, lambda error: b"error: " + str(error).encode(), "text/plain", lambda: b"alive")

    async def receive() -> Any:
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        if message["type"] == "http.response.body":
            hear(message["body"] if message["more_body"] else b"the end")

    await response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)


@pytest.mark.parametrize("late", [False, True])
def test_silence_is_broken_and_nothing_is_lost(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """late: the first line comes after signs of life too."""
    monkeypatch.setattr(limits, "KEEP_ALIVE_SECONDS", 0.001)
    closed, found = [], []

    async def scene() -> None:
        spoken, first = asyncio.Event(), asyncio.Event()

        async def lines() -> AsyncGenerator[bytes, None]:
            try:
                if late:
                    await first.wait()
                yield b"one"
                yield b""
                await spoken.wait()
                yield b"two"
                raise RequestError("no more")
            finally:
                closed.append(True)

        def hear(line: bytes) -> None:
            found.append(line)
            if found.count(b"alive") == 3:
                first.set()
            if b"one" in found and found[found.index(b"one") :].count(b"alive") == 3:
                spoken.set()

        await stream_to(lines(), hear, asyncio.Event())

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
    said = [line for line in found if line != b"alive"]
    assert closed and said == [b"one", b"two", b"error: no more", b"the end"] and found[-1] == b"the end"
    assert (found[0] == b"alive") is late


@pytest.mark.parametrize("begun", [False, True])
def test_a_reader_that_leaves_ends_the_lines(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEEP_ALIVE_SECONDS", 0.001)
    closed = []

    async def scene() -> None:
        leave, before = asyncio.Event(), asyncio.all_tasks()

        async def lines() -> AsyncGenerator[bytes, None]:
            try:
                if begun:
                    yield b"one"
                await asyncio.Event().wait()
                yield b"never"
            finally:
                closed.append(True)

        await stream_to(lines(), lambda line: leave.set() if line == b"alive" else None, leave)
        assert closed and asyncio.all_tasks() == before

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


@pytest.mark.parametrize(
    ("path", "body", "sign"),
    [
        ("/v1/messages", {"max_tokens": 3}, b'event: ping\ndata: {"type":"ping"}'),
        ("/v1/chat/completions", {"max_tokens": 3}, b": keep-alive"),
        ("/v1/responses", {"max_output_tokens": 3, "input": "Hi"}, b": keep-alive"),
        ("/v1/completions", {"max_tokens": 3, "prompt": "Hi"}, b": keep-alive"),
        ("/api/chat", {"options": {"num_predict": 3}}, b'"message":{"role":"assistant","content":""},"done":false'),
    ],
)
def test_every_protocol_has_a_sign_of_life(slow: Server, path: str, body: dict[str, Any], sign: bytes) -> None:
    sent = {"model": MODEL, "stream": True, "messages": HI, **body}
    text = httpx.post(slow.url + path, json=sent, timeout=PATIENCE_S).content
    assert text.count(sign) > 1
    if path == "/api/chat":
        assert json.loads(text.splitlines()[-1])["done"]


def test_clients_do_not_mind(slow: Server) -> None:
    with (
        anthropic.Anthropic(base_url=slow.url, api_key="none") as client,
        client.messages.stream(model=MODEL, messages=HI, max_tokens=3) as stream,
    ):
        assert stream.get_final_message().usage.output_tokens == 3
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none") as gpt:
        chunks = gpt.chat.completions.create(model=MODEL, messages=HI, max_tokens=3, stream=True)
        assert list(chunks)[-1].choices[0].finish_reason == "length"
        with gpt.responses.stream(model=MODEL, input="Hi", max_output_tokens=3) as events:
            assert [event.type for event in events][-1] == "response.incomplete"


def test_a_refusal_before_any_sign_keeps_its_status(slow: Server) -> None:
    sent = {"model": "nothing", "stream": True, "messages": HI, "max_tokens": 1}
    assert httpx.post(f"{slow.url}/v1/messages", json=sent, timeout=PATIENCE_S).status_code == 404
