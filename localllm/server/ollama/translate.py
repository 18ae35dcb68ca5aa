"""Ollama's bodies to requests, pieces of answers to its lines. Pure functions."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from gguf_io.tokenizer import Tokenizer
from localllm.engine.loaded_model import LoadedModel
from localllm.engine.request import ContextPolicy, FinishReason, Progress, SamplingParams, TokenEvent, TokenLogprob
from localllm.engine.tool_calls import ToolCall
from localllm.library.behaviour import Behaviour
from localllm.server.chat import (
    Chat,
    Limits,
    can_think,
    infill_tokens,
    prepare_chat,
    prepare_text,
    with_defaults,
)
from localllm.server.errors import ApiError
from localllm.server.front.model import ForeignModel, Prompt
from localllm.server.front.stream import Spellings
from localllm.server.images import image_part, plain, text_part
from localllm.server.load_watch import LoadState
from localllm.server.ollama.options import Options, read_options
from localllm.server.ollama.schema import ChatBody, Common, GenerateBody, Message
from localllm.server.options import parse_duration
from localllm.server.service import Prepared

NANOSECONDS = 1_000_000_000

# The longest answer where the window rolls, which would never end by itself.
CONTEXTS_OF_ANSWER = 10


def keep_alive(value: float | str | None) -> float | None:
    """Seconds, or None for the server's default. Raises ApiError 400."""
    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def chat_of(body: ChatBody) -> Chat:
    """The conversation of a chat request; an answer at its end goes on. Looks at images: off the event loop.

    Raises ApiError 400, PictureError.
    """
    messages = [_message(message) for message in body.messages or []]
    last = messages[-1] if messages else {}
    return Chat(
        name=body.model,
        messages=messages,
        continues=last.get("role") == "assistant" and "tool_calls" not in last,
        tools=[tool.model_dump(exclude_unset=True) | {"type": "function"} for tool in body.tools or []],
        think=body.think or None if isinstance(body.think, str) else body.think,
        format=body.format,
    )


def prepare_chat_body(
    model: LoadedModel | ForeignModel, behaviour: Behaviour, body: ChatBody, asked: Chat
) -> list[Prepared]:
    """A chat request on a model. Whole old messages are dropped where they do not fit, unless truncate is false."""
    policy = ContextPolicy.REFUSE if body.truncate is False else ContextPolicy.DROP_MESSAGES
    chat = with_defaults(_with_thinking(asked, model), behaviour)
    return [prepare_chat(model, chat, _limits(body, behaviour, policy))]


def prepare_generate(model: LoadedModel | ForeignModel, behaviour: Behaviour, body: GenerateBody) -> list[Prepared]:
    """A generate request on a model: raw, to be filled in, or as a user's message where the model has a template."""
    check_generate(body)
    prompt = body.prompt or ""
    policy = ContextPolicy.REFUSE if body.truncate is False or body.shift is False else ContextPolicy.ROLLING
    limits = _limits(body, behaviour, policy)
    if policy is ContextPolicy.ROLLING and not isinstance(model, ForeignModel):
        most = CONTEXTS_OF_ANSWER * min(limits.context_limit or model.engine.context, model.engine.context)
        limits = replace(limits, max_tokens=most if limits.max_tokens is None else min(limits.max_tokens, most))
    if body.suffix:
        return [prepare_text(model, infill_tokens(model, body.model, prompt, body.suffix), limits, body.format)]
    if body.raw or body.context or (model.template.is_default and not body.images):
        if body.system:
            raise ApiError(400, "system has no place in this prompt; put its text into the prompt")
        if body.think:
            raise ApiError(400, f'"{body.model}" does not support thinking')
        tokens: Prompt = model.tokenise(prompt)
        if body.context:
            if isinstance(model, ForeignModel):
                raise ApiError(400, "context is not supported for a model of another server; use /api/chat")
            tokens = (*body.context, *model.tokenizer.encode(prompt, add_special=False))
        return [prepare_text(model, tokens, limits, body.format)]
    messages = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": _content(prompt, body.images)})
    think = body.think or None if isinstance(body.think, str) else body.think
    chat = Chat(body.model, messages, think=think, format=body.format)
    return [prepare_chat(model, with_defaults(_with_thinking(chat, model), behaviour), limits)]


def check_generate(body: GenerateBody) -> None:
    """Raise ApiError 400 for combinations that no model can serve."""
    if body.images and (body.raw or body.suffix or body.context):
        raise ApiError(400, "images have no place in raw mode, with suffix, or with context; leave those out")
    if body.template:
        raise ApiError(400, "a template cannot be given in a request; the model's own is used")
    if body.raw and (body.system or body.context):
        raise ApiError(400, "raw mode does not support template, system, or context")


