"""A prompt that is too long is refused in words by which programs of each protocol shorten the conversation."""

import base64
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from localllm.remote.connection import _too_long
from localllm.server.errors import InputTooLongError, Refusal, refusal_of
from localllm.server.json_body import ProtocolRoute
from tests.fakes.openai_server import openai_server
from tests.fakes.scripted_model import write_scripted_model
from tests.localllm.server.conftest import Server, StartServer
from tests.picture_files import png
from tests.projector_files import write_projector
from tests.waiting import PATIENCE_S

LONG = "Once upon a time there was a girl. " * 100
CHAT = {"messages": [{"role": "user", "content": LONG}]}
MOST = 512

# How programs recognise the refusal. pi-ai 1.5.2 (dist/utils/overflow.js), qwen-code 0.24.4 (chunks), Claude Code 2.1.
PI = re.compile(
    r"prompt (?:is )?too long|exceeds the context window|maximum context length is \d+ tokens"
    r"|exceeds the available context size|context[_ ]length[_ ]exceeded|reduce the length of the messages",
    re.IGNORECASE,
)
PI_NOT = re.compile(r"rate limit|too many requests|^(Throttling error|Service unavailable):", re.IGNORECASE)
QWEN = re.compile(
    r"maximum context length is\s*(\d[\d,]*)\s*tokens?[\s\S]*?(?:resulted in|requested|used)\s*(\d[\d,]*)\s*tokens?",
    re.IGNORECASE,
)
CLAUDE = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)


@pytest.fixture(scope="module")
def small(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = write_scripted_model(tmp_path_factory.mktemp("small") / "small.gguf", {"plain": "The answer is short."})
    with start_server("--model", str(path), "--ctx", str(MOST), models=()) as server:
        yield server


def refused(server: Server, path: str, body: dict[str, Any]) -> tuple[Any, str]:
    """The error of a request, and its message."""
    answer = httpx.post(server.url + path, json={"model": "small", **body}, timeout=PATIENCE_S)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error, error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic(small: Server, stream: bool) -> None:
    error, message = refused(small, "/v1/messages", {**CHAT, "max_tokens": 9, "stream": stream})
    found = CLAUDE.search(message)
    assert error["type"] == "invalid_request_error" and found and int(found[1]) > int(found[2]) == MOST
    assert PI.search(message) and f"The prompt has {found[1]} tokens and the context holds {MOST}." in message


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": LONG}), ("/v1/responses", {"input": LONG})],
)
@pytest.mark.parametrize("stream", [False, True])
def test_openai(small: Server, path: str, body: dict[str, Any], stream: bool) -> None:
    error, message = refused(small, path, {**body, "stream": stream})
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    found = QWEN.search(message)
    assert found and (int(found[1]), int(found[2])) == (MOST, error["n_prompt_tokens"]) and int(found[2]) > MOST
    assert PI.search(message) and not PI_NOT.search(message)


@pytest.mark.parametrize(("path", "body"), [("/completion", {"prompt": LONG}), ("/completion", {"prompt": [LONG]})])
def test_llama_server(small: Server, path: str, body: dict[str, Any]) -> None:
    error, message = refused(small, path, body)
    assert error["type"] == "exceed_context_size_error" and error["code"] == 400
    assert error["n_prompt_tokens"] > error["n_ctx"] == MOST
    assert "exceeds the available context size" in message and PI.search(message)


def test_ollama(small: Server) -> None:
    _, message = refused(small, "/api/chat", {**CHAT, "truncate": False})
    assert "exceeds the context length" in message and PI.search(message)


