"""Parsing lines of streams, from the servers' documentation, and the form of requests."""

import json
from typing import Any

import httpx2
import pytest

from localllm.errors import RequestError
from localllm.wings.lab.loadtest.protocols import Line, Ollama, OpenAI, Protocol, TimedJob
from localllm.wings.lab.loadtest.server import LoadTarget, MeasuredServer
from tests.localllm.wings.lab.virtual_time import now, run

JOB = TimedJob(0.0, "Hello", 7)
OPENAI, OLLAMA = OpenAI("m", False, {}), Ollama("m", False, {})


def chunk(**choice: Any) -> str:
    return "data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice]})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", None),
        (": ping", None),
        ("event: x", None),
        (chunk(delta={"role": "assistant", "content": ""}), Line()),
        (chunk(delta={"content": "Hi"}, finish_reason=None), Line(text=True)),
        (chunk(delta={"reasoning_content": "Hm"}), Line(text=True)),
        (chunk(delta={"reasoning": "Hm"}), Line(text=True)),
        (chunk(text="Hi"), Line(text=True)),
        (chunk(delta={}, finish_reason="stop"), Line(last=True)),
        ('data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}', Line(False, 3, None, 2)),
        (
            'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, '
            '"prompt_tokens_details": {"cached_tokens": 1}}}',
            Line(False, 3, 1, 2),
        ),
        ("data: [DONE]", Line(last=True)),
        ('data: {"error": {"message": "no memory"}}', Line(error="no memory")),
        ('data: {"error": "no memory"}', Line(error="no memory")),
    ],
)
def test_openais_lines(line: str, said: Line | None) -> None:
    assert OPENAI.read(line) == said


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"message": {"role": "assistant", "content": "Hi"}, "done": False}, Line(text=True)),
        ({"message": {"role": "assistant", "content": "", "thinking": "Hm"}, "done": False}, Line(text=True)),
        ({"response": "Hi", "done": False}, Line(text=True)),
        (
            {"message": {"content": ""}, "done": True, "prompt_eval_count": 26, "eval_count": 9},
            Line(False, 26, None, 9, last=True),
        ),
        ({"response": "", "done": True, "prompt_eval_count": 2, "prompt_eval_cached_count": 1, "eval_count": 3},
         Line(False, 2, 1, 3, last=True)),
        ({"error": "no memory"}, Line(error="no memory")),
    ],
)  # fmt: skip
def test_ollamas_lines(event: dict[str, Any], said: Line) -> None:
    assert OLLAMA.read(json.dumps(event)) == said
    assert OLLAMA.read("\n") is None


