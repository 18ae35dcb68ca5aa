"""Tools that a conversation loads later: definitions stand where they are loaded, and nothing is computed twice."""

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest

from localllm.server.anthropic.requests import PLACEHOLDER, CountBody, conversation
from tests.fakes.scripted_model import call, write_scripted_model
from tests.localllm.server.conftest import StartServer
from tests.waiting import PATIENCE_S

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
SEARCH = {"name": "FindTools", "description": "Find tools.", "input_schema": {"type": "object"}}
CORE = [{"name": f"core_{at}", "description": "Does much. " * 30, "input_schema": SCHEMA} for at in range(8)]
DEFERRED = [
    {"name": name, "description": f"{name} is for rare work. " * 8, "input_schema": SCHEMA, "defer_loading": True}
    for name in ("archive", "blame", "zip_up", "move")
]
WAITING = {"name": PLACEHOLDER, "description": "Never call this.", "input_schema": {}, "defer_loading": True}
FOUND = (["zip_up"], ["archive", "blame"], ["move", "archive"])  # what each search finds
SCRIPTS = {
    "plain": "There is nothing to do here.",
    "0": call("FindTools", query="packing files"),
    "1": call("FindTools", query="old versions of it"),
    "2": "One more. " + call("FindTools", query="renaming"),
    "3": call("blame", path="src/main.py"),
    "4": call("zip_up", path="everything/below"),
    "5": "All of it has been done now.",
}


@pytest.fixture(scope="module")
def http(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = write_scripted_model(tmp_path_factory.mktemp("deferred") / "agent.gguf", SCRIPTS)
    with (
        start_server("--model", str(path), models=(), LOCALLLM_KV_MIB="64") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        yield client


def results(blocks: list[Any], found: list[str]) -> list[Any]:
    """The tools' results: references from a search, else text."""
    references = [{"type": "tool_reference", "tool_name": name} for name in found]
    return [
        {
            "type": "tool_result",
            "tool_use_id": block["id"],
            "content": references if block["name"] == "FindTools" else "It is done.",
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]


def session(http: httpx.Client, topic: str, tools: Callable[[set[str]], list[Any]]) -> tuple[list[str], int, int]:
    """An agent's session: the tools that were called, all tokens that were computed, and those of the last prompt.

    tools: those that the agent sends once it has found some.
    """
    messages: list[Any] = [{"role": "user", "content": f"Work on {topic}."}]
    system = f"You are an agent for {topic}. " * 40
    called: list[str] = []
    computed, prompt, known = 0, 0, set[str]()
    for turn in range(len(SCRIPTS) - 1):
        offered = [{**SEARCH, "description": f"For {topic}."} if tool is SEARCH else tool for tool in tools(known)]
        body = {"model": "agent", "max_tokens": 200, "system": system, "messages": messages, "tools": offered}
        answer = http.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        blocks, usage = answer.json()["content"], answer.json()["usage"]
        computed += usage["input_tokens"]
        prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        called += [block["name"] for block in blocks if block["type"] == "tool_use"]
        found = FOUND[turn] if turn < len(FOUND) else []
        known.update(found)
        messages += [{"role": "assistant", "content": blocks}]
        messages += [{"role": "user", "content": told}] if (told := results(blocks, found)) else []
    return called, computed, prompt


def as_claude_code(known: set[str]) -> list[Any]:
    """Only tools that were found are sent, among the others by name; before, a placeholder stands for them."""
    loaded = [tool for tool in DEFERRED if tool["name"] in known]
    return sorted([SEARCH, *CORE, *(loaded or [WAITING])], key=lambda tool: str(tool["name"]))


def as_documented(_known: set[str]) -> list[Any]:
    """All deferred tools are sent with each request, as Anthropic's documentation says."""
    return [*DEFERRED, SEARCH, *CORE]


@pytest.mark.parametrize("tools", [as_claude_code, as_documented])
def test_searches_for_tools_compute_nothing_twice(http: httpx.Client, tools: Any) -> None:
    called, computed, prompt = session(http, tools.__name__, tools)
    assert called == ["FindTools", "FindTools", "FindTools", "blame", "zip_up"]
    assert 0.9 * prompt < computed <= 1.05 * prompt


def asked(tools: list[Any], *contents: Any, **more: Any) -> Any:
    messages: Any = [
        {"role": "user", "content": "Go."},
        *({"role": "user", "content": [content]} for content in contents),
    ]
    return conversation(CountBody(messages=messages, tools=tools, **more))


def named(request: Any) -> tuple[list[str], list[str]]:
    """The names of the tools in the prompt's list, and of those that messages define."""
    names = [tool["function"]["name"] for tool in request["tools"]]
    return [name for name in names if name not in request["described"]], list(request["described"])


def result(*references: str) -> Any:
    content = [{"type": "tool_reference", "tool_name": name} for name in references]
    return {"type": "tool_result", "tool_use_id": "t1", "content": content}


def test_a_definition_is_placed_at_the_first_reference() -> None:
    request = asked([SEARCH, *DEFERRED], result("move", "unheard_of", "FindTools"), result("move", "blame"))
    assert named(request) == (["FindTools"], ["move", "blame"])
    first, second = (message["content"] for message in request["messages"] if message["role"] == "tool")
    assert first.count('"name": "move"') == 1 and first.endswith("\nunheard_of\nFindTools")
    assert second.startswith("move\n") and '"name": "blame"' in second and '"name": "move"' not in second


def test_references_count_wherever_they_stand() -> None:
    nested = {"type": "tool_reference", "tool_name": "archive"}
    search = {"type": "search_result", "title": "T", "source": "s", "content": [nested]}
    assert named(asked([SEARCH, *DEFERRED], search))[1] == ["archive"]
    assert named(asked([SEARCH, *DEFERRED], nested))[1] == ["archive"]


def test_a_call_of_a_tool_that_was_not_loaded_loads_it() -> None:
    """Such as in a conversation that began elsewhere. The definition stands behind the call's result."""
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "t7", "name": "zip_up", "input": {}}]}
    for content in ("packed", [{"type": "text", "text": "packed"}], None):
        told: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t7", "content": content}]}
        later: Any = {"role": "user", "content": [result("zip_up")]}
        messages: Any = [{"role": "user", "content": "Go."}, called, told, later]
        request = conversation(CountBody(messages=messages, tools=[SEARCH, *DEFERRED]))
        assert named(request) == (["FindTools"], ["zip_up"])
        first, second = (message["content"] for message in request["messages"] if message["role"] == "tool")
        assert first.startswith("packed" if content else "This tool") and '"name": "zip_up"' in first
        assert second == "zip_up"


