"""Requests in which any one value is of another kind: they are read or refused, and never meet a defect."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from localllm.answer.request import AnswerRequest
from localllm.errors import LocalLLMError
from localllm.server.anthropic.requests import MessagesBody, messages_request
from localllm.server.bodies import Body
from localllm.server.llama_cpp.completion import InfillBody, LlamaCompletionBody
from localllm.server.llama_cpp.routes import RerankBody, TemplateBody, TokenizeBody
from localllm.server.ollama.generate import chat_request as ollama_request
from localllm.server.ollama.schema import EmbedBody, GenerateBody, OllamaChatBody
from localllm.server.openai.chat import chat_request
from localllm.server.openai.conversations import CompactBody, ConversationBody
from localllm.server.openai.responses import given_items, responses_request
from localllm.server.openai.schema import ChatBody, CompletionBody, EmbeddingsBody, ResponsesBody

ODD: list[Any] = [None, True, 5, "", "odd", [], [5], {}, {"type": []}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
FUNCTION = {"name": "look", "description": "D.", "parameters": SCHEMA, "strict": False}
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
FILE = "data:text/plain;base64,SGVsbG8="
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": "y"}'}}
CHAT = {
    "messages": [
        *HELLO,
        {"role": "user", "content": [{"type": "file", "file": {"filename": "a.txt", "file_data": FILE}}]},
        {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "done"}]},
    ],
    "tools": [
        {"type": "function", "function": FUNCTION},
        {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "definition": "start: A"}}},
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "look"}}]},
    },
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    "reasoning": {"effort": "low"},
}
OLLAMA = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"x": "y"}}}]},
        {"role": "tool", "tool_name": "look", "content": "done"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "options": {"stop": ["\n"], "temperature": 0.5},
    "format": SCHEMA,
}
DEFERRED = {"name": "later", "description": "D.", "input_schema": SCHEMA, "defer_loading": True}
REFERENCE = {"type": "tool_reference", "tool_name": "later"}
ANTHROPIC = {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "5m"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "t1", "name": "find", "input": {"x": "y"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [REFERENCE], "is_error": False},
                {
                    "type": "document",
                    "title": "A",
                    "source": {"type": "content", "content": [{"type": "text", "text": "x"}]},
                },
                {"type": "search_result", "title": "T", "source": "s", "content": [{"type": "text", "text": "x"}]},
            ],
        },
    ],
    "tools": [DEFERRED, {"type": "bash_20250124", "name": "bash"}, {"name": "find", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low"},
}
NAMESPACE = {"type": "namespace", "name": "weather", "tools": [{"type": "function", **FUNCTION}]}
OUTPUT = {"stdout": "x", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
RESPONSES = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_file", "file_data": FILE}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "AAAA"},
        {"type": "function_call", "call_id": "c1", "name": "look", "namespace": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "shell_call", "call_id": "c2", "action": {"commands": ["ls"], "timeout_ms": 5}},
        {"type": "shell_call_output", "call_id": "c2", "output": [OUTPUT]},
        {"type": "apply_patch_call", "call_id": "c3", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "c3", "status": "failed", "output": "no"},
        {"type": "tool_search_call", "call_id": "c4", "execution": "client", "arguments": {"query": "x"}},
        {"type": "tool_search_output", "call_id": "c4", "tools": [NAMESPACE]},
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "AAAA"},
        {"role": "developer", "content": "Go on."},
    ],
    "tools": [
        {"type": "shell", "environment": {"type": "local"}},
        {"type": "tool_search", "execution": "client", "parameters": SCHEMA},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": "start: A"}},
        {"type": "function", "defer_loading": True, **FUNCTION},
        NAMESPACE,
    ],
    "tool_choice": {"type": "function", "name": "look", "namespace": "weather"},
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low", "summary": "auto"},
}


OTHERS: list[tuple[type[Body], dict[str, Any]]] = [
    (CompletionBody, {}),
    (EmbeddingsBody, {"input": "Hi"}),
    (CompactBody, {}),
    (ConversationBody, {}),
    (LlamaCompletionBody, {}),
    (InfillBody, {}),
    (TokenizeBody, {}),
    (TemplateBody, {"messages": HELLO}),
    (RerankBody, {"query": "Hi"}),
    (GenerateBody, {}),
    (EmbedBody, {}),
    (ChatBody, CHAT),
    (MessagesBody, {"max_tokens": 5, **ANTHROPIC}),
    (ResponsesBody, RESPONSES),
    (OllamaChatBody, OLLAMA),
]


@pytest.mark.parametrize(("body", "fields"), OTHERS)
def test_null_is_the_default(body: type[Body], fields: dict[str, Any]) -> None:
    for name, field in body.model_fields.items():
        if field.is_required():
            continue
        given = {key: value for key, value in fields.items() if key != name}
        assert body.model_validate(given | {name: None}) == body.model_validate(given), name


def of_responses(body: dict[str, Any]) -> AnswerRequest:
    parsed = ResponsesBody.model_validate(body)
    return responses_request(parsed, given_items(parsed))


REQUESTS: list[tuple[Callable[[dict[str, Any]], AnswerRequest], dict[str, Any]]] = [
    (lambda body: chat_request(ChatBody.model_validate(body)), CHAT),
    (lambda body: ollama_request(OllamaChatBody.model_validate(body)), OLLAMA),
    (lambda body: messages_request(MessagesBody.model_validate(body)), ANTHROPIC),
    (of_responses, RESPONSES),
]


def variants(value: Any) -> Iterator[Any]:
    """The value with another one in one place, for each place and each odd value."""
    places: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        places = list(value.items())
    elif isinstance(value, list):
        places = list(enumerate(value))
    for key, inner in places:
        for other in (*(odd for odd in ODD if odd != inner), *variants(inner)):
            if isinstance(value, dict):
                yield {**value, key: other}
            else:
                yield [*value[:key], other, *value[key + 1 :]]


@pytest.mark.parametrize(("request_of", "body"), REQUESTS, ids=["chats", "ollama", "messages", "responses"])
def test_a_value_of_another_kind(request_of: Callable[[dict[str, Any]], AnswerRequest], body: dict[str, Any]) -> None:
    whole = {"model": "m", "max_tokens": 5, **body}
    request_of(whole).check()
    refused = 0
    for other in variants(whole):
        try:
            request_of(other).check()
        except (LocalLLMError, ValidationError):
            refused += 1
    assert refused > 100
