"""Keep-alives during prefill and load, in the form that each protocol's clients expect."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from localllm.server.streams import kept_alive
from tests.localllm.server.conftest import MODEL, SLOWLY, Server, StartServer
from tests.waiting import PATIENCE_S

IMPATIENT = f"{SLOWLY}\nfrom localllm.server import limits\nlimits.KEEP_ALIVE_SECONDS = 0.02\n"
HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def slow(start_server: StartServer) -> Iterator[Server]:
    with start_server(begins=IMPATIENT) as server:
        yield server


def test_silence_is_broken_and_nothing_is_lost() -> None:
    async def scene() -> list[bytes]:
        spoken, closed = asyncio.Event(), []

        async def lines() -> AsyncGenerator[bytes, None]:
            try:
                yield b"one"
                await spoken.wait()
                yield b"two"
            finally:
                closed.append(True)

        found = []
        async with contextlib.aclosing(kept_alive(lines(), lambda: b"alive", 0.001)) as kept:
            async for line in kept:
                found.append(line)
                if found.count(b"alive") == 3:
                    spoken.set()
        assert closed
        return [line for at, line in enumerate(found) if line != b"alive" or at == 1]

    assert asyncio.run(asyncio.wait_for(scene(), PATIENCE_S)) == [b"one", b"alive", b"two"]


def test_a_reader_that_leaves_ends_the_lines() -> None:
    async def scene() -> None:
        closed = []

        async def lines() -> AsyncGenerator[bytes, None]:
            try:
                await asyncio.Event().wait()
                yield b""
            finally:
                closed.append(True)

        kept = kept_alive(lines(), lambda: b"alive", 0.001)
        assert await anext(kept) == b"alive"
        await kept.aclose()
        assert closed

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
