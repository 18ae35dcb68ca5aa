"""/v1/responses, stateless: a request has the whole conversation, its answer is a list of items."""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from localllm.answer.event import Answer, AnswerEvent, AnswerPart, PartKind
from localllm.answer.request import AnswerRequest
from localllm.answer.tool_calls import ToolCall
from localllm.engine.request import ContextPolicy, FinishReason
from localllm.errors import LocalLLMError
from localllm.server.answering import answer
from localllm.server.bodies import keep_alive_s
from localllm.server.contents import TEXT_ONLY, openai_content, openai_text
from localllm.server.errors import ApiError, message_of, status_of
from localllm.server.openai.schema import ResponsesBody
from localllm.server.openai.wire import Object, OpenAIRoute, arguments_of, format_of, think_of, tool_choice_of
from localllm.server.service import Run, ServiceDep
from localllm.server.wire import SSE, sse

router = APIRouter(route_class=OpenAIRoute, tags=["OpenAI"])

# The type of an item, the prefix of its id, and the type of its one part.
_ITEMS = {
    PartKind.REASONING: ("reasoning", "rs", "reasoning_text"),
    PartKind.CONTENT: ("message", "msg", "output_text"),
}
_SAID = ("content", "reasoning_content", "tool_calls")
STATEFUL = ("previous_response_id", "conversation", "background")


@router.post("/v1/responses")
async def responses(body: ResponsesBody, http: Request, service: ServiceDep) -> Response:
    """Answer a conversation."""
    request = await to_thread.run_sync(responses_request, body)
    return await answer(
        http,
        service,
        body.model,
        [request],
        _Writer(body),
        stream=bool(body.stream),
        progress=body.progress,
        keep_alive_s=keep_alive_s(body.keep_alive),
    )


def responses_request(body: ResponsesBody) -> AnswerRequest:
    """Convert a body. Decodes images: call it off the event loop.

    Raises ApiError 400, also for stateful requests, and PictureError.
    """
    for name in STATEFUL:
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported: responses are not stored; send the whole conversation")
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages += _joined([_message(item) for item in given])
    if not given or given == [{"role": "user", "content": ""}]:
        raise ApiError(400, "input is empty")
    fields = body.request_fields(None)
    if body.truncation == "auto":
        fields["policy"] = ContextPolicy.DROP_MESSAGES
    return AnswerRequest(
        messages=messages,
        tools=[] if body.tool_choice == "none" else [_tool(tool) for tool in body.tools or []],
        tool_choice=tool_choice_of(body.tool_choice),
        think=think_of(body.reasoning.effort if body.reasoning else None),
        format=format_of((body.text or {}).get("format")),
        max_tokens=body.max_output_tokens,
        **fields,
    )


def _joined(messages: list[Object]) -> list[Object]:
    """Join an assistant's items of one turn (reasoning, text, calls) into one message."""
    found: list[Object] = []
    for message in messages:
        before = found[-1] if found else {}
        same_turn = message["role"] == before.get("role") == "assistant"
        if not same_turn or (message["content"] and (before["content"] or "tool_calls" in before)):
            found.append(message)
            continue
        before["content"] = before["content"] or message["content"]
        for key in ("reasoning_content", "tool_calls"):
            if key in message:
                before[key] = before[key] + message[key] if key in before else message[key]
    return [message for message in found if message["role"] != "assistant" or any(map(message.get, _SAID))]


