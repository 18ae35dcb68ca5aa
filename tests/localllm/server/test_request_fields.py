"""A field of a request that is added in one place and forgotten in another."""

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import localllm
import localllm.server.app
from localllm.answer.request import AnswerRequest
from localllm.engine.request import GenerationRequest, SamplingParams
from localllm.server.anthropic.requests import MessagesBody, messages_request
from localllm.server.bodies import Body
from localllm.server.llama_cpp.completion import LlamaCompletionBody
from localllm.server.ollama.generate import chat_request as ollama_chat
from localllm.server.ollama.schema import OllamaChatBody
from localllm.server.openai.chat import chat_request
from localllm.server.openai.completions import completion_requests
from localllm.server.openai.responses import given_items, responses_request
from localllm.server.openai.schema import ChatBody, CompletionBody, ResponsesBody

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "f", "description": "F.", "parameters": {"type": "object"}}
SCHEMA = {"type": "object"}
COMMON: dict[str, Any] = {
    "num_ctx": 64,
    "image_min_tokens": 2,
    "image_max_tokens": 3,
    "truncate": True,
    "lora": [{"id": 0, "scale": 0.5}],
    "service_tier": "flex",
    "priority": 2,
    "prompt_cache_key": "a",
    "temperature": 0.5,
}


def ollama() -> AnswerRequest:
    options = {name: COMMON[name] for name in ("num_ctx", "image_min_tokens", "image_max_tokens", "lora")}
    options |= {"num_predict": 5, "num_keep": 2, "stop": ["x"], "temperature": 0.5}
    tools = [{"type": "function", "function": TOOL}]
    body = {"messages": HI, "tools": tools, "format": "json", "think": True, "options": options}
    return ollama_chat(OllamaChatBody.model_validate(body))


def chat() -> AnswerRequest:
    tools = [{"type": "function", "function": TOOL}]
    body = {"messages": HI, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    body |= {"max_tokens": 5, "stop": "x", "reasoning_effort": "low", "continue_final_message": False}
    return chat_request(ChatBody.model_validate(body | COMMON | {"chat_template_kwargs": {"a": 1}}))


def completions() -> AnswerRequest:
    body = {"prompt": "Hi", "suffix": "there", "max_tokens": 5, "stop": "x", "guided_json": SCHEMA}
    (request,) = completion_requests(CompletionBody.model_validate(body | COMMON | {"prompt_logprobs": 1}))
    return request


def responses() -> AnswerRequest:
    tools = [{"type": "function", **TOOL}]
    body = {"input": "Hi", "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    body |= {"max_output_tokens": 5, "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_object"}}}
    given = ResponsesBody.model_validate(body | COMMON | {"truncation": "auto"})
    return responses_request(given, given_items(given))


def anthropic() -> AnswerRequest:
    tools = [{"name": "f", "input_schema": SCHEMA}]
    body = {"messages": HI, "tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    body |= {"max_tokens": 5, "stop_sequences": ["x"], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    body |= {
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "cache_control": {"type": "ephemeral"},
    }
    return messages_request(MessagesBody.model_validate(body | COMMON))


def llama_cpp() -> AnswerRequest:
    body = {"prompt": "Hi", "n_predict": 5, "stop": ["x"], "ignore_eos": True, "n_indent": 2, "t_max_predict_ms": 10}
    return AnswerRequest(**LlamaCompletionBody.model_validate(body | COMMON).answer_fields())


PROTOCOLS = (ollama, chat, completions, responses, anthropic, llama_cpp)
EVERYWHERE = {
    *("sampling", "max_tokens", "stop", "context_limit", "context_policy", "image_min_tokens", "image_max_tokens"),
    *("adapters", "background", "priority", "pins"),
}
EXCEPT = {
    "ollama": {"background", "priority", "pins"},
    "responses": {"stop"},  # OpenAI's has none
}
OF_SOME_PROTOCOLS = {
    *("messages", "may_go_on", "continues_text", "prompt", "suffix", "extra", "before", "template"),
    *("template_arguments", "tools", "described", "allowed", "tool_choice", "one_call", "format", "grammar"),
    *("think", "may_skip_thinking", "thinks_before_format", "defaults", "keep", "prompt_logprobs"),
    *("ignore_eos", "least_indent", "line_limit_s", "persist_from", "namespace", "client"),
}


def test_every_field_of_a_request_is_common_to_the_protocols_or_of_some() -> None:
    """Add a new field to one of the sets; tests then fail for each protocol that lacks a common one."""
    assert {field.name for field in fields(AnswerRequest)} == EVERYWHERE | OF_SOME_PROTOCOLS
    assert EVERYWHERE.isdisjoint(OF_SOME_PROTOCOLS)


@pytest.mark.parametrize("make", PROTOCOLS, ids=lambda make: make.__name__)
def test_every_protocol_sets_the_common_fields(make: Callable[[], AnswerRequest]) -> None:
    usual, request = AnswerRequest(), make()
    unset = {name for name in EVERYWHERE if getattr(request, name) == getattr(usual, name)}
    assert unset == EXCEPT.get(make.__name__, set())


def test_every_field_of_a_body_or_a_request_is_read() -> None:
    """A field that nothing reads would be ignored without a word."""
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.value
        for node in nodes(".")
        if isinstance(node, ast.Attribute | ast.Constant)
    }
    given = {name for body in bodies(Body) for name in inspect.get_annotations(body)}
    given |= {field.name for record in (AnswerRequest, GenerationRequest) for field in fields(record)}
    assert given - names - {"model_config"} == {"cache_prompt", "embd_normalize"}


def test_the_engine_reads_every_sampling_parameter() -> None:
    read = {node.attr for node in nodes("engine") if isinstance(node, ast.Attribute)}
    assert {field.name for field in fields(SamplingParams)} - read == set()


def nodes(folder: str) -> Iterator[ast.AST]:
    """All of the code in a folder of localllm."""
    for path in (Path(localllm.__file__).parent / folder).rglob("*.py"):
        yield from ast.walk(ast.parse(path.read_text("utf-8")))


def bodies(kind: type[Body]) -> Iterator[type[Body]]:
    """All kinds of bodies that the server's modules define."""
    for each in kind.__subclasses__():
        yield each
        yield from bodies(each)