def test_requests_of_both_protocols() -> None:
    message = [{"role": "user", "content": "Hello"}]
    assert OPENAI.body(JOB) == {
        "model": "m", "messages": message, "max_tokens": 7, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert (OPENAI.route, OLLAMA.route) == ("/v1/chat/completions", "/api/chat")
    options = {"num_predict": 7, "temperature": 0}
    assert OLLAMA.body(JOB) == {"model": "m", "messages": message, "stream": True, "options": options}


def test_raw_requests() -> None:
    openai, ollama = OpenAI("m", True, {}), Ollama("m", True, {})
    assert (openai.route, openai.body(JOB, stream=False)["prompt"]) == ("/v1/completions", "Hello")
    assert (ollama.route, ollama.body(JOB)["raw"], ollama.body(JOB)["prompt"]) == ("/api/generate", True, "Hello")
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert openai.body(TimedJob(0.0, messages, 1))["prompt"] == "a\nb"


def test_further_fields_win() -> None:
    assert OpenAI("m", False, {"temperature": 1, "ignore_eos": True}).body(JOB).items() >= {
        ("temperature", 1),
        ("ignore_eos", True),
        ("max_tokens", 7),
    }
    body = Ollama("m", False, {"think": False, "options": {"temperature": 1}}).body(JOB)
    assert (body["think"], body["options"]) == (False, {"num_predict": 7, "temperature": 1})


class Scripted(httpx2.AsyncBaseTransport):
    """Answers of routes; a list of bytes is a stream."""

    def __init__(self, answers: dict[str, httpx2.Response | list[bytes]]) -> None:
        self.answers, self.keys = answers, []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.keys.append(request.headers.get("Authorization"))
        answer = self.answers.get(request.url.path, httpx2.Response(404, json={"error": "no such route"}))
        return httpx2.Response(200, stream=Parts(answer)) if isinstance(answer, list) else answer


class Parts(httpx2.AsyncByteStream):
    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    async def __aiter__(self) -> Any:
        for part in self._parts:
            yield part


MODELS = {"/v1/models": httpx2.Response(200, json={"data": [{"id": "one"}, {"id": "two"}]})}
TAGS = {"/api/tags": httpx2.Response(200, json={"models": [{"name": "one:latest"}]})}


def found(answers: dict[str, Any], **target: Any) -> Protocol:
    async def main() -> Protocol:
        given = LoadTarget(**{"url": "server:1", "api": None, "model": None, "raw": False, "extra": {}, **target})
        async with MeasuredServer(given, 1, now, Scripted(answers)) as server:
            await server.look_up()
            return server.protocol

    return run(main())


def asked(parts: list[bytes]) -> Any:
    async def main() -> Any:
        scripted = Scripted({**MODELS, "/v1/chat/completions": parts})
        target = LoadTarget("http://server/v1", None, "one", False, {}, key="secret")
        async with MeasuredServer(target, 1, now, scripted) as server:
            await server.look_up()
            outcome = await server.ask(JOB, 0.0, None, 9.0)
        assert set(scripted.keys) == {"Bearer secret"}
        return outcome

    return run(main())


def test_protocol_and_model_are_found_out() -> None:
    assert found(MODELS, model="two").name == "openai"
    behind_a_router = {"/v1/models": httpx2.Response(200, json={"data": [{"id": "unknown"}]})}
    assert found(behind_a_router, model="two").model == "two"
    only = found(TAGS)
    assert (only.name, only.model) == ("ollama", "one:latest")
    assert found({**MODELS, **TAGS}, api="ollama", model="one").name == "ollama"


@pytest.mark.parametrize(
    ("answers", "target", "said"),
    [
        (MODELS, {}, "server:1 offers 2 models; choose one with --model: one, two"),
        (MODELS, {"model": "three"}, "has no model 'three'. It offers: one, two"),
        ({"/v1/models": httpx2.Response(200, json={"data": []})}, {}, "offers 0 models"),
        ({"/v1/models": httpx2.Response(200, json=[])}, {}, "does not list models"),
        ({}, {}, "not a server of Ollama's or OpenAI's protocol: /v1/models refuses with 404: no such route"),
        (MODELS, {"api": "ollama"}, "/api/tags refuses with 404"),
        ({"/v1/models": httpx2.Response(401, json={"error": "key?"})}, {}, "401: key\\?; set the server's key"),
        ({"/v1/models": httpx2.Response(307, headers={"location": "http://other/"})}, {}, "refuses with 307"),
        ({}, {"url": "ftp://server"}, "'ftp://server' is not the address of a server"),
        ({}, {"url": "http://"}, "not the address of a server"),
        ({}, {"url": "http://me:pass@server"}, "not the address of a server"),
    ],
)
def test_servers_that_cannot_be_measured(answers: dict[str, Any], target: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        found(answers, **target)


def test_lines_may_come_in_any_parts() -> None:
    whole = chunk(delta={"content": "\u00e9"}).encode() + b"\r\n\r\n" + chunk(delta={"content": "b"}).encode() + b"\n\n"
    whole += b"data: [DONE]"
    for size in (1, 7, len(whole)):
        outcome = asked([whole[at : at + size] for at in range(0, len(whole), size)])
        assert (outcome.error, len(outcome.pieces)) == (None, 2)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([chunk(delta={"content": "a"}).encode() + b"\n\n"], "the stream ended before the answer did"),
        ([b"data: {\n"], "does not follow openai's protocol"),
        ([b"data: []\n"], "does not follow openai's protocol"),
        ([b'data: {"error": {"message": "no memory"}}\n\n'], "the server failed: no memory"),
        ([b"x" * 2**19] * 3, "a line of more than 1048576 bytes"),
    ],
)
def test_answers_that_fail(parts: list[bytes], said: str) -> None:
    assert said in asked(parts).error
