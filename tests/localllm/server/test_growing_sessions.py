"""Sessions on each protocol whose tools and system messages change on the way: only what is new is computed."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.fakes.scripted_model import TEMPLATE, call, write_scripted_model
from tests.localllm.server.conftest import StartServer
from tests.waiting import PATIENCE_S

SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
# By the number of results so far: two calls at once, then one, then text.
SCRIPTS = {
    "plain": "There is nothing that could be done.",
    "0": "Both of them. " + call("dig", place="under the old oak") + call("fill", place="beside the barn door"),
    "2": call("dig", place="where the river bends"),
    "3": "The garden is in order again, I think.",
}
SLACK = 4  # tokens that end a prompt and are not part of the next one
_NO_LATE = "{{ raise_exception('System message must be at the beginning.') }}"
TEMPLATES = {
    "keeps": TEMPLATE,
    "refuses": TEMPLATE.replace(
        "<|im_start|>{{ message.role }}",
        "{% if message.role == 'system' and not loop.first %}" + _NO_LATE + "{% endif %}<|im_start|>{{ message.role }}",
        1,
    ),
    "without": TEMPLATE.replace(
        "<|im_start|>{{ message.role }}",
        "{% if message.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<|im_start|>{{ message.role }}",
        1,
    ),
}
assert len(set(TEMPLATES.values())) == len(TEMPLATES)


def tool(name: str, about: str = "Works in the garden. ") -> dict[str, Any]:
    return {"name": name, "description": about * 15, "parameters": SCHEMA}


@pytest.fixture(scope="module")
def http(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("growing")
    paths = [write_scripted_model(folder / f"{name}.gguf", SCRIPTS, text) for name, text in TEMPLATES.items()]
    flags = [flag for path in paths for flag in ("--model", str(path))]
    with (
        start_server(*flags, models=(), LOCALLLM_KV_MIB="64") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        yield client


class Session:
    """A client's side of a session in OpenAI's chats. late: the role of later system texts."""

    path = "/v1/chat/completions"
    late = "developer"

    def __init__(self, http: httpx.Client, model: str, topic: str, stream: bool = False) -> None:
        self.http, self.model, self.stream = http, model, stream
        self.messages: list[Any] = []
        self.called: list[str] = []
        self.before = 0
        self.begin(f"You work on {topic}. " * 30)
        self.say("user", "Begin.")

    def begin(self, system: str) -> None:
        self.say("system", system)

    def say(self, role: str, text: str) -> None:
        self.messages.append({"role": role, "content": text})

    def told(self, text: str) -> None:
        """The client tells the model something that is not the user's."""
        self.say(self.late, text)

    def turn(self, *tools: dict[str, Any]) -> None:
        """Send all of it and the results of all calls; nothing that was in the last prompt may be computed again."""
        answer = self.http.post(self.path, json={"model": self.model, "stream": self.stream, **self.body(tools)})
        assert answer.status_code == 200, answer.text
        prompt, cached = self.read(answer)
        assert prompt - cached <= prompt - self.before + SLACK, (prompt, cached, self.before)
        self.before = prompt

    def body(self, tools: tuple[dict[str, Any], ...]) -> dict[str, Any]:
        offered = [{"type": "function", "function": one} for one in tools]
        return {"messages": self.messages, "max_tokens": 200, "tools": offered} | self.usage_wish()

    def usage_wish(self) -> dict[str, Any]:
        return {"stream_options": {"include_usage": True}} if self.stream else {}

    def read(self, answer: httpx.Response) -> tuple[int, int]:
        """Add an answer and its calls' results to the conversation; the tokens of the prompt, and the cached ones."""
        if self.stream:
            chunks = events(answer)
            usage = chunks[-1]["usage"]
            deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
            message: dict[str, Any] = {
                "role": "assistant",
                "content": "".join(one.get("content") or "" for one in deltas),
            }
            calls: dict[int, Any] = {}
            for piece in (piece for one in deltas for piece in one.get("tool_calls") or ()):
                entry = calls.setdefault(
                    piece["index"], {"type": "function", "function": {"name": "", "arguments": ""}}
                )
                entry.update({"id": piece["id"]} if piece.get("id") else {})
                for key, text in piece["function"].items():
                    entry["function"][key] += text
            message |= {"tool_calls": list(calls.values())} if calls else {}
        else:
            usage, message = answer.json()["usage"], answer.json()["choices"][0]["message"]
        self.messages.append(message)
        for one in message.get("tool_calls") or ():
            self.called.append(one["function"]["name"])
            self.messages.append({"role": "tool", "tool_call_id": one["id"], "content": "It is done."})
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def events(answer: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


class Ollama(Session):
    path, late = "/api/chat", "system"

    def body(self, tools: tuple[dict[str, Any], ...]) -> dict[str, Any]:
        return {**super().body(tools), "options": {"num_predict": 200}}

    def usage_wish(self) -> dict[str, Any]:
        return {}

    def read(self, answer: httpx.Response) -> tuple[int, int]:
        parts = [json.loads(line) for line in answer.text.splitlines()]
        messages = [part["message"] for part in parts]
        calls = [one for message in messages for one in message.get("tool_calls") or ()]
        text = "".join(message["content"] for message in messages)
        self.messages.append({"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {}))
        for one in calls:
            self.called.append(one["function"]["name"])
            self.messages.append({"role": "tool", "tool_name": one["function"]["name"], "content": "It is done."})
        return parts[-1]["prompt_eval_count"], parts[-1]["prompt_eval_cached_count"]


class Anthropic(Session):
    path, late = "/v1/messages", "system"

    def begin(self, system: str) -> None:
        self.system = system

    def body(self, tools: tuple[dict[str, Any], ...]) -> dict[str, Any]:
        offered = [{"input_schema" if key == "parameters" else key: one[key] for key in one} for one in tools]
        return {"system": self.system, "messages": self.messages, "max_tokens": 200, "tools": offered}

    def read(self, answer: httpx.Response) -> tuple[int, int]:
        if self.stream:
            found = events(answer)
            usage = found[0]["message"]["usage"]
            usage |= next(one["usage"] for one in found if one["type"] == "message_delta")
            blocks: list[Any] = []
            for one in found:
                if one["type"] == "content_block_start":
                    blocks.append(dict(one["content_block"]))
                    arguments = ""
                elif one["type"] == "content_block_delta":
                    delta = one["delta"]
                    if "text" in delta:
                        blocks[-1]["text"] += delta["text"]
                    else:
                        arguments += delta["partial_json"]
                        blocks[-1]["input"] = arguments
            blocks = [
                {**one, "input": json.loads(one["input"])} if one["type"] == "tool_use" else one for one in blocks
            ]
        else:
            blocks, usage = answer.json()["content"], answer.json()["usage"]
        self.messages.append({"role": "assistant", "content": blocks})
        calls = [one for one in blocks if one["type"] == "tool_use"]
        self.called += [one["name"] for one in calls]
        results = [{"type": "tool_result", "tool_use_id": one["id"], "content": "It is done."} for one in calls]
        self.messages += [{"role": "user", "content": results}] if results else []
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached


class Responses(Session):
    path = "/v1/responses"

    def body(self, tools: tuple[dict[str, Any], ...]) -> dict[str, Any]:
        return {
            "input": self.messages,
            "max_output_tokens": 200,
            "tools": [{"type": "function", **one} for one in tools],
        }

    def read(self, answer: httpx.Response) -> tuple[int, int]:
        found = events(answer)[-1]["response"] if self.stream else answer.json()
        self.keep(found)
        for item in found["output"]:
            if item["type"] == "function_call":
                self.called.append(item["name"])
                output = {"type": "function_call_output", "call_id": item["call_id"], "output": "It is done."}
                self.messages.append(output)
        return found["usage"]["input_tokens"], found["usage"]["input_tokens_details"]["cached_tokens"]

    def keep(self, response: dict[str, Any]) -> None:
        self.messages += response["output"]


class Stored(Responses):
    """The same, with the server keeping the conversation."""

    previous: str | None = None

    def body(self, tools: tuple[dict[str, Any], ...]) -> dict[str, Any]:
        return {**super().body(tools), "previous_response_id": self.previous}

    def keep(self, response: dict[str, Any]) -> None:
        self.previous, self.messages = response["id"], []


PROTOCOLS = [Session, Ollama, Anthropic, Responses, Stored]
Begin = Callable[..., Session]


@pytest.fixture(params=PROTOCOLS, ids=lambda kind: kind.__name__)
def begin(request: pytest.FixtureRequest, http: httpx.Client) -> Begin:
    name = request.node.name
    return lambda model, stream: request.param(http, model, f"the garden of {name}", stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", TEMPLATES)
def test_tools_that_change(begin: Begin, model: str, stream: bool) -> None:
    session = begin(model, stream)
    dig, fill, mow = tool("dig"), tool("fill"), tool("mow", "Mows the lawn. ")
    session.turn(dig, fill)
    session.turn(dig, fill, mow)
    session.turn(mow, fill, tool("dig", "Digs deeper than before. "))
    session.say("user", "Go on.")
    session.turn(fill)
    session.say("user", "And again.")
    session.turn(dig, fill, mow)
    assert session.called == ["dig", "fill", "dig"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", TEMPLATES)
def test_late_system_messages(begin: Begin, model: str, stream: bool) -> None:
    session = begin(model, stream)
    tools = (tool("dig"), tool("fill"))
    session.turn(*tools)
    session.told("The rain has begun. " * 6)
    session.turn(*tools)
    session.told("The user has opened a window.")
    session.told("Two hours are left.")
    session.turn(*tools)
    session.told("It is dark now.")
    session.say("user", "What else?")
    session.told("Be brief.")
    session.turn(*tools)
    assert session.called == ["dig", "fill", "dig"]


@pytest.mark.parametrize("model", TEMPLATES)
def test_late_system_messages_without_tools(begin: Begin, model: str) -> None:
    session = begin(model, False)
    session.turn()
    for text in ("First this.", "Then that. " * 9, "At last the other."):
        session.told(text)
        session.say("user", "Well?")
        session.turn()
