"""OpenAI's bodies to requests. Pure functions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from localllm.engine.loaded_model import LoadedModel
from localllm.engine.request import ContextPolicy, SamplingParams
from localllm.library.behaviour import SETTING_OF, Behaviour
from localllm.server.chat import TEXT_ONLY, Chat, Limits, infill_tokens, prepare_chat, prepare_text, with_defaults
from localllm.server.errors import ApiError
from localllm.server.forced_calls import call_schema
from localllm.server.front.model import ForeignModel, Prompt
from localllm.server.images import image_part_of_url, plain, text_part
from localllm.server.ollama.options import stop_strings
from localllm.server.openai.schema import ChatBody, CompletionBody, Extensions, Message, Sampled, Tool
from localllm.server.options import parse_duration
from localllm.server.service import Prepared

# What a model's own parameters may say about sampling.
SAMPLERS = frozenset(SETTING_OF.values()) & {field.name for field in fields(SamplingParams)}
# A bias of this much bans a token.
BANNED = -100
# Completions of one request that are asked of a server elsewhere at once.
MOST_ELSEWHERE = 64


def keep_alive(body: Extensions) -> float | None:
    """Seconds, or None for the server's default. Raises ApiError 400."""
    try:
        return None if body.keep_alive is None else parse_duration(body.keep_alive)
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def sampling_of(body: Sampled, logprobs: int | None, behaviour: Behaviour) -> SamplingParams:
    """The request's, else the model's own parameters, else OpenAI's defaults; min_p, which it lacks, is Ollama's."""
    values: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
    values |= {name: value for name, value in behaviour.settings.items() if name in SAMPLERS}
    values |= {name: value for name in SAMPLERS if (value := getattr(body, name, None)) is not None}
    if values.get("seed", 0) < 0:
        del values["seed"]
    return SamplingParams(**values, logit_bias=_biases(body.logit_bias or {}), logprobs=logprobs)


def sampled_of(body: Extensions, temperature: float | None, top_p: float | None) -> Sampled:
    """The sampling of a body that has few parameters of its own."""
    return Sampled(
        temperature=temperature,
        top_p=top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repeat_penalty=body.repeat_penalty,
    )


def limits_of(
    body: Extensions, sampling: SamplingParams, max_tokens: int | None, behaviour: Behaviour, stop: Any = None
) -> Limits:
    """How an answer is sampled and where it ends. Raises ApiError 400."""
    own: Mapping[str, Any] = behaviour.settings
    return Limits(
        sampling=sampling,
        max_tokens=own.get("max_tokens") if max_tokens is None else max_tokens,
        stop=(*stop_strings(stop or []), *behaviour.stop),
        context_limit=own.get("ctx") if body.num_ctx is None else body.num_ctx,
        policy=ContextPolicy.DROP_MESSAGES if body.truncate else ContextPolicy.REFUSE,
        given=frozenset(name for name in body.model_fields_set if getattr(body, name) is not None),
        adapters=None if body.lora is None else tuple((entry.id, entry.scale) for entry in body.lora),
    )


def _reseeded(prepared: Prepared, index: int) -> Prepared:
    sampling = prepared.request.sampling
    seed = None if sampling.seed is None else sampling.seed + index
    return replace(prepared, request=replace(prepared.request, sampling=replace(sampling, seed=seed)))


def chat_of(body: ChatBody) -> Chat:
    """The conversation of a chat completion. Looks at images: off the event loop. Raises ApiError 400, PictureError."""
    return Chat(
        name=body.model,
        messages=[message_of(message) for message in body.messages],
        tools=offered_tools(body.tools, body.tool_choice),
        think=think_of(body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)),
        format=format_of(body.response_format),
    )


def prepare_chat_body(
    model: LoadedModel | ForeignModel, behaviour: Behaviour, body: ChatBody, asked: Chat
) -> list[Prepared]:
    """A chat completion on a model."""
    wanted = (body.top_logprobs or 0) if body.logprobs or body.top_logprobs else None
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    limits = limits_of(body, sampling_of(body, wanted, behaviour), max_tokens, behaviour, body.stop)
    chat = with_defaults(asked, behaviour)
    return [_reseeded(prepare_chosen(model, chat, limits, body.tool_choice), index) for index in range(body.n or 1)]


def prepare_chosen(
    model: LoadedModel | ForeignModel, chat: Chat, limits: Limits, choice: str | dict[str, Any] | None
) -> Prepared:
    """A conversation whose answer must be a tool call where the choice says so. Raises ApiError 400."""
    name = _forced_name(choice)
    if name is None:
        return prepare_chat(model, chat, limits)
    if chat.format is not None:
        raise ApiError(400, "response_format and a forced tool_choice exclude each other")
    if isinstance(model, ForeignModel):
        return Prepared(model.chat_request(chat, limits, name))
    return prepare_chat(model, replace(chat, format=call_schema(chat.tools, name), calls=True), limits)