def _message(item: Object) -> Object:
    """An input item as a message."""
    kind = item.get("type", "message")
    if kind == "message":
        content, role = item.get("content"), item.get("role")
        if not isinstance(role, str) or not isinstance(content, str | list):
            raise ApiError(400, "an input message needs a role and content")
        if isinstance(content, list) and not all(isinstance(part, dict) for part in content):
            raise ApiError(400, TEXT_ONLY)
        return {"role": role, "content": openai_content(content, role)}
    if kind == "function_call":
        function = {"name": _string(item, "name"), "arguments": _string(item, "arguments")}
        call = {"id": _string(item, "call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        output = item.get("output")
        parts = output if isinstance(output, list) else []
        if not isinstance(output, str | list) or not all(isinstance(part, dict) for part in parts):
            raise ApiError(400, "an item of type function_call_output needs output as text")
        return {"role": "tool", "tool_call_id": _string(item, "call_id"), "content": openai_text(output)}
    if kind == "reasoning":
        parts = item.get("content") or []
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        reasoning = "\n".join(text for text in texts if isinstance(text, str))
        return {"role": "assistant", "content": "", "reasoning_content": reasoning}
    raise ApiError(400, f"input items of type {str(kind)[:32]!r} are not supported")


def _tool(tool: Object) -> Object:
    if tool.get("type") != "function":
        raise ApiError(400, "only tools of type function are supported")
    kept = {key: tool[key] for key in ("description", "parameters") if tool.get(key)}
    return {"type": "function", "function": {"name": _string(tool, "name"), **kept}}


def _string(item: Object, key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise ApiError(400, f"an item of type {str(item.get('type'))[:32]} needs {key} as text")
    return value


class _Writer:
    """See answering.Writer. Output items (reasoning, message, calls) are opened, filled and closed in turn."""

    media_type = SSE

    def __init__(self, body: ResponsesBody) -> None:
        self._response = _begun(body)
        self._items: list[Object] = []
        self._open: PartKind | None = None
        self._text = ""
        self._sequence = 0

    def begin(self, _run: Run | None = None) -> list[bytes]:
        """See answering.Writer. Nothing if progress has begun the stream."""
        if self._sequence:
            return []
        return [self._event(kind, response=self._response) for kind in ("response.created", "response.in_progress")]

    def progress(self, progress: Object) -> bytes:
        """See answering.Writer. The event is our addition."""
        return b"".join([*self.begin(), self._event("localllm.progress", progress=progress)])

    def event(self, _run: Run, _index: int, event: AnswerEvent, _before: Answer) -> Iterator[bytes]:
        for part in event.parts:
            yield from self._part(part)

    def end(self, _run: Run, answers: Sequence[Answer]) -> Iterator[bytes]:
        yield from self._close()
        response = self._ended(answers[0])
        yield self._event(f"response.{response['status']}", response=response)

    def error(self, error: LocalLLMError) -> bytes:
        body = OpenAIRoute.error_body(status_of(error), message_of(error))["error"]
        return self._event("error", **{name: body[name] for name in ("code", "message", "param")})

    def whole(self, _run: Run, answers: Sequence[Answer]) -> Object:
        answer = answers[0]
        texts = ((PartKind.REASONING, answer.reasoning), (PartKind.CONTENT, answer.content))
        parts = [AnswerPart(kind, text) for kind, text in texts if text]
        for part in [*parts, *(AnswerPart(PartKind.TOOL_CALLS, "", (call,)) for call in answer.calls)]:
            self._part(part)
        self._close()
        return self._ended(answer)

    def _event(self, kind: str, **fields: Any) -> bytes:
        """An event with its sequence number."""
        self._sequence += 1
        return sse({"type": kind, "sequence_number": self._sequence - 1, **fields}, event=kind)

    def _part(self, part: AnswerPart) -> list[bytes]:
        if part.kind is PartKind.TOOL_CALLS:
            return [line for call in part.tool_calls for line in self._call(call)]
        lines: list[bytes] = []
        if self._open is not part.kind:
            lines = [*self._close(), *self._begin_item(part.kind)]
        self._text += part.text
        kind = _ITEMS[part.kind][2]
        delta = self._event(f"response.{kind}.delta", **self._at(), delta=part.text, **_logprobs(part.kind))
        return [*lines, delta]

    def _begin_item(self, kind: PartKind) -> list[bytes]:
        self._open, self._text = kind, ""
        name, prefix, _ = _ITEMS[kind]
        item: Object = {
            "type": name,
            "id": f"{prefix}_{secrets.token_hex(12)}",
            "status": "in_progress",
            "content": [],
            **({"role": "assistant"} if kind is PartKind.CONTENT else {"summary": []}),
        }
        self._items.append(item)
        return [
            self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item)),
            self._event("response.content_part.added", **self._at(), part=_content_part(kind, "")),
        ]

    def _close(self) -> list[bytes]:
        """Complete the open item."""
        kind, self._open = self._open, None
        if kind is None:
            return []
        part, item = _content_part(kind, self._text), self._items[-1]
        item |= {"content": [part], "status": "completed"}
        return [
            self._event(f"response.{part['type']}.done", **self._at(), text=self._text, **_logprobs(kind)),
            self._event("response.content_part.done", **self._at(), part=part),
            self._event("response.output_item.done", output_index=len(self._items) - 1, item=item),
        ]

    def _call(self, call: ToolCall) -> list[bytes]:
        lines = self._close()
        arguments = arguments_of(call)
        item: Object = {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(12)}",
            "call_id": f"call_{secrets.token_hex(12)}",
            "name": call.name,
            "arguments": arguments,
            "status": "completed",
        }
        self._items.append(item)
        at = {"item_id": item["id"], "output_index": len(self._items) - 1}
        begun = {**item, "arguments": "", "status": "in_progress"}
        return [
            *lines,
            self._event("response.output_item.added", output_index=at["output_index"], item=begun),
            self._event("response.function_call_arguments.delta", **at, delta=arguments),
            self._event("response.function_call_arguments.done", **at, name=call.name, arguments=arguments),
            self._event("response.output_item.done", output_index=at["output_index"], item=item),
        ]

    def _at(self) -> Object:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _ended(self, answer: Answer) -> Object:
        cut, counts = answer.last.finish_reason is FinishReason.LENGTH, answer.last.counts
        return {
            **self._response,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": counts.prompt,
                "input_tokens_details": {"cached_tokens": counts.cached},
                "output_tokens": counts.generated,
                "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
                "total_tokens": counts.prompt + counts.generated,
            },
        }


def _begun(body: ResponsesBody) -> Object:
    """The response before its first token."""
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": body.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "auto" if body.truncate else body.truncation or "disabled",
        "usage": None,
    }


def _content_part(kind: PartKind, text: str) -> Object:
    more: Object = {"annotations": [], "logprobs": []} if kind is PartKind.CONTENT else {}
    return {"type": _ITEMS[kind][2], "text": text, **more}


def _logprobs(kind: PartKind) -> Object:
    return {"logprobs": []} if kind is PartKind.CONTENT else {}
