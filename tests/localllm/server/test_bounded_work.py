"""Work and log lines do not grow with what a stranger puts into a request."""

import asyncio
import contextlib
import json
import logging
import socket
from typing import Any

import httpx
import pytest

from localllm.server import bodies, security
from localllm.server.anthropic import requests as anthropic
from localllm.server.app import error_body_at
from localllm.server.bodies import Body, OpenAIMessage, log_ignored, note_ignored
from localllm.server.json_body import parse_json
from localllm.server.limits import MAX_JSON_KEYS, MAX_JSON_MEMBERS, MAX_NAMED, MAX_NOTES
from localllm.server.llama_cpp import completion as llama_cpp
from localllm.server.ollama import schema as ollama
from localllm.server.ollama.options import read_options
from localllm.server.openai import schema as openai
from localllm.server.options import ServerOptions
from localllm.server.security import Gate
from tests.localllm.server.conftest import MODEL, Server
from tests.waiting import PATIENCE_S

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/api/generate": {"prompt": "Hi", "stream": False, "options": {"num_predict": 1}},
    "/api/chat": {"messages": MESSAGES, "stream": False, "options": {"num_predict": 1}},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/completion": {"prompt": "Hi", "n_predict": 1},
}


def keys(number: int) -> dict[str, int]:
    return {f"key{index}": index for index in range(number)}


@pytest.mark.parametrize("path", BODIES)
def test_one_key_too_many_is_refused_in_every_protocol(server: Server, path: str) -> None:
    plain = {"model": MODEL, **BODIES[path]}

    def sent(body: dict[str, Any]) -> httpx.Response:
        return httpx.post(server.url + path, json=body, timeout=PATIENCE_S)

    assert sent(plain | keys(MAX_JSON_KEYS - len(plain))).status_code == 200
    for body in (plain | keys(MAX_JSON_KEYS - len(plain) + 1), {**plain, "metadata": keys(MAX_JSON_KEYS + 1)}):
        answer = sent(body)
        assert answer.status_code == 400 and f"more than {MAX_JSON_KEYS:,} keys" in answer.text
    many = [keys(1000) for _ in range(MAX_JSON_MEMBERS // 1000)]
    answer = sent({**plain, "metadata": many})
    assert answer.status_code == 400 and f"{MAX_JSON_MEMBERS:,} keys" in answer.text


def test_colons_in_strings_do_not_count_as_keys() -> None:
    assert parse_json(json.dumps(["::" * MAX_JSON_MEMBERS]).encode())
    with pytest.raises(ValueError, match="keys"):
        parse_json(b"[" + b",".join([b'{"a":1}'] * (MAX_JSON_MEMBERS // 2) + [b'{"a":1,"b":2}'] * 25_001) + b"]")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    log_ignored.cache_clear()
    monkeypatch.setattr(bodies, "_NOTES", bodies._Notes())
    caplog.set_level(logging.INFO)
    return caplog


def test_unknown_options_cost_a_few_lines_and_comparisons(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    monkeypatch.setattr("localllm.server.ollama.options.nearest", lambda name, _known: compared.append(name))
    read_options(keys(MAX_NAMED + 1))
    assert len(lines.messages) == MAX_NAMED + 1 and lines.messages[-1].startswith("ignored: 1 more")
    lines.clear()
    read_options(keys(MAX_JSON_KEYS))
    assert len(compared) == 2 * MAX_NAMED
    assert lines.messages == [f"ignored: {MAX_JSON_KEYS - MAX_NAMED:,} more, such as unknown option of another name"]


@pytest.mark.parametrize(
    "body",
    [
        ollama.GenerateBody,
        openai.ChatBody,
        anthropic.MessagesBody,
        llama_cpp.LlamaCompletionBody,
        openai.ResponsesBody,
        OpenAIMessage,
    ],
)
def test_unknown_fields_cost_a_few_lines(lines: pytest.LogCaptureFixture, body: type[Body]) -> None:
    body.model_validate({"messages": MESSAGES, "role": "user", "max_tokens": 1, **keys(MAX_JSON_KEYS)})
    assert len(lines.messages) <= MAX_NAMED + 3
    assert sum("more, such as" in line for line in lines.messages) == 1


def test_a_minute_has_a_bounded_number_of_lines(lines: pytest.LogCaptureFixture) -> None:
    for number in range(10 * MAX_NOTES):
        note_ignored(f"part {number}")
    assert len(lines.messages) == MAX_NOTES + 1 and "not named" in lines.messages[-1]


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (ollama.OllamaChatBody, {"messages": [{"role": "user", "content": "Hi", "images": [1]}]}),
        (openai.ChatBody, {"messages": [{"role": "user", "content": [1]}]}),
        (anthropic.MessagesBody, {"messages": [{"role": "user", "content": [1]}], "max_tokens": 1}),
        (anthropic.MessagesBody, {"messages": MESSAGES, "system": [1], "max_tokens": 1}),
        (llama_cpp.LlamaCompletionBody, {"prompt": [[None]]}),
        (openai.ResponsesBody, {"input": [1]}),
        (openai.ResponsesBody, {"include": [1]}),
        (openai.EmbeddingsBody, {"input": [None]}),
    ],
)
def test_validation_stops_at_the_first_wrong_item(body: type[Body], fields: dict[str, Any]) -> None:
    """Otherwise a list of two million wrong items makes as many errors."""

    def longer(value: Any) -> Any:
        if isinstance(value, list) and not isinstance(value[0], list | dict):
            return value * 30
        if isinstance(value, list):
            return [longer(one) for one in value]
        return {key: longer(one) for key, one in value.items()} if isinstance(value, dict) else value

    found = []
    for given in (fields, longer(fields)):
        with pytest.raises(ValueError) as error:
            body.model_validate(given)
        found.append(error.value.error_count())  # type: ignore[attr-defined]
    assert found[1] <= found[0] + 2


def test_bodies_in_progress_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may take what remains free; with one other client, both may take a third of the whole."""
    monkeypatch.setattr(security, "MAX_BODIES_BYTES", 6000)
    statuses: list[int] = []
    release = asyncio.Event()

    async def application(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    gate = Gate(application, ServerOptions(), error_body_at)

    async def request(client: str, size: int) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/api/chat",
            "client": (client, 1),
            "server": ("127.0.0.1", 11434),
            "headers": [(b"host", b"localhost")],
        }

        async def receive() -> Any:
            return {"type": "http.request", "body": b" " * size, "more_body": False}

        async def send(message: Any) -> None:
            statuses.extend([message["status"]] if message["type"] == "http.response.start" else [])

        await gate(scope, receive, send)

    async def scenario() -> None:
        for client, size in (("a", 2000), ("a", 1001), ("b", 2000), ("a", 1), ("c", 500)):
            waiting.append(asyncio.create_task(request(client, size)))
            await asyncio.sleep(0)
            await asyncio.sleep(0.01)
        assert statuses == [503, 503]  # 3001 of 6000; 2001 when 4000 are taken
        release.set()
        await asyncio.gather(*waiting)
        await request("a", 3000)

    waiting: list[asyncio.Task[None]] = []
    asyncio.run(scenario())
    assert statuses[2:] == [200, 200, 200, 200]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_only_reads_on_gets_its_answer(server: Server, path: str, stream: bool) -> None:
    body = json.dumps({"model": MODEL, **BODIES[path], "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
        connection.sendall(head + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                answer += piece
    assert b"HTTP/1.1 200 OK" in answer and len(answer.partition(b"200 OK")[2]) > 200
