"""Details in which programs expect what other servers do."""

from typing import Any

import httpx
import pytest

from localllm.remote.fields import chat_fields
from localllm.server.openai.chat import chat_request
from localllm.server.openai.responses import given_items, responses_request
from localllm.server.openai.schema import ChatBody, ResponsesBody
from tests.localllm.server.conftest import MODEL, Server
from tests.waiting import PATIENCE_S

HI = [{"role": "user", "content": "Hi"}]


def post(server: Server, path: str, **body: object) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": MODEL, **body}, timeout=PATIENCE_S)


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/v1/models", "/models"])
def test_probes_may_ask_for_the_head_alone(server: Server, path: str) -> None:
    answer = httpx.head(server.url + path, timeout=PATIENCE_S)
    assert answer.status_code == 200 and not answer.content


def test_no_response_fields_are_all(server: Server) -> None:
    whole = post(server, "/completion", prompt="Once", n_predict=2, response_fields=[]).json()
    assert whole["content"] and "timings" in whole
    assert post(server, "/completion", prompt="Once", n_predict=2, response_fields=["content"]).json().keys() == {
        "content"
    }


def test_biases_by_text_in_an_object(server: Server) -> None:
    plain = post(server, "/completion", prompt="Once upon", n_predict=3, temperature=0).json()["content"]
    word = plain.strip().split()[0]
    banned = post(server, "/completion", prompt="Once upon", n_predict=3, temperature=0, logit_bias={word: -100})
    assert banned.status_code == 200 and banned.json()["content"] != plain
    mixed = post(server, "/completion", prompt="Once", n_predict=1, logit_bias={"5": -1, word: False})
    assert mixed.status_code == 200
    assert post(server, "/completion", prompt="Once", logit_bias={word: "x"}).status_code == 400


def test_tokens_are_counted_without_v1_too(server: Server) -> None:
    counts = [post(server, f"{prefix}/chat/completions/input_tokens", messages=HI).json() for prefix in ("", "/v1")]
    assert counts[0] == counts[1] and counts[0]["input_tokens"] > 0


def test_errors_of_anthropics_routes_have_a_request_id(server: Server) -> None:
    answers = [post(server, "/v1/messages", messages=HI, max_tokens=0).json()["request_id"] for _ in range(2)]
    assert answers[0] != answers[1] and all(one.startswith("req_") for one in answers)


def test_audio_output_is_refused_in_a_warning(server: Server) -> None:
    answer = post(server, "/v1/chat/completions", messages=HI, max_tokens=2, modalities=["text", "audio"]).json()
    assert answer["choices"][0]["warnings"] == ["Ignored: modality 'audio'."]


ASSISTANT = {"role": "assistant", "content": "Once upon"}


@pytest.mark.parametrize(
    ("last", "fields", "status"),
    [
        (ASSISTANT, {"continue_final_message": True}, 200),
        (ASSISTANT, {"continue_final_message": True, "add_generation_prompt": False}, 200),
        (ASSISTANT, {"add_generation_prompt": False}, 200),
        (ASSISTANT, {"continue_final_message": True, "add_generation_prompt": True}, 400),
        (None, {"add_generation_prompt": True, "continue_final_message": False}, 200),
        (None, {"add_generation_prompt": False}, 400),
        (None, {"continue_final_message": True}, 400),
    ],
)
def test_what_an_answer_continues(server: Server, last: Any, fields: dict[str, Any], status: int) -> None:
    messages = [{"role": "user", "content": "A story"}, *([last] if last else [])]
    body = {"model": MODEL, "messages": messages, "max_tokens": 1, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == status, answer.text


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("fields", "continues"),
    [
        ({}, True),
        ({"tools": []}, True),
        ({"tools": [TOOL]}, False),
        ({"functions": [TOOL["function"]]}, False),
        ({"tools": [TOOL], "continue_final_message": True}, True),
        ({"tools": [TOOL], "add_generation_prompt": False}, True),
        ({"continue_final_message": False}, False),
        ({"add_generation_prompt": True}, False),
    ],
)
def test_agents_get_another_message(fields: dict[str, Any], continues: bool) -> None:
    messages = [*HI, ASSISTANT]
    request = chat_request(ChatBody.model_validate({"messages": messages, **fields}))
    assert request.goes_on is continues
    sent = chat_fields(request)  # a server behind this one is told
    assert sent["continue_final_message"] is continues and sent["add_generation_prompt"] is not continues
    asked = chat_fields(chat_request(ChatBody.model_validate({"messages": HI, "tools": [TOOL]})))
    assert "add_generation_prompt" not in asked  # which only some servers know


def test_responses_with_tools_are_another_message() -> None:
    tool = {"type": "function", **TOOL["function"]}
    for tools in ([], [tool]):
        body = ResponsesBody.model_validate({"input": [*HI, ASSISTANT], "tools": tools})
        assert responses_request(body, given_items(body)).goes_on is not bool(tools)


def test_another_message_follows_a_complete_one(server: Server) -> None:
    """Its prompt ends with the template's beginning of a message instead of the given text."""
    path = "/v1/chat/completions/input_tokens"
    counts = [
        post(server, path, messages=[*HI, ASSISTANT], continue_final_message=wanted).json()["input_tokens"]
        for wanted in (True, False)
    ]
    assert counts[0] < counts[1]