def change(kind: str, name: str = "", **definition: Any) -> Any:
    """A system message that adds or removes a tool, as Claude Code sends them for MCP servers that come late."""
    tool: Any = {"type": "tool_reference", "name": name}
    if definition:
        tool = {"type": "tool_definition", "definition": {"name": name, "input_schema": SCHEMA, **definition}}
    return {"role": "system", "content": [{"type": kind, "tool": tool}]}


def test_tools_are_added_and_removed_by_messages() -> None:
    def told(*changes: Any) -> tuple[Any, list[str]]:
        messages: Any = [{"role": "user", "content": "Go."}, *changes]
        request = conversation(CountBody(messages=messages, tools=[SEARCH, *DEFERRED]))
        return request, [message["content"] for message in request["messages"] if message["role"] == "system"]

    request, (added,) = told(change("tool_addition", "blame"))
    assert named(request) == (["FindTools"], ["blame"]) and '"name": "blame"' in added and request["allowed"] is None
    request, (added, again) = told(*[change("tool_addition", name="dig", description="Digs.")] * 2)
    assert named(request) == (["FindTools"], ["dig"]) and "Digs." in added and again == "dig"
    request, (gone,) = told(change("tool_removal", "FindTools"))
    assert gone == "No longer to be called: FindTools."
    assert named(request) == (["FindTools"], []) and request["allowed"] == set()
    changes = ("tool_addition", "tool_removal", "tool_addition")
    request, texts = told(*(change(kind, "zip_up") for kind in changes), change("tool_removal", "FindTools"))
    assert [text[:9] for text in texts] == ["This tool", "No longer", "This tool", "No longer"]
    assert named(request) == (["FindTools"], ["zip_up"]) and request["allowed"] == {"zip_up"}


