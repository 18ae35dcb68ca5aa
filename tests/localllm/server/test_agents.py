"""Requests of coding agents and libraries, on a model with fixed answers."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from gguf import GGUFReader, GGUFWriter, PoolingType

from gpu_offload.errors import LlamaCppMissingError
from localllm.errors import LocalLLMError, ModelFileError, RequestError
from localllm.server.catalog import facts_of
from localllm.server.errors import ApiError, message_of, status_of
from tests.fakes.scripted_model import call, write_scripted_model
from tests.localllm.server.conftest import MODEL, Server, StartServer
from tests.waiting import PATIENCE_S

SCRIPTS = {
    "plain": "<think>\nWhat is asked for?\n</think>\n\nThe answer is forty-two.",
    "0": f"I will look.\n\n{call('read', path='notes.txt')}\n{call('list_all', path='.')}",
    "1": call("run", input="print the notes, please"),
    "2": call("box__open", path="the left one, of wood"),
    "3": "All of it has been done.",
}
HI = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = {"name": "read", "description": "Read a file.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
LIST = {**READ, "name": "list_all"}
FUNCTION = {"type": "function", "name": "read", "description": "Read.", "parameters": SCHEMA, "strict": False}
FUNCTIONS: Any = [{**FUNCTION, "name": name} for name in ("read", "list_all", "box__open")]
BILLING = "x-anthropic-billing-header: cc_version=1; cch={};"


@pytest.fixture(scope="module")
def agents(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = write_scripted_model(tmp_path_factory.mktemp("scripted") / "scripted.gguf", SCRIPTS)
    with start_server("--model", str(path)) as server:
        yield server


@pytest.fixture(scope="module")
def http(agents: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=agents.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def claude(agents: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=agents.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(agents: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def posted(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json={"model": "scripted", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def claudes(cch: str, content: Any = "Hi") -> dict[str, Any]:
    """A request with everything that Claude Code sends."""
    return {
        "max_tokens": 64,
        "system": [
            {"type": "text", "text": BILLING.format(cch)},
            {"type": "text", "text": "You are a coding agent. " * 20, "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "user", "content": content},
            {"role": "system", "content": "The user has opened notes.txt."},
        ],
        "tools": [READ, LIST, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "{}"},
    }


def test_all_that_claude_code_sends(http: httpx.Client) -> None:
    answer = posted(http, "/v1/messages?beta=true", **claudes("a"))
    assert answer["stop_reason"] == "tool_use"
    text, first, second = answer["content"]
    assert text == {"type": "text", "text": "I will look."}
    assert (first["name"], first["input"]) == ("read", {"path": "notes.txt"}) and second["name"] == "list_all"


def test_a_billing_header_costs_no_prefix(http: httpx.Client) -> None:
    posted(http, "/v1/messages", **claudes("before"))
    usage = posted(http, "/v1/messages", **claudes("after, and of another length"))["usage"]
    assert usage["cache_read_input_tokens"] > 300 and usage["input_tokens"] < 20
    counted = {key: value for key, value in claudes("b").items() if key != "max_tokens"}
    total = usage["cache_read_input_tokens"] + usage["input_tokens"]
    assert posted(http, "/v1/messages/count_tokens", **counted)["input_tokens"] == total


def test_a_model_that_cannot_think_answers_a_wish_to_think(server: Server) -> None:
    body = {"model": MODEL, "max_tokens": 2, "messages": HI, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200 and answer.json()["content"][0]["type"] == "text"


def test_the_first_call_alone_where_parallel_ones_are_not_wanted(http: httpx.Client) -> None:
    body = claudes("a") | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert [block["type"] for block in posted(http, "/v1/messages", **body)["content"]] == ["text", "tool_use"]
    functions = [{"name": name, "parameters": SCHEMA} for name in ("read", "list_all")]
    chat = {"messages": HI, "tools": [{"type": "function", "function": function} for function in functions]}
    for parallel, calls in ((True, 2), (False, 1)):
        (choice,) = posted(http, "/v1/chat/completions", **chat, parallel_tool_calls=parallel)["choices"]
        assert len(choice["message"]["tool_calls"]) == calls and choice["finish_reason"] == "tool_calls"


RESULTS = [
    ("text", "The file is empty.", "The file is empty."),
    ("blocks", [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}], "One.\nTwo."),
    ("image", [{"type": "image", "source": {"type": "base64", "data": "AA", "media_type": "image/png"}}], "[image:"),
    ("nothing", None, ""),
    (
        "documents",
        [
            {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "Body."}},
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}},
            {"type": "search_result", "title": "S", "source": "u", "content": [{"type": "text", "text": "Found."}]},
            {"type": "tool_reference", "tool_name": "open"},
        ],
        "T\nBody.\n[document:",
    ),
]


@pytest.mark.parametrize(("name", "content", "expected"), RESULTS)
def test_results_of_tools_in_every_shape(http: httpx.Client, name: str, content: Any, expected: str) -> None:
    from localllm.server.anthropic.requests import MessagesBody, messages_request

    result = {"type": "tool_result", "tool_use_id": "t1", "content": content, "is_error": False}
    used = {"type": "tool_use", "id": "t1", "name": "read", "input": {}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    messages = [*HI, {"role": "assistant", "content": [thought, used]}, {"role": "user", "content": [result]}]
    found = messages_request(MessagesBody(model="m", max_tokens=9, messages=messages)).messages  # type: ignore[arg-type]
    assert found[1]["reasoning_content"] == "Hm." and found[2]["role"] == "tool", name
    assert found[2]["content"].startswith(expected)
    posted(http, "/v1/messages", max_tokens=9, messages=messages, tools=[READ])


def test_anthropic_format(claude: anthropic.Anthropic, http: httpx.Client, server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "schema": schema}
    for where in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        body = {"model": MODEL, "max_tokens": 100, "messages": HI, **where}
        (block,) = httpx.post(f"{server.url}/v1/messages", json=body, timeout=PATIENCE_S).json()["content"]
        assert json.loads(block["text"]) == {"a": "x"}
    bad = http.post("/v1/messages", json={"model": "scripted", "max_tokens": 9, "messages": HI, "output_format": {}})
    assert bad.status_code == 400
    message = claude.messages.create(model="scripted", max_tokens=90, messages=HI)  # type: ignore[arg-type]
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "What is asked for?"  # type: ignore[union-attr]
    assert message.content[1].text == "The answer is forty-two."  # type: ignore[union-attr]


def test_the_version_is_one_that_programs_accept(http: httpx.Client) -> None:
    told = http.get("/api/version").json()
    assert tuple(map(int, told["version"].split("."))) >= (0, 13, 4) and told["localllm"]
    assert http.head("/").status_code == http.head("/api/version").status_code == 200


CODEX_TOOLS = [
    FUNCTION,
    {"type": "namespace", "name": "box", "description": "A box.", "tools": [{**FUNCTION, "name": "open"}]},
    {"type": "custom", "name": "run", "description": "Run.", "format": {"type": "grammar", "definition": "start: X"}},
    {"type": "web_search", "external_web_access": True},
]


def test_codex_in_four_turns(gpt: openai.OpenAI) -> None:
    """Calls of functions, custom tools and namespaces, each turn with all items so far."""
    items: list[Any] = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Do."}]}]
    seen = []
    for _ in range(4):
        with gpt.responses.stream(
            model="scripted",
            input=items,
            instructions="You are an agent.",
            tools=CODEX_TOOLS,  # type: ignore[arg-type]
            parallel_tool_calls=False,
            store=False,
            include=["reasoning.encrypted_content"],
            reasoning={"effort": "medium", "summary": "auto"},
        ) as stream:
            for _event in stream:
                pass
            answer = stream.get_final_response()
        for item in answer.output:
            items.append(item.to_dict())
            if item.type in ("function_call", "custom_tool_call"):
                seen.append((item.type, item.name, getattr(item, "namespace", None)))
                items.append({"type": f"{item.type}_output", "call_id": item.call_id, "output": "done"})
    assert seen == [
        ("function_call", "read", None),
        ("custom_tool_call", "run", None),
        ("function_call", "open", "box"),
    ]
    assert items[-1]["content"][0]["text"] == "All of it has been done."
    custom = next(item for item in items if item["type"] == "custom_tool_call")
    assert custom["input"] == "print the notes, please"


def test_an_empty_input_is_answered(http: httpx.Client) -> None:
    """How Codex probes a server."""
    for empty in ("", []):
        assert posted(http, "/v1/responses", input=empty)["status"] == "completed"


def test_reasoning_comes_back_in_each_form() -> None:
    from localllm.server.openai.items import conversation_of, sealed

    forms: list[dict[str, Any]] = [
        {"encrypted_content": sealed("Hm."), "summary": []},
        {"content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "gAAAA=="},
    ]
    for form in forms:
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A."}]}
        calls = [{"type": "function_call", "call_id": f"c{at}", "name": "f", "arguments": "{}"} for at in range(2)]
        (turn,) = conversation_of([{"type": "reasoning", **form}, said, *calls])
        assert turn["reasoning_content"] == "Hm." and turn["content"] == "A." and len(turn["tool_calls"]) == 2


@pytest.mark.parametrize(
    ("path", "choice"),
    [("/v1/chat/completions", "required"), ("/v1/responses", "required"), ("/v1/messages", {"type": "any"})],
)
def test_a_tool_that_must_be_called_needs_tools(http: httpx.Client, path: str, choice: object) -> None:
    body = {"model": "scripted", "tool_choice": choice, "max_tokens": 9}
    refused = http.post(path, json=body | ({"input": "Hi"} if "responses" in path else {"messages": HI}))
    assert refused.status_code == 400 and "no tools are offered" in refused.text


def test_reasoning_as_a_summary(gpt: openai.OpenAI) -> None:
    with gpt.responses.stream(model="scripted", input="Hi", reasoning={"summary": "auto"}) as stream:
        kinds = {event.type for event in stream}
        thought, said = stream.get_final_response().output
    assert thought.type == "reasoning" and thought.summary[0].text == "What is asked for?"
    assert "response.reasoning_summary_text.delta" in kinds and said.type == "message"


def test_items_that_are_named_only(gpt: openai.OpenAI) -> None:
    tools = FUNCTIONS
    first = gpt.responses.create(model="scripted", input="Hi", tools=tools)
    calls = [item for item in first.output if item.type == "function_call"]
    results: Any = [{"type": "function_call_output", "call_id": one.call_id, "output": "x"} for one in calls]
    by_response = gpt.responses.create(model="scripted", input=results, tools=tools, previous_response_id=first.id)
    references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    again: Any = [{"role": "user", "content": "Hi"}, *references, *results]
    by_items = gpt.responses.create(model="scripted", input=again, tools=tools)
    assert by_response.usage and by_items.usage
    assert by_response.usage.input_tokens == by_items.usage.input_tokens
    assert by_response.output[0].name == "box__open"  # type: ignore[union-attr]
    for body in ({"previous_response_id": "resp_0"}, {"input": [{"type": "item_reference", "id": "msg_0"}]}):
        with pytest.raises(openai.BadRequestError, match="not stored here"):
            gpt.responses.create(**{"model": "scripted", "input": "Hi", **body})  # type: ignore[call-overload]


def test_older_and_newer_forms_of_tools_in_chats(http: httpx.Client) -> None:
    path = "/v1/chat/completions"
    functions = [{"name": name, "parameters": SCHEMA} for name in ("read", "list_all")]
    (choice,) = posted(http, path, messages=HI, functions=functions, function_call="auto")["choices"]
    assert choice["finish_reason"] == "function_call" and choice["message"]["function_call"]["name"] == "read"
    result = {"role": "function", "name": "read", "content": "It is empty."}
    asked = {"role": "assistant", "content": None, "function_call": {"name": "read", "arguments": "{bad"}}
    tools = [{"type": "custom", "custom": {"name": "run", "description": "Run."}}]
    (choice,) = posted(http, path, messages=[*HI, asked, result], tools=tools)["choices"]
    (called,) = choice["message"]["tool_calls"]
    assert (called["type"], called["custom"]) == ("custom", {"name": "run", "input": "print the notes, please"})
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "run"}}]},
    }
    posted(http, path, messages=HI, tools=tools, tool_choice=allowed, reasoning_effort="ultra", max_tokens=-1)


@pytest.mark.parametrize(
    "body",
    [
        {"grammar": 'root ::= "{\\"a\\": 1}"'},
        {"guided_choice": ['{"a": 1}']},
        {"guided_regex": r'\{"a": 1\}'},
        {"guided_json": json.dumps({"const": {"a": 1}})},
        {"structured_outputs": {"json": {"const": {"a": 1}}}},
        {"structured_outputs": {"regex": r'\{"a": 1\}', "choice": None}, "guided_regex": r'\{"a": 1\}'},
        {"structured_outputs": {"choice": ['{"a": 1}']}},
        {"structured_outputs": {"grammar": 'root ::= "{\\"a\\": 1}"'}},
        {"json_schema": {"const": {"a": 1}}},
        {"response_format": {"type": "json_object", "schema": {"const": {"a": 1}}}},
    ],
)
def test_what_an_answer_must_fit(server: Server, body: dict[str, Any]) -> None:
    asked = {"model": MODEL, "messages": HI, **body}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=PATIENCE_S).json()
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 1}
    both = {**asked, "grammar": 'root ::= "a"', "guided_regex": "a"}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=both, timeout=PATIENCE_S).status_code == 400


def test_a_small_model_ends_its_json(server: Server) -> None:
    """A model that writes blanks and properties wherever allowed."""
    ended = 0
    for seed in range(8):
        age = {"type": "integer", "minimum": 0, "maximum": 99}
        properties = {"name": {"type": "string", "maxLength": 8}, "age": age}
        schema = {"type": "object", "properties": properties, "required": ["name", "age"]}
        body = {"model": MODEL, "messages": HI, "seed": seed, "max_tokens": 200, "json_schema": schema}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
        ended += answer["choices"][0]["finish_reason"] == "stop"
    assert ended == 8


def test_chat_template_arguments(http: httpx.Client) -> None:
    path = "/v1/chat/completions"
    given = {"enable_thinking": True, "reasoning_effort": "low", "preserve_thinking": True}
    posted(http, path, messages=HI, chat_template_kwargs=given)
    for wrong in ({"enable_thinking": "yes"}, {"no_such_argument": 1}):
        refused = http.post(path, json={"model": "scripted", "messages": HI, "chat_template_kwargs": wrong})
        assert refused.status_code == 400


def test_what_is_ignored_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    from localllm.server.ollama.options import read_options
    from localllm.server.openai.schema import ChatBody

    with caplog.at_level(logging.INFO, "localllm"):
        for _ in range(2):
            fields = read_options({"embedding_only": False, "temperatur": 0, "top_k": 3})
            ChatBody(model="m", messages=HI, safety_identifier="x")  # type: ignore[call-arg,arg-type]
    assert fields["sampling"] == {"top_k": 3}
    assert caplog.text.count("unknown option 'embedding_only'") == 1
    assert caplog.text.count("unknown option 'temperatur'; did you mean 'temperature'?") == 1
    assert caplog.text.count("field 'safety_identifier' of ChatBody") == 1


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (ModelFileError("/srv/models/x.gguf: the file ends early. Pull it again."), 500, "x.gguf: the file ends"),
        (RequestError("This reads no images. Load it with --backend llama."), 400, "This reads no images."),
        (LlamaCppMissingError("not installed"), 501, "this server has no llama.cpp"),
        (ApiError(403, "use /v1/rerank; allow it with --origins"), 403, "use /v1/rerank; allow it with --origins"),
        (RequestError("a/b and /v1/rerank stay"), 400, "a/b and rerank stay"),
    ],
)
def test_errors_name_no_folders_and_no_flags(error: LocalLLMError, status: int, told: str) -> None:
    assert status_of(error) == status
    message = message_of(error)
    assert message.startswith(told) and "/srv" not in message and "pip" not in message


def test_a_model_for_embeddings_does_not_chat(model_files: Path, tmp_path: Path) -> None:
    source, path = model_files / f"{MODEL}.gguf", tmp_path / "embedder.gguf"
    path.write_bytes(source.read_bytes())
    assert facts_of(path).only is None
    with_pooling(source, path)
    os.utime(path, ns=(1, 1))
    assert facts_of(path).only is not None


def with_pooling(source: Path, target: Path) -> None:
    """Copy a model's metadata as an embedding model's."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, "llama")
    writer.add_pooling_type(PoolingType.MEAN)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_too_many_texts_to_embed_are_counted(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"model": "scripted", "input": ["a"] * 3000})
    if answer.status_code != 501:  # without llama.cpp
        assert answer.status_code == 400
        assert "3000 texts; at most 2048" in answer.json()["error"]["message"]


def test_a_long_conversation(http: httpx.Client) -> None:
    messages = [{"role": ("user", "assistant")[at % 2], "content": "Go on."} for at in range(1501)]
    posted(http, "/v1/chat/completions", messages=messages, max_tokens=1)
