"""Tools that a client adds, changes or removes within a conversation: what was computed before stays."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from localllm.answer.late_tools import MOST_KEPT, Known, ToolHistory, definitions, history_of
from tests.fakes.scripted_model import TEMPLATE, call, write_scripted_model
from tests.localllm.server.conftest import StartServer
from tests.waiting import PATIENCE_S

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
SCRIPTS = {
    "plain": "Nothing to do here at all.",
    "0": call("weigh", path="the first of the boxes"),
    "1": call("paint", path="a red box, and another"),
    "2": call("weigh", path="once more, to be sure of it"),
    "3": "That was the whole of it.",
}
# As Qwen 3.5's: a late system message is refused.
REFUSES = TEMPLATE.replace(
    "{%- for message in messages %}",
    '{%- for message in messages %}{% if message.role == "system" and not loop.first %}'
    '{{ raise_exception("System message must be at the beginning.") }}{% endif %}',
    1,
)


def tool(name: str, description: str = "Does a thing with boxes. ") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description * 20, "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def http(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("changing")
    paths = [
        write_scripted_model(folder / f"{name}.gguf", SCRIPTS, template)
        for name, template in (("keeps", TEMPLATE), ("refuses", REFUSES))
    ]
    marked = {"plain": SCRIPTS["plain"], "0": call("weigh", box="the largest of them all")}
    paths.append(write_scripted_model(folder / "marked.gguf", marked, mark="<tool_call>"))
    flags = [flag for path in paths for flag in ("--model", str(path))]
    with (
        start_server(*flags, models=(), LOCALLLM_KV_MIB="64") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        yield client


class Chat:
    """A conversation: each turn sends all of it, and the results of all calls."""

    def __init__(self, http: httpx.Client, model: str, topic: str) -> None:
        self._http, self._model = http, model
        self.messages: list[Any] = [
            {"role": "system", "content": f"You work on {topic}. " * 40},
            {"role": "user", "content": f"Begin with {topic}."},
        ]
        self.called: list[str] = []

    def turn(self, *tools: dict[str, Any], **more: Any) -> tuple[int, int]:
        """The tokens of the prompt, and how many of them were computed."""
        body = {"model": self._model, "messages": self.messages, "max_tokens": 200, **more}
        answer = self._http.post("/v1/chat/completions", json=body | ({"tools": list(tools)} if tools else {}))
        assert answer.status_code == 200, answer.text
        usage, message = answer.json()["usage"], answer.json()["choices"][0]["message"]
        self.messages.append(message)
        for one in message.get("tool_calls") or ():
            self.called.append(one["function"]["name"])
            self.messages.append({"role": "tool", "tool_call_id": one["id"], "content": "Done."})
        return usage["prompt_tokens"], usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("model", ["keeps", "refuses"])
def test_tools_that_come_and_go_cost_their_definitions(http: httpx.Client, model: str) -> None:
    chat = Chat(http, model, f"boxes that {model}")
    weigh, paint, mark = tool("weigh"), tool("paint", "Paints boxes. "), tool("mark")
    first, computed = chat.turn(weigh, mark)
    assert computed > first // 2
    before = first
    for tools in ((paint, mark, weigh), (mark, paint, tool("weigh", "Weighs again. ")), (mark, paint)):
        prompt, computed = chat.turn(*tools)
        assert computed <= 1.05 * (prompt - before), tools
        before = prompt
    assert chat.called == ["weigh", "paint", "weigh"]
    chat.messages.append({"role": "user", "content": "And now?"})
    prompt, computed = chat.turn(mark, weigh)
    assert computed <= 1.05 * (prompt - before)


def test_a_removed_tool_is_not_called(http: httpx.Client) -> None:
    chat = Chat(http, "keeps", "removal")
    chat.turn(tool("weigh"), tool("pour"))
    chat.turn(tool("weigh"), tool("pour"))  # the script says paint, which is not offered
    chat.turn(tool("pour"))  # it says weigh, which no longer is
    assert chat.called[0] == "weigh" and "paint" not in chat.called and chat.called[2:] == ["pour"]


def test_tools_are_in_the_prompts_list_where_a_conversation_begins_or_has_begun_without(http: httpx.Client) -> None:
    chat = Chat(http, "keeps", "beginnings")
    none, _ = chat.turn()
    chat.messages.append({"role": "user", "content": "Use tools."})
    some, computed = chat.turn(tool("weigh", "Comes late to a chat without any. "))
    assert computed > some - none  # the list is at the front
    chat = Chat(http, "keeps", "beginnings")
    chat.turn(tool("paint"))
    again = Chat(http, "keeps", "beginnings")
    prompt, computed = again.turn(tool("weigh"))  # the same beginning with other tools is another conversation
    assert computed > prompt // 2


def test_conversations_that_begin_alike_keep_their_own_tools(http: httpx.Client) -> None:
    """Two programs at once whose first messages are the same, of which each also gets a tool later."""
    chats = [Chat(http, "keeps", "the same beginning") for _ in range(2)]
    own = [tool("weigh", "Weighs, for the one. "), tool("weigh", "Weighs, for the other. ")]
    later = [tool("paint", "Paints, for the one. "), tool("paint", "Paints, for the other. ")]
    prompts = [chat.turn(first)[0] for chat, first in zip(chats, own, strict=True)]
    for chat, first, second, prompt in zip(chats, own, later, prompts, strict=True):
        longer, computed = chat.turn(first, second)
        assert computed <= 1.05 * (longer - prompt)
        assert longer - prompt < len(definitions([first, second]))  # a byte a token: told of the second one only
        assert chat.called == ["weigh", "paint"]


def test_tools_that_are_not_allowed_stay_in_the_prompt(http: httpx.Client) -> None:
    chat = Chat(http, "keeps", "permission")
    both = (tool("weigh"), tool("pour"))
    prompt, _ = chat.turn(*both)
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "pour"}}]}}
    longer, computed = chat.turn(*both, tool_choice=only)
    assert computed <= 1.05 * (longer - prompt) and chat.called == ["weigh", "pour"]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_without_tool_calls_the_tools_stay_in_the_prompt(http: httpx.Client, route: str) -> None:
    function = tool("weigh", f"Weighs boxes of {route}. ")["function"]
    anthropic, responses = route == "/v1/messages", route == "/v1/responses"
    body: dict[str, Any] = {"model": "marked", "max_tokens": 200}
    messages = [{"role": "user", "content": f"Weigh the boxes of {route}."}]
    if anthropic:
        body["tools"] = [{"name": function["name"], "input_schema": function["parameters"]}]
    else:
        body["tools"] = [{"type": "function", **function} if responses else {"type": "function", "function": function}]
    if responses:
        body["max_output_tokens"] = body.pop("max_tokens")

    def asked(choice: str) -> tuple[dict[str, Any], int, int]:
        given = {"type": choice} if anthropic else choice
        answer = http.post(route, json={**body, "input" if responses else "messages": messages, "tool_choice": given})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        if anthropic:
            cached = usage["cache_read_input_tokens"]
            return answer.json(), cached + usage["input_tokens"] + usage["cache_creation_input_tokens"], cached
        details = usage["input_tokens_details" if responses else "prompt_tokens_details"]
        return answer.json(), usage["input_tokens" if responses else "prompt_tokens"], details["cached_tokens"]

    first, prompt, _ = asked("auto")
    again, longer, cached = asked("none")
    assert longer == prompt and cached >= prompt - 2
    assert "weigh" in str(first) and "largest" in str(first) and "largest" not in str(again)


def test_the_last_requests_are_remembered_each_for_its_owner() -> None:
    known: Known = {}
    hi, reply, go = ({"role": role, "content": "x"} for role in ("user", "assistant", "user"))
    one, two = tool("one"), tool("two")
    history_of(known, [hi], [one], "a")
    late = history_of(known, [hi, reply, go], [one, two], "a")
    assert [each["function"]["name"] for each in late.listed] == ["one"] and late.changes[0][0] == 2
    assert history_of(known, [hi, reply, go], [one, two], "a") == late  # the same request gets the same prompt
    assert len(history_of(known, [hi, reply, go], [one, two], "b").listed) == 2
    image = {"role": "user", "content": [{"type": "image", "data": b"\x89PNG"}]}
    for at in range(MOST_KEPT + 9):
        history_of(known, [image, {"role": "user", "content": str(at)}], [one], "a")
    assert len(known) == MOST_KEPT
    assert len(history_of(known, [hi, reply, go], [one, two], "a").listed) == 2


def test_a_conversation_continues_the_request_whose_tools_are_most_like_its_own() -> None:
    known: Known = {}
    hi, reply, go = ({"role": role, "content": "x"} for role in ("user", "assistant", "user"))
    one, two, three = tool("one"), tool("two"), tool("three")
    for tools in ([one], [two, three]):
        history_of(known, [hi], tools, "a")
    for tools, listed in (([one], "one"), ([one, three], "one"), ([three], "two")):
        found = history_of(known, [hi, reply, go], tools, "a")
        assert found.listed[0]["function"]["name"] == listed
    for newest in (tool("four"), one):  # of those that differ by one tool
        history_of(known, [hi], [newest], "a")
        assert history_of(known, [hi, reply, go], [], "a").listed[0]["function"]["name"] == newest["function"]["name"]


def test_a_tool_change_follows_results_and_precedes_other_messages() -> None:
    history = ToolHistory([], {}, ((1, "A"), (2, "B"), (3, "C")))
    parts = [{"type": "text", "text": "r"}]
    messages = [{"role": "user", "content": "q"}, *({"role": "tool", "content": one} for one in ("r", parts))]
    found = history.told([*messages, {"role": "user", "content": "next"}])
    assert [message["role"] for message in found] == ["user", "tool", "tool", "system", "user"]
    assert found[1]["content"] == "r\n\nA" and found[2]["content"] == [*parts, {"type": "text", "text": "B"}]
    assert found[3]["content"] == "C"