def test_an_added_tool_is_called_and_a_removed_one_is_not(http: httpx.Client) -> None:
    finder = {key: SEARCH[key] for key in ("description", "input_schema")}
    for changes, wanted in (
        ([change("tool_addition", name="FindTools", **finder)], ["FindTools"]),
        ([change("tool_addition", name="FindTools", **finder), change("tool_removal", "FindTools")], []),
    ):
        messages: Any = [{"role": "user", "content": "Go."}, *changes]
        body = {"model": "agent", "max_tokens": 200, "messages": messages, "tools": CORE[:1]}
        answer = http.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        called = [block["name"] for block in answer.json()["content"] if block["type"] == "tool_use"]
        assert [name for name in called if name == "FindTools"] == wanted
    for wrong in ({"type": "tool_definition"}, {"type": "tool_definition", "definition": {"name": ""}}):
        messages = [{"role": "user", "content": [{"type": "tool_addition", "tool": wrong}]}]
        refused = http.post("/v1/messages", json=body | {"messages": messages})
        assert refused.status_code == 400 and "needs a" in refused.json()["error"]["message"]
    messages = [{"role": "user", "content": [{"type": "tool_addition", "tool": {"type": "mcp_toolset_reference"}}]}]
    answer = http.post("/v1/messages", json=body | {"messages": messages})
    assert answer.json()["warnings"] == ["Ignored: block of type 'tool_addition'."]


def test_the_summary_of_a_compacted_conversation_is_read() -> None:
    blocks = [{"type": "compaction", "content": "They sorted the letters."}, {"type": "text", "text": "And now?"}]
    (message,) = conversation(CountBody(messages=[{"role": "user", "content": blocks}]))["messages"]  # type: ignore[list-item]
    assert message["content"] == "Summary of the conversation so far:\nThey sorted the letters.\nAnd now?"


def test_a_reference_to_no_tool_is_named_in_the_answer(http: httpx.Client) -> None:
    messages: Any = [{"role": "user", "content": "Go."}, {"role": "user", "content": [result("sell", "move")]}]
    body = {"model": "agent", "max_tokens": 200, "messages": messages, "tools": [SEARCH, *DEFERRED]}
    answer = http.post("/v1/messages", json=body).json()
    assert answer["warnings"] == ["Ignored: reference to the tool 'sell', which the request does not have."]


@pytest.mark.parametrize(
    ("tools", "more", "listed"),
    [
        ([SEARCH, WAITING, *DEFERRED], {}, ["FindTools"]),
        ([SEARCH, {**WAITING, "defer_loading": False}], {}, ["FindTools"]),
        ([SEARCH, *DEFERRED[:2]], {"tool_choice": {"type": "tool", "name": "blame"}}, ["FindTools", "blame"]),
        ([SEARCH, *DEFERRED[:2]], {"tool_choice": {"type": "none"}}, ["FindTools"]),
        (
            [*DEFERRED[:2], {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}],
            {},
            ["archive", "blame"],
        ),
    ],
)
def test_which_tools_the_prompt_lists(tools: list[Any], more: Any, listed: list[str]) -> None:
    assert named(asked(tools, **more)) == (listed, [])


def test_tokens_are_counted_with_the_definitions_in_place(http: httpx.Client) -> None:
    def counted(*contents: Any) -> int:
        request: Any = [{"role": "user", "content": "Go."}, {"role": "user", "content": list(contents)}]
        body = {"model": "agent", "messages": request, "tools": [SEARCH, *DEFERRED]}
        answer = http.post("/v1/messages/count_tokens", json=body)
        return int(answer.json()["input_tokens"])

    text = {"type": "text", "text": "x"}
    assert counted(text, result("move")) - counted(text, result()) > 100


def test_the_sdks_types_of_deferred_tools_are_accepted(http: httpx.Client) -> None:
    with anthropic.Anthropic(base_url=str(http.base_url), api_key="none", max_retries=0) as claude:
        message = claude.beta.messages.create(
            model="agent",
            max_tokens=100,
            messages=[{"role": "user", "content": "Go."}],
            tools=[SEARCH, *DEFERRED],  # type: ignore[list-item]
            betas=["advanced-tool-use-2025-11-20"],
        )
    assert message.stop_reason == "tool_use" and message.content[0].name == "FindTools"  # type: ignore[union-attr]
