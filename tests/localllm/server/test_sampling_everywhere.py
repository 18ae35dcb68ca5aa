"""A sampling parameter has one name and one meaning, whichever way it comes in."""

import logging
from dataclasses import asdict, fields
from typing import Any

import pytest
from pydantic import ValidationError

from localllm.chats.parameters import Parameters
from localllm.engine.request import SamplingParams
from localllm.library.modelfile import SUPPORTED
from localllm.remote.fields import chat_fields
from localllm.sampling import ALIASES, COMMON, RANGES
from localllm.server.anthropic.requests import MessagesBody, messages_request
from localllm.server.bodies import Body, log_ignored
from localllm.server.json_body import what_is_wrong
from localllm.server.llama_cpp import completion as llama_cpp
from localllm.server.ollama.generate import chat_request as ollama_chat
from localllm.server.ollama.schema import OllamaChatBody as OllamaBody
from localllm.server.openai.chat import chat_request
from localllm.server.openai.completions import completion_requests
from localllm.server.openai.responses import given_items, responses_request
from localllm.server.openai.schema import ChatBody, CompletionBody, EmbeddingsBody, ResponsesBody
from localllm.settings import Settings

MESSAGES = [{"role": "user", "content": "Hi"}]


def values() -> dict[str, Any]:
    """A value for each parameter that differs from all defaults."""
    usual = asdict(SamplingParams())
    given = {name: usual[name] for name in RANGES if name != "seed"}
    changed = {name: value / 2 + 0.25 if isinstance(value, float) else value + 3 for name, value in given.items()}
    return {**changed, "mirostat": 2, "seed": 7, "dry_sequence_breakers": ("\n", "x"), "watermark_key": "mine"}


def sampling_of(protocol: str, given: dict[str, Any]) -> dict[str, Any]:
    """The sampling of the request that a body with these parameters becomes."""
    if protocol == "ollama":
        options = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
        return dict(ollama_chat(OllamaBody(messages=MESSAGES, options=options)).sampling)
    if protocol == "chat":
        return dict(chat_request(ChatBody.model_validate({"messages": MESSAGES, **given})).sampling)
    if protocol == "completions":
        return dict(completion_requests(CompletionBody.model_validate({"prompt": "Hi", **given}))[0].sampling)
    if protocol == "responses":
        body = ResponsesBody.model_validate({"input": "Hi", **given})
        return dict(responses_request(body, given_items(body)).sampling)
    if protocol == "anthropic":
        body = MessagesBody.model_validate({"messages": MESSAGES, "max_tokens": 5, **given})
        return dict(messages_request(body).sampling)
    return dict(llama_cpp.LlamaCompletionBody.model_validate({"prompt": "Hi", **given}).answer_fields()["sampling"])


# What routes name or form differently.
ROUTES_OWN = {"logit_bias", "logprobs", "post_sampling_probs"}
PROTOCOLS = ("ollama", "chat", "completions", "responses", "anthropic", "llama.cpp")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_takes_every_parameter(protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    log_ignored.cache_clear()
    given = values()
    assert given.keys() == {field.name for field in fields(SamplingParams)} - ROUTES_OWN
    with caplog.at_level(logging.INFO):
        assert sampling_of(protocol, given) == given
    assert not caplog.messages


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_names_of_other_programs_are_taken(protocol: str) -> None:
    assert sampling_of(protocol, dict.fromkeys(ALIASES, 1.5)) == dict.fromkeys(ALIASES.values(), 1.5)


def test_settings_chats_models_and_servers_have_them_too() -> None:
    own = ROUTES_OWN | {"dry_sequence_breakers", "watermark_key"}
    names = {field.name for field in fields(SamplingParams)} - own
    assert set(COMMON) == names
    assert names <= {field.name for field in fields(Settings)}
    assert names <= {field.name for field in fields(Parameters)}
    assert names <= SUPPORTED.keys()
    assert ALIASES.keys().isdisjoint(names)
    sent = chat_fields(chat_request(ChatBody.model_validate({"messages": MESSAGES, **values()})))
    assert {name: sent[name] for name in names} == {name: values()[name] for name in names}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ["seed", "min_p", "top_k", "mirostat_tau", "temperature", "repetition_penalty"])
def test_booleans_are_not_numbers(protocol: str, name: str) -> None:
    with pytest.raises(Exception, match=r"number|integer"):
        sampling_of(protocol, {name: True})


@pytest.mark.parametrize(
    ("body", "given", "place"),
    [
        (OllamaBody, {"keep_alive": True}, "keep_alive"),
        (OllamaBody, {"keep_alive": False}, "keep_alive"),
        (OllamaBody, {"top_logprobs": True}, "top_logprobs"),
        (ChatBody, {"messages": MESSAGES, "keep_alive": True}, "keep_alive"),
        (ChatBody, {"messages": MESSAGES, "max_tokens": True}, "max_tokens"),
        (ChatBody, {"messages": MESSAGES, "n": True}, "n"),
        (ChatBody, {"messages": MESSAGES, "logit_bias": {"5": True}}, "logit_bias.5"),
        (ChatBody, {"messages": MESSAGES, "lora": [{"id": True}]}, "lora.0.id"),
        (EmbeddingsBody, {"input": "Hi", "dimensions": True}, "dimensions"),
        (MessagesBody, {"messages": MESSAGES, "max_tokens": True}, "max_tokens"),
        (llama_cpp.LlamaCompletionBody, {"prompt": "Hi", "n_predict": False}, "n_predict"),
    ],
)
def test_no_field_takes_a_boolean_for_a_number(body: type[Body], given: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError) as refused:
        body.model_validate(given)
    faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in refused.value.errors()]
    assert what_is_wrong(faults, given) == f"{place}: Input should be a number, not true or false"


def test_a_switch_is_still_one() -> None:
    assert ChatBody.model_validate({"messages": MESSAGES, "stream": True, "logprobs": False}).stream is True
