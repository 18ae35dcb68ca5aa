"""Conversations, limits and wishes in the fields of OpenAI's protocol. Pure functions.

https://platform.openai.com/docs/api-reference/chat/create, and what vLLM, SGLang and llama.cpp have beside it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from localllm.remote.server import sampling_options
from localllm.server.errors import ApiError
from localllm.server.forced_calls import chosen_tools

if TYPE_CHECKING:
    from localllm.engine.request import SamplingParams
    from localllm.server.chat import Chat, Limits

# A bias of this much bans a token.
BANNED = -100


def chat_fields(chat: "Chat", limits: "Limits", forced: str | None = None) -> dict[str, Any]:
    """The body of a chat completion, without its model. forced: the tool that must be called, "" for any of them.

    Raises ApiError 400 for what cannot be asked for.
    """
    body = {"messages": _messages(chat.messages), **_limits(limits)}
    if forced is not None:
        # llama.cpp takes the name of a tool for no choice at all; a call of the only tool it knows how to force.
        body |= {"tools": chosen_tools(chat.tools, forced), "tool_choice": "required"}
    elif chat.tools:
        body["tools"] = list(chat.tools)
    if chat.continues:  # untold, vLLM and SGLang begin anew, and llama.cpp repeats what is there
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if chat.format not in (None, ""):
        body["response_format"] = _response_format(chat.format)
    if isinstance(chat.think, str):
        body["reasoning_effort"] = chat.think
    elif chat.think is not None:
        body["chat_template_kwargs"] = {"enable_thinking": chat.think}
    if limits.sampling.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": _rivals(limits.sampling.logprobs)}
    return body


def completion_fields(limits: "Limits", format: Any = None) -> dict[str, Any]:
    """The body of a completion, without its model and prompt."""
    body = _limits(limits)
    if format not in (None, ""):
        body["response_format"] = _response_format(format)
        # llama.cpp reads no response_format here, and says nothing of it.
        body["json_schema"] = format if isinstance(format, dict) else {"type": "object"}
    if limits.sampling.logprobs is not None:
        body["logprobs"] = _rivals(limits.sampling.logprobs)
    return body


def sampling_fields(sampling: "SamplingParams", given: frozenset[str]) -> dict[str, Any]:
    """Those that the client has set; the server decides the others, which knows what suits its model."""
    fields = sampling_options(sampling, given)
    if sampling.logit_bias:
        fields["logit_bias"] = {
            str(token): BANNED if bias == -math.inf else bias for token, bias in sampling.logit_bias.items()
        }
    return fields


def _limits(limits: "Limits") -> dict[str, Any]:
    if limits.adapters is not None:
        raise ApiError(400, "adapters cannot be chosen here; ask for a model of the server that has them")
    fields: dict[str, Any] = {}
    if limits.max_tokens is not None:
        fields["max_tokens"] = limits.max_tokens
    if limits.stop:
        fields["stop"] = list(limits.stop)
    return fields


def _rivals(wanted: int) -> int:
    """How many tokens to ask for at each place: llama.cpp tells no probability at all where none are wanted."""
    return max(wanted, 1)


def _response_format(format: Any) -> dict[str, Any]:
    """Raises ApiError 400 for what is neither "json" nor a schema."""
    if format == "json":
        return {"type": "json_object"}
    if isinstance(format, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": format, "strict": True}}
    raise ApiError(400, 'invalid format: expected "json" or a JSON schema')


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates take them, in the protocol's shape: every call has an id, every result names one.

    Ollama's clients send neither; a result then belongs to the first call that is still without one, of its name if it
    has one.
    """
    found = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls without results
    for number, message in enumerate(messages):
        fields: dict[str, Any] = {"role": message["role"], "content": message.get("content", "")}
        if reasoning := message.get("reasoning_content") or message.get("thinking"):
            fields["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            fields["tool_calls"] = [_call(call, f"call_{number}_{index}") for index, call in enumerate(calls)]
            waiting = [(call["id"], call["function"]["name"]) for call in fields["tool_calls"]]
        if message["role"] == "tool":
            fields["tool_call_id"] = message.get("tool_call_id") or _waiting(waiting, message.get("tool_name"))
            waiting = [entry for entry in waiting if entry[0] != fields["tool_call_id"]]
        if name := message.get("name"):
            fields["name"] = name
        found.append(fields)
    return found


def _waiting(calls: Sequence[tuple[str, str]], name: str | None) -> str:
    """The id of the call that a result without one belongs to. Raises ApiError 400 where there is none."""
    for identity, called in calls:
        if name in (None, called):
            return identity
    raise ApiError(400, "a message of the role tool answers no call; send the assistant's tool_calls before it")


def _call(call: Mapping[str, Any], identity: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments", {})
    return {
        "id": call.get("id") or identity,
        "type": "function",
        "function": {
            "name": function["name"],
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
        },
    }