def _with_thinking(chat: Chat, model: LoadedModel | ForeignModel) -> Chat:
    """Models that can think do, unless they are told not to."""
    if chat.think is None and can_think(model.template):
        return replace(chat, think=True)
    return chat


def _limits(body: Common, behaviour: Behaviour, policy: ContextPolicy) -> Limits:
    options = read_options({**_parameters(behaviour), **(body.options or {})})
    return Limits(
        sampling=_with_logprobs(options, body),
        max_tokens=options.max_tokens,
        stop=options.stop,
        context_limit=options.context_limit,
        adapters=options.adapters,
        keep=options.keep,
        policy=policy,
        given=frozenset(body.options or ()),
    )


def _parameters(behaviour: Behaviour) -> dict[str, Any]:
    """A manifest's settings in the words of options."""
    return behaviour.parameters | ({"stop": list(behaviour.stop)} if behaviour.stop else {})


def _with_logprobs(options: Options, body: Common) -> SamplingParams:
    wanted = (body.top_logprobs or 0) if body.logprobs or body.top_logprobs else None
    return replace(options.sampling, logprobs=wanted)


def _content(text: str, images: Sequence[str] | None) -> Any:
    """A content with its images before its text, as Ollama has them."""
    return plain([*map(image_part, images or ()), text_part(text)])


def _message(message: Message) -> dict[str, Any]:
    content = _content(message.content or "", message.images)
    fields: dict[str, Any] = {"role": message.role.lower(), "content": content}
    if message.thinking:
        fields["thinking"] = message.thinking
    if message.tool_calls:
        fields["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    for key in ("tool_name", "tool_call_id"):
        if value := getattr(message, key):
            fields[key] = value
    return fields


def now() -> str:
    """The time in RFC 3339, as created_at has it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def line(model: str, content: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One object of a stream; more comes after `done`."""
    return {"model": model, "created_at": now(), **content, "done": False, **more}


def final(model: str, content: dict[str, Any], last: TokenEvent, total_s: float, load_s: float) -> dict[str, Any]:
    """The last object: why it ended, counts of tokens and times in nanoseconds.

    dropped_messages and dropped_tokens, which Ollama lacks, tell what did not fit into the context.
    """
    counts, timings = last.counts, last.timings
    dropped = {"dropped_messages": counts.dropped_messages, "dropped_tokens": counts.dropped_tokens}
    return {
        "model": model,
        "created_at": now(),
        **content,
        "done": True,
        "done_reason": "length" if last.finish_reason is FinishReason.LENGTH else "stop",
        "total_duration": round(total_s * NANOSECONDS),
        "load_duration": round(load_s * NANOSECONDS),
        "prompt_eval_count": counts.prompt,
        "prompt_eval_cached_count": counts.cached,
        "prompt_eval_duration": round(timings.prefill_s * NANOSECONDS),
        "eval_count": counts.generated,
        "eval_duration": round(timings.decode_s * NANOSECONDS),
        **{name: count for name, count in dropped.items() if count},
    }


def message_of(content: str, reasoning: str, calls: Iterable[ToolCall], first_call: int = 0) -> dict[str, Any]:
    """An assistant's message, or a part of one. first_call: how many calls came before."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["thinking"] = reasoning
    found = [
        {
            "id": f"call_{secrets.token_hex(4)}",
            "function": {"index": index, "name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls, start=first_call)
    ]
    if found:
        message["tool_calls"] = found
    return message


def progress_of(progress: Progress) -> dict[str, Any]:
    """How far a request has come before its first token: place in the queue, tokens read and to read."""
    return {
        "queue_position": progress.queue_position,
        "completed": progress.prefilled,
        "total": progress.total,
    }


def load_progress(state: LoadState) -> dict[str, Any]:
    """How far a model's load is: what it does now, and which share of that is done, 0 to 1."""
    return {"phase": state.phase, "share": round(state.share, 4)}


def logprobs_of(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer | Spellings) -> list[dict[str, Any]]:
    """Each token with the logarithm of its probability and its best rivals."""
    return [
        {
            **_token(entry.token_id, entry.logprob, tokenizer),
            "top_logprobs": [_token(token_id, logprob, tokenizer) for token_id, logprob in entry.top],
        }
        for entry in logprobs
    ]


def _token(token_id: int, logprob: float, tokenizer: Tokenizer | Spellings) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}
