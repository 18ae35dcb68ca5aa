"""Tools that a client runs and requests name by their type only; what is ignored is told in the answer."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from localllm.server.openai.items import conversation_of
from tests.fakes.scripted_model import call, write_scripted_model
from tests.localllm.server.conftest import StartServer
from tests.waiting import PATIENCE_S

PATCH = {"type": "update_file", "path": "src/a.py", "diff": "@@\n-one line\n+another line\n"}
SCRIPTS = {
    "plain": "Nothing is to be done here.",
    "0": call("local_shell", command=["ls", "-l", "src"], working_directory="/srv/somewhere"),
    "1": call("shell", commands=["make test", "git status"], timeout_ms=1000),
    "2": call("apply_patch", **PATCH),
    "3": call("tool_search", query="weather in a town"),
    "4": call("forecast__today", town="Leipzig an der Pleiße".encode("ascii", "ignore").decode()),
    "5": "That was everything there was.",
}
EDITS = {
    "plain": "Nothing is to be done at all.",
    "0": call("bash", command="grep -rn later src"),
    "1": call("str_replace_based_edit_tool", command="view", path="src/main.py", view_range=[1, 9]),
    "2": call("memory", command="create", path="/memories/todo.md", file_text="Remember the milk, please."),
    "3": "All three of them were called.",
}
TOWN = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
FORECAST: Any = {
    "type": "namespace",
    "name": "forecast",
    "description": "Weather.",
    "tools": [{"type": "function", "name": "today", "description": "D.", "parameters": TOWN, "defer_loading": True}],
}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Find tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
TOOLS: Any = [{"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}, SEARCH, FORECAST]
ANTHROPICS: Any = [
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "memory_20250818", "name": "memory"},
]
GO: list[Any] = [{"role": "user", "content": "Go."}]
OUTPUTS: Any = {
    "local_shell_call": lambda one: {"type": "local_shell_call_output", "id": one["call_id"], "output": "two files"},
    "shell_call": lambda one: {
        "type": "shell_call_output",
        "call_id": one["call_id"],
        "output": [
            {"stdout": "passed", "stderr": "", "outcome": {"type": "exit", "exit_code": 3}},
            {"stdout": "", "stderr": "slow", "outcome": {"type": "timeout"}},
        ],
    },
    "apply_patch_call": lambda one: {
        "type": "apply_patch_call_output",
        "call_id": one["call_id"],
        "status": "completed",
    },
    "tool_search_call": lambda one: {
        "type": "tool_search_output",
        "execution": "client",
        "call_id": one["call_id"],
        "status": "completed",
        "tools": [FORECAST],
    },
    "function_call": lambda one: {"type": "function_call_output", "call_id": one["call_id"], "output": "sunny"},
}


@pytest.fixture(scope="module")
def http(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("client-tools")
    paths = [
        write_scripted_model(folder / f"{name}.gguf", scripts)
        for name, scripts in (("shells", SCRIPTS), ("edits", EDITS))
    ]
    flags = [flag for path in paths for flag in ("--model", str(path))]
    with (
        start_server(*flags, models=()) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_shells_patches_and_searches_of_responses(http: httpx.Client, stream: bool) -> None:
    """Each call comes in its own form, its result is read, and a tool that a search has found can be called."""
    items: list[Any] = [{"role": "user", "content": "Go."}]
    calls: list[Any] = []
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as gpt:
        for _ in range(6):
            asked: Any = {"model": "shells", "input": items, "tools": TOOLS, "store": False}
            if stream:
                with gpt.responses.stream(**asked) as events:
                    for _event in events:
                        pass
                    answer = events.get_final_response()
            else:
                answer = gpt.responses.create(**asked)
            for item in answer.output:
                items.append(item.to_dict())
                if item.type in OUTPUTS:
                    calls.append(item)
                    items.append(OUTPUTS[item.type](item.to_dict()))
    local, shell, patch, search, forecast = calls
    assert local.type == "local_shell_call" and local.action.command == ["ls", "-l", "src"]
    assert (local.action.type, local.action.working_directory, local.action.env) == ("exec", "/srv/somewhere", {})
    assert shell.action.commands == ["make test", "git status"] and shell.action.timeout_ms == 1000
    assert patch.operation.to_dict() == PATCH and search.execution == "client"
    assert search.arguments == {"query": "weather in a town"}
    assert (forecast.name, forecast.namespace) == ("today", "forecast")
    assert answer.output_text == "That was everything there was."
    results = [message["content"] for message in conversation_of(items) if message["role"] == "tool"]
    assert results[:3] == ["two files", "passed\nExit code 3.\nslow\nIt timed out.", "The status is completed."]
    assert "can be called now" in results[3] and "forecast__today" in results[3]
    sent = [one["function"] for message in conversation_of(items) for one in message.get("tool_calls", ())]
    assert sent[0]["arguments"] == {"command": ["ls", "-l", "src"], "working_directory": "/srv/somewhere"}
    assert sent[1]["arguments"] == {"commands": ["make test", "git status"], "timeout_ms": 1000}


def test_tools_that_a_conversation_adds(http: httpx.Client) -> None:
    """They are defined where they are added, and may be called from then on."""
    patch = {"role": "developer", "type": "additional_tools", "tools": [{"type": "apply_patch"}]}
    results = [
        item
        for at in "12"
        for item in (
            {"type": "function_call", "call_id": at, "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": at, "output": "seen"},
        )
    ]
    body: Any = {"model": "shells", "tools": [{"type": "function", "name": "look", "parameters": {}}]}
    body["input"] = [*GO, *results, patch, *GO]
    (item,) = http.post("/v1/responses", json=body).json()["output"]
    assert item["type"] == "apply_patch_call" and item["operation"] == PATCH
    roles = [message["role"] for message in conversation_of(body["input"])]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "developer", "user"]
    trigger = http.post("/v1/responses", json=body | {"input": [*GO, {"type": "compaction_trigger"}]})
    assert trigger.status_code == 400 and "/v1/responses/compact" in trigger.text
    refused = http.post("/v1/responses", json=body | {"input": [*GO, {"type": "additional_tools"}]})
    assert refused.status_code == 400 and "needs tools as a list" in refused.text


def test_a_search_that_the_service_ran_has_no_call_id() -> None:
    found = conversation_of(
        [
            {
                "type": "tool_search_call",
                "id": "tsc_1",
                "call_id": None,
                "execution": "server",
                "arguments": {"query": "x"},
            },
            {"type": "tool_search_output", "id": "tso_1", "call_id": None, "execution": "server", "tools": [FORECAST]},
        ]
    )
    assert [message["role"] for message in found] == ["assistant", "tool"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Go.", "tools": [{"type": "function", "name": ""}]}),
        ("/v1/chat/completions", {"messages": GO, "tools": [{"type": "function", "function": {"name": ""}}]}),
        ("/v1/messages", {"max_tokens": 5, "messages": GO, "tools": [{"name": "", "input_schema": {}}]}),
        ("/v1/messages", {"max_tokens": 5, "messages": GO, "tools": [{"type": "bash_20250124"}]}),
        ("/api/chat", {"messages": GO, "tools": [{"type": "function", "function": {"name": ""}}]}),
        ("/apply-template", {"messages": GO, "tools": [{"type": "function", "function": {"name": ""}}]}),
    ],
)
def test_a_tool_without_a_name_is_refused(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    refused = http.post(path, json={"model": "shells", **body})
    assert refused.status_code == 400 and "name" in str(refused.json()["error"])


def test_a_named_client_tool_must_be_called(http: httpx.Client) -> None:
    body = {"model": "shells", "input": "Go.", "tools": TOOLS, "tool_choice": {"type": "local_shell"}}
    (item,) = http.post("/v1/responses", json=body).json()["output"]
    assert item["type"] == "local_shell_call" and item["status"] == "completed"


def test_anthropics_client_tools_are_offered_with_their_known_arguments(http: httpx.Client) -> None:
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    seen = []
    with anthropic.Anthropic(base_url=str(http.base_url), api_key="none", max_retries=0) as claude:
        for _ in range(4):
            answer = claude.beta.messages.create(model="edits", max_tokens=200, messages=messages, tools=ANTHROPICS)
            messages.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
            for block in answer.content:
                if block.type == "tool_use":
                    seen.append((block.name, block.input))
                    result = {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
                    messages.append({"role": "user", "content": [result]})
    assert seen == [
        ("bash", {"command": "grep -rn later src"}),
        ("str_replace_based_edit_tool", {"command": "view", "path": "src/main.py", "view_range": [1, 9]}),
        ("memory", {"command": "create", "path": "/memories/todo.md", "file_text": "Remember the milk, please."}),
    ]


def test_older_editors_take_an_edit_back() -> None:
    from localllm.server.anthropic.client_tools import known

    older, newer = known("text_editor_20250124"), known("text_editor_20250429")
    assert older and newer and known("computer_20250124") is None and known(None) is None
    assert "undo_edit" in json.dumps(older[1]) and "undo_edit" not in json.dumps(newer)


HOSTED: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "/v1/responses",
        {"input": "Go.", "tools": [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}]},
        ["tool of type 'web_search'", "tool of type 'mcp'"],
    ),
    (
        "/v1/responses",
        {"input": "Go.", "tools": [{"type": "shell", "environment": {"type": "container_auto"}}]},
        ["tool of type 'shell'"],
    ),
    ("/v1/responses", {"input": [{"type": "web_search_call", "id": "x"}]}, ["input item of type 'web_search_call'"]),
    (
        "/v1/messages",
        {
            "max_tokens": 90,
            "messages": [{"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}],
            "tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}],
        },
        ["tool of type 'web_fetch_20250910'", "block of type 'container_upload'"],
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Go."}], "tools": [{"type": "code_interpreter"}]},
        ["tool of type 'code_interpreter'"],
    ),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "Go."}], "options": {"temperatur": 1}},
        ["unknown option 'temperatur'"],
    ),
    (
        "/v1/messages",
        {"max_tokens": 90, "messages": GO, "mcp_servers": [{"type": "url", "url": "https://x", "name": "n"}]},
        ["field 'mcp_servers'"],
    ),
    (
        "/v1/chat/completions",
        {"messages": GO, "web_search_options": {}, "max_token": 5},
        ["field 'web_search_options'", "field 'max_token'"],
    ),
    ("/v1/responses", {"input": "Go.", "max_tokens": 90}, ["field 'max_tokens'"]),
    ("/api/chat", {"messages": GO, "response_format": {"type": "json_object"}}, ["field 'response_format'"]),
    ("/completion", {"prompt": "Go.", "n_predict": 4, "penalty_prompt": "x"}, ["field 'penalty_prompt'"]),
]
# Fields that change no answer, and null ones.
SILENT = {"user": "me", "metadata": {}, "store": False, "safety_identifier": "x", "moderation": None, "container": None}


@pytest.mark.parametrize(("path", "body", "told"), HOSTED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_ignored_is_named_in_the_answer(
    http: httpx.Client, path: str, body: dict[str, Any], told: list[str], stream: bool
) -> None:
    for _ in range(2):  # each time, though it is logged once
        answer = http.post(path, json={"model": "shells", "stream": stream, **body})
        assert answer.status_code == 200, answer.text
        assert all(f"Ignored: {what}" in answer.text for what in told), answer.text
    asked = {"input": "Go.", "max_output_tokens": 9} if "responses" in path else {"messages": GO, "max_tokens": 9}
    asked = {"messages": GO} if "api" in path else {"prompt": "Go."} if path == "/completion" else asked
    other = http.post(path, json={"model": "shells", **asked, **SILENT})
    assert other.status_code == 200 and "Ignored" not in other.text
