"""What real engines answered to our requests, read again: vLLM 0.32.0, llama-server 0.6.0-dev, mistral.rs 0.9.5.

`tests/fakes/record_engine.py` records a server's answers. mistral.rs's events are those of its Python interface, which
its server sends as JSON.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.answer.event import AnswerEvent, PartKind
from localllm.answer.request import AnswerRequest
from localllm.engine.request import FinishReason
from localllm.remote.connection import RemoteError
from localllm.remote.openai import OpenAIServer
from localllm.settings import Settings
from tests.fakes.openai_server import ScriptedOpenAI, openai_server
from tests.fakes.record_engine import REQUESTS

ENGINES: dict[str, Any] = json.loads((Path(__file__).parents[2] / "fakes" / "engines.json").read_text(encoding="utf-8"))
ALL = tuple(ENGINES)
SERVERS = ("vllm", "llama_server")


@pytest.fixture
def script() -> Iterator[ScriptedOpenAI]:
    with openai_server() as server:
        yield server


def replayed(script: ScriptedOpenAI, engine: str, name: str) -> list[AnswerEvent]:
    script.pieces = ENGINES[engine][name]
    return list(OpenAIServer.at(script.address, Settings()).model("smol").prepare(REQUESTS[name]).submit())


def text_of(updates: list[AnswerEvent], kind: PartKind = PartKind.CONTENT) -> str:
    return "".join(part.text for update in updates for part in update.parts if part.kind is kind)


@pytest.mark.parametrize(
    ("engine", "text", "prompt"),
    [("vllm", "\nThis is a", 21), ("llama_server", "This is a", 21), ("mistralrs", "Hello! I's", 33)],
)
def test_chats(script: ScriptedOpenAI, engine: str, text: str, prompt: int) -> None:
    updates = replayed(script, engine, "chat")
    last = updates[-1]
    assert (text_of(updates), last.finish_reason) == (text, FinishReason.LENGTH)
    assert (last.counts.prompt, last.counts.generated, last.error) == (prompt, 4, None)


@pytest.mark.parametrize("engine", SERVERS)
def test_thoughts_and_completions(script: ScriptedOpenAI, engine: str) -> None:
    thoughts = replayed(script, engine, "thoughts")
    assert text_of(thoughts, PartKind.REASONING).strip() == "I'm here" and not text_of(thoughts)
    updates = replayed(script, engine, "completion")
    assert text_of(updates) == ", the city of" and updates[-1].counts.prompt == 4


@pytest.mark.parametrize("engine", ALL)
def test_schemas(script: ScriptedOpenAI, engine: str) -> None:
    updates = replayed(script, engine, "schema")
    assert isinstance(json.loads(text_of(updates))["n"], int) and updates[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("engine", ALL)
def test_log_probabilities_of_chats(script: ScriptedOpenAI, engine: str) -> None:
    """vLLM and llama-server send that of a token without text with no text; mistral.rs sends no list, and ids."""
    told = [entry for update in replayed(script, engine, "chat_logprobs") for entry in update.logprobs]
    assert [entry.token for entry in told] == ([b"Hello", b"!"] if engine == "mistralrs" else [b"\n", b"This"])
    assert all(entry.top[0] == (entry.token, entry.logprob) and len(entry.top) == 2 for entry in told)


@pytest.mark.parametrize("engine", SERVERS)
def test_log_probabilities_of_completions(script: ScriptedOpenAI, engine: str) -> None:
    told = [entry for update in replayed(script, engine, "completion_logprobs") for entry in update.logprobs]
    assert [(entry.token, len(entry.top)) for entry in told] == [(b"-", 2), (b"in", 2)]


def test_vllm_calls_a_tool_and_holds_a_regular_expression(script: ScriptedOpenAI) -> None:
    updates = replayed(script, "vllm", "tool")
    (call,) = [call for update in updates for part in update.parts for call in part.tool_calls]
    assert (call.name, call.arguments) == ("weather", {"temperature": "19"})
    assert text_of(replayed(script, "vllm", "grammar")) == "yes"
    assert script.asked[-1]["structured_outputs"] == {"regex": "(yes|no)"}


@pytest.mark.parametrize("engine", SERVERS)
def test_models(script: ScriptedOpenAI, engine: str) -> None:
    script.models = ENGINES[engine]["models"]["data"]
    (model,) = OpenAIServer.at(script.address, Settings()).models()
    assert (model.name, model.context, model.llama_cpp) == ("smol", 2048, engine == "llama_server")


@pytest.mark.parametrize(
    ("engine", "name", "words"),
    [
        ("vllm", "wrong_key", "refuses: Unauthorized. Set the server's key: LOCALLLM_REMOTE_KEY"),
        ("vllm", "wrong_model", "The model `absent` does not exist. Valid aliases: smol. Check the model's name"),
        ("vllm", "too_long", "maximum context length is 2048 tokens"),
        ("llama_server", "wrong_key", "refuses: Invalid API Key. Set the server's key: LOCALLLM_REMOTE_KEY"),
        ("llama_server", "too_long", "request (5001 tokens) exceeds the available context size (2048 tokens)"),
    ],
)
def test_refusals(script: ScriptedOpenAI, engine: str, name: str, words: str) -> None:
    status, body = ENGINES[engine][name]
    script.refusal = (status, body)
    prompt = OpenAIServer.at(script.address, Settings()).model("smol").prepare(REQUESTS["chat"])
    (last,) = prompt.submit()
    assert isinstance(last.cause, RemoteError) and last.cause.status == status and words in str(last.error)
    expected = {"vllm": (2049, 2048), "llama_server": (5001, 2048)}[engine] if name == "too_long" else None
    assert last.cause.too_long == expected


def test_a_route_that_a_model_is_not_for(script: ScriptedOpenAI) -> None:
    script.refusal = (404, {"detail": "Not Found"})
    model = OpenAIServer.at(script.address, Settings()).model("smol")
    with pytest.raises(RemoteError, match="it has no /v1/embeddings, so its model is not for that") as refused:
        model.embed(["a"], truncate=True, dimensions=None)
    assert refused.value.status == 501


def test_an_ignored_format_of_a_completion_is_an_error(script: ScriptedOpenAI) -> None:
    """vLLM with --reasoning-parser waits for the end of thoughts that a prompt without a template does not begin."""
    model = OpenAIServer.at(script.address, Settings()).model("smol")
    script.pieces = ENGINES["vllm"]["completion"]
    for form in ("json", {"type": "object"}):
        last = list(model.prepare(AnswerRequest(prompt="Once", format=form)).submit())[-1]
        assert last.finish_reason is FinishReason.ERROR
        assert "ignores the format: its answer begins with ','" in str(last.error)
    script.pieces = [{"choices": [{"text": " \n"}]}, {"choices": [{"text": '{"n": 1}', "finish_reason": "stop"}]}]
    assert text_of(list(model.prepare(AnswerRequest(prompt="Once", format="json")).submit())) == ' \n{"n": 1}'