TOOL: dict[str, Any] = {"name": "weigh", "description": "Weighs a thing. " * 200}
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"thing": {"type": "string"}}}
SHORT = {"messages": [{"role": "user", "content": "Weigh it."}]}
FUNCTION = {**TOOL, "parameters": PARAMETERS}
# What only the tools make too long, and what each protocol says first.
WITH_TOOLS: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/messages",
        {**SHORT, "max_tokens": 9, "tools": [{**TOOL, "input_schema": PARAMETERS}]},
        "prompt is too long: ",
    ),
    (
        "/v1/chat/completions",
        {**SHORT, "tools": [{"type": "function", "function": FUNCTION}]},
        "This model's maximum context length is 512 tokens. However, your messages resulted in ",
    ),
    (
        "/v1/responses",
        {"input": "Weigh it.", "tools": [{"type": "function", **FUNCTION}]},
        "This model's maximum context length is 512 tokens. However, your messages resulted in ",
    ),
    (
        "/api/chat",
        {**SHORT, "tools": [{"type": "function", "function": FUNCTION}], "truncate": False},
        "the input length exceeds the context length ",
    ),
]


@pytest.mark.parametrize(("path", "body", "words"), WITH_TOOLS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("forced", [False, True])
def test_tools_count(small: Server, path: str, body: dict[str, Any], words: str, stream: bool, forced: bool) -> None:
    choice: Any = {"type": "any"} if "v1/messages" in path else "required"
    _, message = refused(small, path, body | {"stream": stream} | ({"tool_choice": choice} if forced else {}))
    assert message.startswith(words) and PI.search(message)


# A short prompt, and a limit of the answer beyond the context: the answer is shorter, and nothing is refused.
BEYOND: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {**SHORT, "max_tokens": 90_000}),
    ("/v1/chat/completions", {**SHORT, "max_tokens": 90_000}),
    ("/v1/chat/completions", {**SHORT, "max_completion_tokens": MOST}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 90_000}),
    ("/v1/responses", {"input": "Weigh it.", "max_output_tokens": 90_000}),
    ("/completion", {"prompt": "Once", "n_predict": 90_000}),
    ("/api/chat", {**SHORT, "options": {"num_predict": 90_000}}),
]


