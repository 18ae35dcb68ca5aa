"""Ollama's messages, lines and errors. Pure functions."""

import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from localllm.answer.event import AnswerEvent
from localllm.answer.tool_calls import ToolCall
from localllm.engine.request import FinishReason
from localllm.errors import LocalLLMError
from localllm.server.contents import image_part, plain, text_part
from localllm.server.errors import refusal_of
from localllm.server.json_body import ProtocolRoute
from localllm.server.ollama.schema import OllamaMessage
from localllm.server.wire import dropped_of, ndjson, notes_of

NANOSECONDS = 1_000_000_000


def error_line(error: LocalLLMError) -> bytes:
    """An error within a stream."""
    return ndjson(ProtocolRoute.error_body(refusal_of(error)))


def content_of(text: str, images: Sequence[str] | None) -> Any:
    """A content with its images before its text, as in Ollama. Raises ApiError 400, PictureError."""
    return plain([*map(image_part, images or ()), text_part(text)])


def conversation_message(message: OllamaMessage) -> dict[str, Any]:
    """A message as chat templates expect it. Raises ApiError 400, PictureError."""
    content = content_of(message.content or "", message.images)
    fields: dict[str, Any] = {"role": message.role.lower(), "content": content}
    if message.thinking:
        fields["thinking"] = message.thinking
    if message.tool_calls:
        fields["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    for key in ("tool_name", "tool_call_id"):
        if value := getattr(message, key):
            fields[key] = value
    return fields


def answer_message(content: str, reasoning: str, calls: Iterable[ToolCall], first_call: int = 0) -> dict[str, Any]:
    """An assistant's message, or a part of one. first_call: the index of the first tool call."""
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


def now() -> str:
    """The time in RFC 3339, for created_at."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def line(model: str, content: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One object of a stream. more: fields after `done`."""
    return {"model": model, "created_at": now(), **content, "done": False, **more}


def final(model: str, content: dict[str, Any], last: AnswerEvent, total_s: float, load_s: float) -> dict[str, Any]:
    """The last object: why the answer ended, token counts, and times in nanoseconds."""
    counts, timings = last.counts, last.timings
    return {
        **line(model, content),
        "done": True,
        "done_reason": "length" if last.finish_reason is FinishReason.LENGTH else "stop",
        "total_duration": round(total_s * NANOSECONDS),
        "load_duration": round(load_s * NANOSECONDS),
        "prompt_eval_count": counts.prompt,
        "prompt_eval_cached_count": counts.cached,
        "prompt_eval_duration": round(timings.prefill_s * NANOSECONDS),
        "eval_count": counts.generated,
        "eval_duration": round(timings.decode_s * NANOSECONDS),
        **({"draft_count": counts.drafted, "draft_accepted_count": counts.accepted} if counts.drafted else {}),
        **({"draft_duration": round(timings.drafting_s * NANOSECONDS)} if timings.drafting_s else {}),
        **dropped_of(counts),
        **notes_of(last),
    }
