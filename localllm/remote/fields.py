"""Builds the bodies of OpenAI requests. Pure functions.

https://platform.openai.com/docs/api-reference/chat/create, with the extensions of vLLM, SGLang and llama.cpp.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gguf_io.media import is_sound
from localllm.answer.placeholders import without_images
from localllm.answer.request import AnswerRequest, Message
from localllm.errors import RequestError
from localllm.sampling import COMMON

BANNED = -100  # the logit_bias that bans a token
_PNG = b"\x89PNG"


def check(request: AnswerRequest) -> None:
    """Raise RequestError if the request is invalid, or needs a model of this machine."""
    request.check()
    if request.sampling.get("watermark_key"):
        raise RequestError("watermark_key marks answers of this machine's models only, not of a remote server")
    if request.sampling.get("post_sampling_probs"):
        raise RequestError("post_sampling_probs is not supported for models of a remote server")


def chat_fields(request: AnswerRequest) -> dict[str, Any]:
    """The body of a chat completion, without its model. Raises RequestError for a tool result without a call."""
    body = {"messages": _messages(request.messages), **_limits(request)}
    if request.tool_choice is not None:
        # llama.cpp treats a named tool as "auto", but forces a call of the only tool.
        body |= {"tools": request.chosen_tools, "tool_choice": "required"}
    elif offered := request.offered_tools:
        body["tools"] = offered
    elif request.tools:
        body |= {"tools": request.tools, "tool_choice": "none"}
    if request.goes_on:  # without these, vLLM and SGLang start a new message, and llama.cpp repeats the old one
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    elif request.messages and request.messages[-1]["role"] == "assistant":  # llama.cpp and localllm would continue it
        body |= {"continue_final_message": False, "add_generation_prompt": True}
    if request.has_format:
        body["response_format"] = _response_format(request.format)
    if isinstance(request.think, str):
        body["reasoning_effort"] = request.think
    arguments = dict(request.template_arguments)
    if isinstance(request.think, bool):
        arguments["enable_thinking"] = request.think
    if arguments:
        body["chat_template_kwargs"] = arguments
    if request.one_call:
        body["parallel_tool_calls"] = False
    if (logprobs := request.sampling.get("logprobs")) is not None:
        body |= {"logprobs": True, "top_logprobs": max(logprobs, 1)}  # llama.cpp sends none at all for 0
    return body


def completion_fields(request: AnswerRequest) -> dict[str, Any]:
    """The body of a completion, without its model."""
    prompt = request.prompt
    if isinstance(prompt, str):
        prompt = "".join(f"{name}\n{text}\n\n" for name, text in request.extra) + prompt
    body = {"prompt": prompt if prompt is None or isinstance(prompt, str) else list(prompt), **_limits(request)}
    if request.suffix is not None:
        body["suffix"] = request.suffix
    if request.has_format:
        body["response_format"] = _response_format(request.format)
        # llama.cpp ignores response_format here.
        body["json_schema"] = request.format if isinstance(request.format, dict) else {"type": "object"}
    if request.least_indent:
        body["n_indent"] = request.least_indent
    if request.line_limit_s is not None:
        body["t_max_predict_ms"] = round(1000 * request.line_limit_s)
    if (logprobs := request.sampling.get("logprobs")) is not None:
        body["logprobs"] = max(logprobs, 1)
    return body


def _limits(request: AnswerRequest) -> dict[str, Any]:
    """Limits and sampling parameters that the request sets; the server's defaults apply to the others."""
    fields: dict[str, Any] = {name: value for name in COMMON if (value := request.sampling.get(name)) is not None}
    if "repeat_penalty" in fields:
        fields["repetition_penalty"] = fields["repeat_penalty"]  # vLLM's and SGLang's name
    if biases := request.sampling.get("logit_bias"):
        fields["logit_bias"] = {str(token): BANNED if bias == -math.inf else bias for token, bias in biases.items()}
    if request.max_tokens is not None and request.max_tokens >= 0:
        fields["max_tokens"] = request.max_tokens
    for name in ("image_min_tokens", "image_max_tokens"):  # of localllm's own server
        if (tokens := getattr(request, name)) is not None:
            fields[name] = tokens
    if request.stop:
        fields["stop"] = list(request.stop)
    if request.grammar is not None:
        kind, source = request.grammar
        # llama.cpp's name, or older vLLM's and localllm's; then SGLang's and vLLM's own.
        names = ("guided_regex", "regex") if kind == "regex" else ("grammar", "ebnf")
        fields |= dict.fromkeys(names, source)
        fields["structured_outputs"] = {"regex" if kind == "regex" else "grammar": source}
    if request.ignore_eos:
        fields["ignore_eos"] = True
    return fields


def _response_format(format: Any) -> dict[str, Any]:
    if format == "json":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": format, "strict": True}}


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in OpenAI's format: every tool call has an id, and every result refers to one.

    Ollama's clients send no ids: a result is matched to the first call without a result, and with its name if given.
    """
    found = []
    waiting: dict[str, str] = {}  # calls without results: their ids and names
    for number, message in enumerate(messages):
        if message["role"] == "tool":  # results have no images in this protocol
            (message,) = without_images([message])  # noqa: PLW2901
        fields: dict[str, Any] = {"role": message["role"], "content": _content(message.get("content", ""))}
        if reasoning := message.get("reasoning_content") or message.get("thinking"):
            fields["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            fields["tool_calls"] = [_call(call, f"call_{number}_{index}") for index, call in enumerate(calls)]
            waiting = {call["id"]: call["function"]["name"] for call in fields["tool_calls"]}
        if message["role"] == "tool":
            fields["tool_call_id"] = message.get("tool_call_id") or _waiting(waiting, message.get("tool_name"))
            waiting.pop(fields["tool_call_id"], None)
        if name := message.get("name"):
            fields["name"] = name
        found.append(fields)
    return found


def _waiting(calls: Mapping[str, str], name: str | None) -> str:
    """The id of the call that a result belongs to. Raises RequestError if there is none."""
    for identity, called in calls.items():
        if name in (None, called):
            return identity
    raise RequestError("a tool message has no matching tool call; send the assistant's tool_calls before it")


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


def _content(content: Any) -> Any:
    """Content with images as data: URLs (https://platform.openai.com/docs/guides/images-vision), and WAV files."""
    if not isinstance(content, list):
        return content
    return [_medium(part) if part.get("type") == "image" else part for part in content]


def _medium(part: Mapping[str, Any]) -> dict[str, Any]:
    if is_sound(part["data"]):
        encoded = base64.b64encode(part["data"]).decode()
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}
    data, detail = part["data"], {"detail": part["detail"]} if "detail" in part else {}
    kind = "png" if data.startswith(_PNG) else "jpeg"
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, **detail}}