@pytest.mark.parametrize(("path", "body"), BEYOND)
def test_an_answer_limit_beyond_the_context_is_accepted(small: Server, path: str, body: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = httpx.post(small.url + path, json={"model": "small", "stream": stream, **body}, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text


def test_pictures_count(start_server: StartServer, model_files: Path, tmp_path: Path) -> None:
    """Each protocol refuses in its words what only pictures make too long: of all messages, of the last one, or one."""
    shutil.copyfile(model_files / "stories260K-F32.gguf", tmp_path / "seer.gguf")
    write_projector(tmp_path / "mmproj-seer.gguf", "gemma4uv")
    data = base64.b64encode(png(1)).decode()
    url = f"data:image/png;base64,{data}"
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    part = {"type": "image_url", "image_url": {"url": url}}
    reply = {"role": "assistant", "content": "I see."}
    with start_server("--model", str(tmp_path / "seer.gguf"), "--ctx", "256", models=()) as server:
        for tokens, counts in ((150, (1, 1)), (150, (2,)), (600, (1,))):

            def seen(one: Any, counts: tuple[int, ...] = counts) -> list[Any]:
                asked = [{"role": "user", "content": [one] * count} for count in counts]
                return [message for ask in asked for message in (ask, reply)][:-1]

            budget = {"model": "seer", "image_min_tokens": tokens, "image_max_tokens": tokens}
            images = [
                message | ({"content": "?", "images": [data] * len(message["content"])} if message is not reply else {})
                for message in seen(block)
            ]
            bodies: list[tuple[str, dict[str, Any]]] = [
                ("/v1/messages", {"messages": seen(block), "max_tokens": 9}),
                ("/v1/chat/completions", {"messages": seen(part)}),
                ("/v1/responses", {"input": seen({"type": "input_image", "image_url": url})}),
                ("/api/chat", {"messages": images, "truncate": False, "options": budget}),
            ]
            for path, body in bodies:
                for stream in (False, True):
                    error, message = refused(server, path, {**budget, "stream": stream, **body})
                    assert PI.search(message) or CLAUDE.search(message), message
                    if "/v1/" in path and "messages" not in path:
                        assert error["code"] == "context_length_exceeded" and error["n_ctx"] == 256
                        assert 250 < error["n_prompt_tokens"] < 640


def test_a_request_limit_is_reported_as_the_context(small: Server) -> None:
    _, message = refused(small, "/v1/messages", {**CHAT, "max_tokens": 9, "num_ctx": 64})
    found = CLAUDE.search(message)
    assert found and found[2] == "64" and "num_ctx" in message


def test_the_clients_own_exceptions_have_the_words(small: Server) -> None:
    gpt = openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0)
    with gpt, pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as raised:
        gpt.responses.create(model="small", input=LONG)
    assert raised.value.code == "context_length_exceeded"
    claude = anthropic.Anthropic(base_url=small.url, api_key="none", max_retries=0)
    with claude, pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(model="small", max_tokens=9, messages=CHAT["messages"])  # type: ignore[arg-type]


def test_a_stream_that_began_with_the_load_fails_with_the_code(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_scripted_model(tmp_path_factory.mktemp("late") / "late.gguf", {"plain": "The answer is short."})
    with start_server("--model", str(path), "--ctx", str(MOST), models=()) as server:
        body = {"model": "late", "input": LONG, "stream": True, "progress": True}
        answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200
    *_, error, failed = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert (error["type"], error["code"]) == ("error", "context_length_exceeded")
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "context_length_exceeded"
    assert failed["sequence_number"] == error["sequence_number"] + 1


def test_texts_to_embed_are_refused_in_the_same_words() -> None:
    told = refusal_of(InputTooLongError("the input has", 600, 512))
    assert told.status == 400 and told.too_long == (600, 512)
    assert "exceeds the context length" in ProtocolRoute.error_body(told)["error"]
    assert ProtocolRoute.error_body(Refusal(400, "no")) == {"error": "no"}


@pytest.mark.parametrize(
    "theirs",
    [
        {"type": "exceed_context_size_error", "message": "the request exceeds it", "n_prompt_tokens": 900, "n_ctx": 64},
        {"message": "This model's maximum context length is 64 tokens. However, you requested 900 tokens."},
        {"message": "prompt is too long: 900 tokens > 64 maximum"},
    ],
)
def test_a_server_behind_says_it_in_its_words_and_we_in_the_clients(theirs: Any, start_server: StartServer) -> None:
    with openai_server() as script:
        script.refusal = (400, {"error": theirs})
        with start_server("--remote", script.address, models=()) as front:
            body = {"model": "tiny", "max_tokens": 9, **CHAT}
            answer = httpx.post(f"{front.url}/v1/messages", json=body, timeout=PATIENCE_S)
            assert answer.status_code == 400
            found = CLAUDE.search(answer.json()["error"]["message"])
            assert found and found.groups() == ("900", "64")
            error = httpx.post(f"{front.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()["error"]
            assert error["code"] == "context_length_exceeded" and QWEN.search(error["message"])


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("your prompt contains at least 2049 input tokens, which exceeds this limit even without any output", 2049),
        ("your prompt contains 3100 input tokens, which exceeds this limit even without any output tokens", 3100),
        ("your prompt contains 90000 characters (more than 8192 characters, which is the upper bound for 2048", 2049),
    ],
)
def test_words_of_newer_vllm(text: str, tokens: int) -> None:
    message = f"This model's maximum context length is 2048 tokens. However, {text}"
    assert _too_long(json.dumps({"error": {"message": message}})) == (tokens, 2048)


def test_other_refusals_of_a_server_behind_are_not_taken_for_it() -> None:
    for text in ("", "[]", '{"error": "no such model"}', '{"n_ctx": 5}', "maximum context length is many tokens"):
        assert _too_long(text) is None
