"""What a grammar cannot enforce of a schema is checked when the answer is complete, and reported in every protocol."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from localllm.answer.event import Answer, AnswerEvent, AnswerPart, PartKind, called
from localllm.answer.request import AnswerRequest
from localllm.answer.schema_check import unmet
from localllm.answer.tool_calls import ToolCall
from tests.localllm.server.conftest import MODEL, Server
from tests.waiting import PATIENCE_S

HI = [{"role": "user", "content": "Hi"}]
# Two equal items: the answer can only be ["x", "x"].
SCHEMA = {"type": "array", "items": {"const": "x"}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
FITTING = {**SCHEMA, "uniqueItems": False}
TOLD = "does not fit its JSON Schema"


def _answer(content: str = "", calls: tuple[ToolCall, ...] = ()) -> Answer:
    answer = Answer()
    answer.add(AnswerEvent((AnswerPart(PartKind.CONTENT, content), called(calls))))
    return answer


@pytest.mark.parametrize(
    ("schema", "fits", "fails"),
    [
        ({"uniqueItems": True}, [1, 2], [1, 1]),
        ({"propertyNames": {"pattern": "^(?=.*[0-9])k"}, "minProperties": 1}, {"k1": 0}, {"k": 0}),
        ({"not": {"const": 1}}, 2, 1),
        ({"format": "idn-email"}, "a@b.org", "a"),
        ({"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]+$"}, "a1", "a"),
        ({"if": {"const": 1}, "then": False}, 2, 1),
        ({"contains": {"const": 1}}, [1], [2]),
        ({"oneOf": [{"type": "number"}, {"minimum": 2}]}, 1, 3),
        ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "integer"}}}, 1, "x"),
        ({"type": "string", "nullable": True}, None, 1),
        ({"exclusiveMinimum": True, "minimum": 1, "exclusiveMaximum": False, "maximum": 2}, 2, 1),
        ({"properties": {"nullable": {"type": "boolean"}}, "uniqueItems": True}, {"nullable": True}, [1, 1]),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "$ref": "#/definitions/a",
                "definitions": {"a": {"type": "integer"}},
                "uniqueItems": True,
            },
            1,
            "x",
        ),
    ],
)
def test_what_is_found(schema: dict[str, Any], fits: Any, fails: Any) -> None:
    request = AnswerRequest(messages=HI, format=schema)
    assert unmet(request, _answer(json.dumps(fits))) == ()
    (sentence,) = unmet(request, _answer(json.dumps(fails)))
    assert TOLD in sentence


def test_what_is_left_out_is_named_and_the_answer_is_not() -> None:
    schema = {"properties": {"tags": {"uniqueItems": True}}}
    (sentence,) = unmet(AnswerRequest(messages=HI, format=schema), _answer('{"tags": ["secret", "secret"]}'))
    assert "uniqueItems at #/properties/tags" in sentence and "secret" not in sentence


def test_calls_are_checked_too() -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"uniqueItems": True}}}}}
    ]
    request = AnswerRequest(messages=HI, tools=tools)
    calls = (ToolCall("f", {"a": [1]}), ToolCall("f", {"a": [1, 1]}), ToolCall("unknown", {}))
    (sentence,) = unmet(request, _answer(calls=calls))
    assert sentence.startswith("Tool call 2 does not fit")


@pytest.mark.parametrize(
    "schema", [{"$ref": "http://127.0.0.1:1/a"}, {"type": "strnig"}, {"pattern": "(?=(a+)+$)(a|aa|b\\b)+x"}]
)
def test_what_cannot_be_checked_is_in_the_warnings(schema: dict[str, Any]) -> None:
    """Addresses are not fetched, schemas may be malformed, and endless patterns are given up."""
    assert unmet(AnswerRequest(messages=HI, format=schema), _answer(json.dumps("a" * 60 + "b")))


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


Ask = Callable[[dict[str, Any], bool], dict[str, Any]]
ROUTES: list[tuple[str, Callable[[Any], dict[str, Any]], Callable[[dict[str, Any]], Any]]] = [
    ("/api/chat", lambda schema: {"messages": HI, "format": schema}, lambda told: told["message"]["content"]),
    ("/api/generate", lambda schema: {"prompt": "Hi", "format": schema}, lambda told: told["response"]),
    (
        "/v1/chat/completions",
        lambda schema: {
            "messages": HI,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        },
        lambda told: told["choices"][0]["message"]["content"],
    ),
    (
        "/v1/completions",
        lambda schema: {"prompt": "Hi", "json_schema": schema, "max_tokens": 60},
        lambda told: told["choices"][0]["text"],
    ),
    (
        "/v1/responses",
        lambda schema: {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}},
        lambda told: told["output"][0]["content"][0]["text"],
    ),
    (
        "/v1/messages",
        lambda schema: {
            "messages": HI,
            "max_tokens": 60,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
        lambda told: told["content"][0]["text"],
    ),
    ("/completion", lambda schema: {"prompt": "Hi", "json_schema": schema}, lambda told: told["content"]),
]


def _objects(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def _warnings(told: Any) -> list[str]:
    """The field, wherever a protocol has it."""
    if isinstance(told, list):
        return [text for one in told for text in _warnings(one)]
    if not isinstance(told, dict):
        return []
    return [*told.get("warnings", []), *_warnings([value for key, value in told.items() if key != "warnings"])]


@pytest.mark.parametrize(("path", "body", "text"), ROUTES, ids=[route[0] for route in ROUTES])
def test_every_protocol_tells_it(client: httpx.Client, path: str, body: Any, text: Any) -> None:
    def asked(schema: Any, stream: bool) -> Any:
        answer = client.post(path, json={"model": MODEL, "stream": stream, **body(schema)})
        assert answer.status_code == 200, answer.text
        return _objects(answer.text) if stream else answer.json()

    told = asked(SCHEMA, False)
    assert json.loads(text(told)) == ["x", "x"]
    (sentence,) = _warnings(told)
    assert TOLD in sentence and "uniqueItems" in sentence
    assert _warnings(asked(SCHEMA, True)) == [sentence]
    assert _warnings(asked(FITTING, False)) == _warnings(asked(FITTING, True)) == []


def test_official_clients_take_the_field(server: Server) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as gpt:
        whole = gpt.chat.completions.create(model=MODEL, messages=HI, response_format=wanted)  # type: ignore[arg-type]
        chunks = list(
            gpt.chat.completions.create(model=MODEL, messages=HI, response_format=wanted, stream=True)  # type: ignore
        )
    assert TOLD in whole.choices[0].model_extra["warnings"][0]  # type: ignore[index]
    assert TOLD in chunks[-1].choices[0].model_extra["warnings"][0]  # type: ignore[index]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        extra = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "temperature": 0}
        said = claude.messages.create(model=MODEL, messages=HI, max_tokens=60, extra_body=extra)  # type: ignore[arg-type]
        with claude.messages.stream(model=MODEL, messages=HI, max_tokens=60, extra_body=extra) as stream:  # type: ignore
            streamed = stream.get_final_message()
    assert TOLD in said.model_extra["warnings"][0] and streamed.content[0].text == said.content[0].text  # type: ignore


def test_contradictions_alone_are_refused(client: httpx.Client) -> None:
    for schema in (
        {"type": "string", "const": 1},
        {"enum": []},
        {"not": {}},
        {"type": "integer", "minimum": 2, "maximum": 1},
    ):
        answer = client.post("/api/chat", json={"model": MODEL, "messages": HI, "format": schema})
        assert answer.status_code == 400, schema


def test_a_check_that_would_take_years_ends() -> None:
    """Both branches of each schema lead to the next one: the last is reached in 2^60 ways."""
    both = {f"d{i}": {"anyOf": 2 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(60)}
    schema = {"$defs": {**both, "d60": {"const": 1}}, "$ref": "#/$defs/d0"}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": schema}, **schema}}}
    for request, answer in (
        (AnswerRequest(format=schema), _answer("2")),
        (AnswerRequest(tools=(tool,)), _answer(calls=(ToolCall("add", {"a": 2}),))),
    ):
        (found,) = unmet(request, answer)
        assert "cannot be checked against its JSON Schema: it takes too long" in found
