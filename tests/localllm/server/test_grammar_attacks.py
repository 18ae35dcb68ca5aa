"""Grammars and schemas of requests that would end the server or occupy it, on every protocol that takes them."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from localllm.engine.constraint.trial import CPU_SECONDS, MAX_SOURCE_CHARACTERS
from tests.localllm.server.conftest import Server, StartServer
from tests.waiting import PATIENCE_S, eventually

MODEL = "stories260K-Q8_0"
MESSAGES = [{"role": "user", "content": "Hi"}]


def chain(count: int, form: str, last: str) -> str:
    return "\n".join([*(form.format(i, i + 1) for i in range(count)), last.format(count)])


GBNF = "root ::= r0\n" + chain(13_000, "r{} ::= r{}", 'r{} ::= "a"')  # too much work
LARK = "start: T0\n" + chain(16_000, "T{}: T{}", 'T{}: "a"')  # too deep
SCHEMA = {"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(40)]}  # too much memory
LONG = '"' + "a" * MAX_SOURCE_CHARACTERS + '"'

# Prologue that shortens the time limit.
IMPATIENT = "from localllm.engine.constraint import trial; trial.CPU_SECONDS = 1.0"

CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grammar": ("/v1/chat/completions", {**CHAT, "grammar": GBNF}),
    "Lark as grammar": ("/v1/chat/completions", {**CHAT, "grammar": LARK}),
    "guided_grammar": ("/v1/completions", {"model": MODEL, "prompt": "Hi", "max_tokens": 2, "guided_grammar": LARK}),
    "structured_outputs": ("/v1/chat/completions", {**CHAT, "guided_json": SCHEMA}),
    "response_format": (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ),
    "text.format": (
        "/v1/responses",
        {"model": MODEL, "input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    ),
    "format": ("/api/chat", {"model": MODEL, "messages": MESSAGES, "format": SCHEMA, "stream": False}),
    "format of text": ("/api/generate", {"model": MODEL, "prompt": "Hi", "format": SCHEMA, "stream": False}),
    "llama-server's grammar": ("/completion", {"prompt": "Hi", "n_predict": 2, "grammar": LARK}),
    "llama-server's schema": ("/completion", {"prompt": "Hi", "n_predict": 2, "json_schema": SCHEMA}),
    "one character more": ("/completion", {"prompt": "Hi", "n_predict": 2, "grammar": f"root ::= {LONG}"}),
    "pattern": ("/v1/chat/completions", {**CHAT, "guided_regex": "(" * 9000 + "a" + ")" * 9000}),
}


@pytest.fixture(scope="module")
def impatient(start_server: StartServer) -> Iterator[Server]:
    with start_server(models=(MODEL,), begins=IMPATIENT) as running:
        yield running


@pytest.mark.parametrize("name", REQUESTS)
def test_hostile_grammars_are_refused_and_the_server_keeps_serving(impatient: Server, name: str) -> None:
    path, body = REQUESTS[name]
    found = httpx.post(impatient.url + path, json=body, timeout=PATIENCE_S)
    assert found.status_code == 400 and "constraint" in found.text, found.text
    assert httpx.get(impatient.url + "/health", timeout=PATIENCE_S).status_code == 200


def processor_seconds(server: Server) -> float:
    """What the processes that read grammars for the server have used; 0 if there are none."""
    used = 0.0
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
            if "localllm.engine.constraint.worker" in child.cmdline():
                used += sum(child.cpu_times()[:2])
    return used


def test_work_on_a_grammar_ends_with_its_client(server: Server) -> None:
    """Its process is killed after a part of its time; the next grammar gets another."""
    before = processor_seconds(server)
    grammar = "root ::= q0\n" + chain(13_500, "q{} ::= q{}", 'q{} ::= "a"')
    body = json.dumps({**CHAT, "grammar": grammar}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body)
        eventually(lambda: processor_seconds(server) > before + 1)
        used = processor_seconds(server)
    eventually(lambda: processor_seconds(server) < used)
    assert used < before + CPU_SECONDS / 2
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json={**CHAT, "grammar": 'root ::= "a"'}, timeout=PATIENCE_S
    )
    assert answer.json()["choices"][0]["message"]["content"] == "a"