def _forced_name(choice: str | dict[str, Any] | None) -> str | None:
    """The tool that must be called, "" for any of them, None for no such demand."""
    if choice in (None, "auto", "none"):
        return None
    if choice in ("required", "any"):
        return ""
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return str(function["name"])
    raise ApiError(400, 'tool_choice is "none", "auto", "required" or names a function')


def offered_tools(tools: Sequence[Tool] | None, choice: str | dict[str, Any] | None) -> list[dict[str, Any]]:
    """The tools for the template; none where tool_choice says so."""
    if choice == "none":
        return []
    return [{"type": "function", "function": tool.function.model_dump(exclude_unset=True)} for tool in tools or []]


def think_of(effort: str | None) -> bool | str | None:
    """How a reasoning effort switches thinking."""
    return False if effort == "none" else effort


def format_of(response_format: dict[str, Any] | None) -> Any:
    """A `response_format`, or the `text.format` of responses, as a format. Raises ApiError 400."""
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return "json"
    holder = response_format.get("json_schema", response_format)
    if kind != "json_schema" or not isinstance(holder, dict) or not isinstance(holder.get("schema"), dict):
        raise ApiError(400, "response_format is of type text, json_object or json_schema with a schema")
    return holder["schema"]


def message_of(message: Message) -> dict[str, Any]:
    """A message as templates take it. Raises ApiError 400 for sound, and images that are no user's."""
    fields: dict[str, Any] = {"role": message.role, "content": content_of(message.content, message.role)}
    if message.tool_calls:
        fields["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    if reasoning := message.reasoning_content or message.reasoning:
        fields["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id"):
        if value := getattr(message, key):
            fields[key] = value
    return fields


def content_of(content: str | list[dict[str, Any]] | None, role: str) -> Any:
    """A content: text, or parts where a user's has images. Raises ApiError 400 for other kinds of parts."""
    if not isinstance(content, list) or role != "user":
        return text_of(content)
    return plain([_image(part) or text_part(text_of([part])) for part in content])


def _image(part: dict[str, Any]) -> dict[str, Any] | None:
    """An image_url of chat completions, or an input_image of responses."""
    if part.get("type") not in ("image_url", "input_image"):
        return None
    url = part.get("image_url")
    return image_part_of_url(url.get("url") if isinstance(url, dict) else url)


def text_of(content: str | list[dict[str, Any]] | None) -> str:
    """The text of a content, its parts one after the other. Raises ApiError 400 for what is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        text = part.get("text") or part.get("refusal") or ""
        if part.get("type") not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise ApiError(400, TEXT_ONLY)
        texts.append(text)
    return "\n".join(texts)


def prepare_completion(model: LoadedModel | ForeignModel, behaviour: Behaviour, body: CompletionBody) -> list[Prepared]:
    """Completions of one or several prompts, n of each. Raises ApiError 400."""
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, "best_of is not supported; leave it out or set it to n")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "log-probabilities of a prompt are not told: ask for echo or logprobs, not both")
    limits = limits_of(body, sampling_of(body, body.logprobs, behaviour), body.max_tokens, behaviour, body.stop)
    prompts = _prompts(model, body)
    if isinstance(model, ForeignModel) and body.echo:
        raise ApiError(400, "echo is not supported for a model of another server")
    most = MOST_ELSEWHERE if isinstance(model, ForeignModel) else model.engine.runner.info.max_sequences
    if len(prompts) * (body.n or 1) > most:
        raise ApiError(400, f"{len(prompts)} prompts are too many for one request; send them one after the other")
    return [_reseeded(prepare_text(model, prompt, limits), index) for prompt in prompts for index in range(body.n or 1)]


def _prompts(model: LoadedModel | ForeignModel, body: CompletionBody) -> list[Prompt]:
    prompt = body.prompt
    if body.suffix:
        if not isinstance(prompt, str):
            raise ApiError(400, "suffix goes with one prompt that is text")
        return [infill_tokens(model, body.model, prompt, body.suffix)]
    texts: Sequence[Any] = prompt if isinstance(prompt, list) and not _is_tokens(prompt) else [prompt]
    if not texts:
        raise ApiError(400, "prompt is empty")
    return [model.tokenise(text) if isinstance(text, str) else text for text in texts]


def _is_tokens(value: Sequence[Any]) -> bool:
    return bool(value) and isinstance(value[0], int)


def _biases(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        if not token.isdecimal() or len(token) > 10:
            raise ApiError(400, f"logit_bias: {token[:32]!r} is no token id")
        biases[int(token)] = -math.inf if bias <= BANNED else bias
    return biases
