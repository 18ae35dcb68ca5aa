"""Stop strings in thoughts, and texts around calls, over every protocol, streamed and not."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes.scripted_model import call, write_scripted_model
from tests.localllm.server.conftest import StartServer
from tests.waiting import PATIENCE_S

SCRIPTS = {
    "plain": "<think>\nFirst plan. STOP is a word here.\n</think>\n\nAnswer one. STOP after it.",
    "0": f"I will look.\n{call('look', place='over STOP there')}\nAfter that we see.",
    "1": 'No markers now:\n\n```json\n{"name": "look", "arguments": {"place": "far away"}}\n```\nAnd done is it.',
}
HI = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def http(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = write_scripted_model(tmp_path_factory.mktemp("scripted") / "scripted.gguf", SCRIPTS)
    with (
        start_server("--model", str(path), models=()) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        yield client


def told(http: httpx.Client, path: str, stream: bool, **body: Any) -> list[Any]:
    """The objects of an answer, one without streaming."""
    answer = http.post(path, json={"model": "scripted", "stream": stream, **body})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()] if stream else [answer.text]
    return [json.loads(line) for line in lines if line.startswith("{")]


def of_responses(objects: list[Any], stream: bool) -> tuple[str, list[str]]:
    output = objects[-1]["response"]["output"] if stream else objects[0]["output"]
    texts = [part["text"] for one in output if one["type"] == "message" for part in one["content"]]
    calls = [one["arguments"] for one in output if one["type"] == "function_call"]
    if stream:
        pieces = [one["delta"] for one in objects if one["type"] == "response.output_text.delta"]
        assert "".join(pieces) == "".join(texts)
    return "".join(texts), calls


def of_chats(objects: list[Any], stream: bool) -> tuple[str, list[str]]:
    messages = [one["choices"][0]["delta" if stream else "message"] for one in objects if one["choices"]]
    found: dict[int, str] = {}
    for message in messages:
        for one in message.get("tool_calls") or []:
            found[one.get("index", 0)] = found.get(one.get("index", 0), "") + (one["function"].get("arguments") or "")
    return "".join(message.get("content") or "" for message in messages), list(found.values())


def of_ollamas_chats(objects: list[Any], stream: bool) -> tuple[str, list[str]]:
    calls = [
        json.dumps(one["function"]["arguments"]) for told in objects for one in told["message"].get("tool_calls", [])
    ]
    return "".join(told["message"]["content"] for told in objects), calls


def of_messages(objects: list[Any], stream: bool) -> tuple[str, list[str]]:
    if not stream:
        blocks = objects[0]["content"]
        texts = [one["text"] for one in blocks if one["type"] == "text"]
        return "".join(texts), [json.dumps(one["input"]) for one in blocks if one["type"] == "tool_use"]
    deltas = [one["delta"] for one in objects if one["type"] == "content_block_delta"]
    calls = "".join(one.get("partial_json", "") for one in deltas)
    return "".join(one.get("text", "") for one in deltas), [calls] if calls else []


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_count_behind_the_thoughts(http: httpx.Client, stream: bool) -> None:
    chat = {"messages": HI, "stop": ["STOP"]}
    found = [
        of_chats(told(http, "/v1/chat/completions", stream, **chat), stream)[0],
        of_ollamas_chats(told(http, "/api/chat", stream, messages=HI, options={"stop": ["STOP"]}), stream)[0],
        of_messages(told(http, "/v1/messages", stream, messages=HI, max_tokens=99, stop_sequences=["STOP"]), stream)[0],
        "".join(
            one["response"] for one in told(http, "/api/generate", stream, prompt="Hi", options={"stop": ["STOP"]})
        ),
    ]
    assert [text.strip() for text in found] == ["Answer one."] * len(found)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_count_everywhere_in_text_without_a_template(http: httpx.Client, stream: bool) -> None:
    """These routes continue the prompt as it is, so there are no thoughts."""
    body = {"model": "scripted", "content": "<|script:plain|>", "parse_special": True}
    prompt = http.post("/tokenize", json=body).json()["tokens"]
    assert len(prompt) == 1
    plain = "".join(one["content"] for one in told(http, "/completion", stream, prompt=prompt, stop=["STOP"]))
    chunks = told(http, "/v1/completions", stream, prompt=prompt, stop=["STOP"], max_tokens=99)
    assert plain == "".join(one["choices"][0]["text"] for one in chunks if one["choices"]) == "<think>\nFirst plan. "


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("results", [0, 1], ids=["markers", "no markers"])
def test_texts_around_calls(http: httpx.Client, stream: bool, results: int) -> None:
    used = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"place": "x"}'}}
    chat = [
        *HI,
        *(
            [{"role": "assistant", "tool_calls": [used]}, {"role": "tool", "tool_call_id": "c1", "content": "y"}]
            * results
        ),
    ]
    ollamas = [
        *HI,
        *(
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "look", "arguments": {"place": "x"}}}],
                },
                {"role": "tool", "content": "y"},
            ]
            * results
        ),
    ]
    items = [
        *HI,
        *(
            [
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"place": "x"}'},
                {"type": "function_call_output", "call_id": "c1", "output": "y"},
            ]
            * results
        ),
    ]
    blocks = [
        *HI,
        *(
            [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"place": "x"}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "y"}]},
            ]
            * results
        ),
    ]
    function = {"type": "function", "name": "look", "parameters": SCHEMA}
    found = [
        of_chats(told(http, "/v1/chat/completions", stream, messages=chat, tools=[TOOL], stop=["STOP"]), stream),
        of_responses(told(http, "/v1/responses", stream, input=items, tools=[function]), stream),
        of_ollamas_chats(
            told(http, "/api/chat", stream, messages=ollamas, tools=[TOOL], options={"stop": ["STOP"]}), stream
        ),
        of_messages(
            told(
                http, "/v1/messages", stream, messages=blocks, max_tokens=99, stop_sequences=["STOP"],
                tools=[{"name": "look", "input_schema": SCHEMA}],
            ),
            stream,
        ),
    ]  # fmt: skip
    texts = ["I will look. After that we see.", "No markers now: And done is it."]
    places = ["over STOP there", "far away"]
    for text, calls in found:
        assert text.split() == texts[results].split()
        assert [json.loads(one) for one in calls] == [{"place": places[results]}]
