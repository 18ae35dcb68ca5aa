"""What several of OpenAI's routes write, and how their choices of tools, effort and format are read. Pure functions."""

import json
import secrets
import time
from typing import Any

from localllm.answer.event import Answer, AnswerEvent
from localllm.answer.tool_calls import ToolCall
from localllm.engine.request import FinishReason
from localllm.errors import LocalLLMError
from localllm.server.errors import ApiError, kind_of, message_of, status_of
from localllm.server.json_body import ProtocolRoute
from localllm.server.wire import sse

Object = dict[str, Any]

DONE = b"data: [DONE]\n\n"
_KINDS = {401: "authentication_error", 404: "not_found_error"}


class OpenAIRoute(ProtocolRoute):
    """A route of OpenAI's."""

    @staticmethod
    def error_body(status: int, message: str, code: str | None = None) -> Object:
        """An error, of a request or within a stream."""
        return {"error": {"message": message, "type": kind_of(status, _KINDS), "param": None, "code": code}}


def error_event(error: LocalLLMError) -> bytes:
    """An error in the middle of a stream."""
    return sse(OpenAIRoute.error_body(status_of(error), message_of(error)))


def head(prefix: str, kind: str, model: str) -> Object:
    """The fields with which a completion, or each chunk of one, begins."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": "fp_localllm",
    }


def tool_calls(answer: Answer | AnswerEvent) -> list[Object]:
    """Calls with fresh ids, their arguments as JSON text."""
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": arguments_of(call)},
        }
        for call in answer.calls
    ]


def arguments_of(call: ToolCall) -> str:
    """A call's arguments as JSON text."""
    return json.dumps(call.arguments, ensure_ascii=False)


def finish_reason(last: AnswerEvent, calls: bool) -> str:
    """Why an answer ended."""
    if calls:
        return "tool_calls"
    return "length" if last.finish_reason is FinishReason.LENGTH else "stop"


def think_of(effort: str | None) -> bool | str | None:
    """How a reasoning effort switches thinking."""
    return False if effort == "none" else effort


def format_of(response_format: Object | None) -> Any:
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


def tool_choice_of(choice: str | Object | None) -> str | None:
    """The tool that must be called, "" for any of them, None where the model decides. Raises ApiError 400."""
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        return ""
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return str(function["name"])
    raise ApiError(400, 'tool_choice is "none", "auto", "required" or names a function')
