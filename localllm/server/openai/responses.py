"""/v1/responses: a request contains the conversation as items or refers to earlier ones; its answer is more items."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from localllm.answer.event import Answer, AnswerEvent, AnswerPart, PartKind, called
from localllm.answer.request import AnswerRequest
from localllm.answer.tool_calls import ToolCall
from localllm.engine.request import ContextPolicy, FinishReason
from localllm.errors import LocalLLMError
from localllm.server import answering
from localllm.server.bodies import Object
from localllm.server.errors import ApiError
from localllm.server.openai.client_tools import KINDS
from localllm.server.openai.conversations import stored_of
from localllm.server.openai.items import conversation_of, loaded_tools, sealed
from localllm.server.openai.schema import ResponsesBody
from localllm.server.openai.tools import RequestTools, custom_input, toolbox, with_choice
from localllm.server.openai.wire import BareRoute, OpenAIRoute, format_of, item_usage, think_of
from localllm.server.service import RunningAnswers, ServiceDep
from localllm.server.wire import TimedProgress, logprob_entries, notes_of, sse, timings

router = APIRouter(route_class=OpenAIRoute, tags=["OpenAI"])
bare = APIRouter(route_class=BareRoute, tags=["OpenAI"])


@dataclass(frozen=True, slots=True)
class _Kind:
    """Names of an item of text, and of its events. prefix: of its id. field: its place for its one part, of type part.

    text, whole: in the names of events about the part's text, and about the part. index: the field of its number.
    """

    item: str
    prefix: str
    field: str
    part: str
    text: str
    whole: str
    index: str


_MESSAGE = _Kind("message", "msg", "content", "output_text", "output_text", "content_part", "content_index")
_REASONING = _Kind("reasoning", "rs", "content", "reasoning_text", "reasoning_text", "content_part", "content_index")
# If the request wants a summary, the reasoning itself is sent as the summary.
_SUMMARY = _Kind(
    "reasoning", "rs", "summary", "summary_text", "reasoning_summary_text", "reasoning_summary_part", "summary_index"
)
# Calls: the type of an item, the prefix of its id, the field of its text, and the name of its events.
_FUNCTION_CALL = ("function_call", "fc", "arguments", "function_call_arguments")
_CUSTOM_CALL = ("custom_tool_call", "ctc", "input", "custom_tool_call_input")
_LOGPROBS = "message.output_text.logprobs"


@router.post("/v1/responses")
@bare.post("/responses")
async def responses(body: ResponsesBody, http: Request, service: ServiceDep) -> Response:
    """Answer a conversation."""
    body.model = await service.model_or_only(body.model)
    items, new, request = await _asked(body, http)
    stored, user = stored_of(http)

    def keep(response: Object) -> None:
        if body.store is not False:
            stored.keep(user, response, items, new, conversation_id(body))

    tools = toolbox(body.tools or [], loaded_tools(items))
    return await answering.answer(http, service, body, [request], _Writer(body, tools, keep))


@router.post("/v1/responses/input_tokens")
@bare.post("/responses/input_tokens")
async def input_tokens(body: ResponsesBody, http: Request, service: ServiceDep) -> Object:
    """Count the tokens of a request's prompt, including its template's."""
    *_, request = await _asked(body, http)
    return {
        "object": "response.input_tokens",
        "input_tokens": await answering.count_tokens(service, body.model, request),
    }


async def _asked(body: ResponsesBody, http: Request) -> tuple[list[Object], int, AnswerRequest]:
    """The items of a body's whole conversation, how many of them are new, and its request. Raises ApiError 400, 404."""
    if body.conversation and body.previous_response_id:
        raise ApiError(400, "conversation and previous_response_id exclude each other; send one of them")
    stored, user = stored_of(http)
    items = stored.expanded(user, given_items(body), body.previous_response_id, conversation_id(body))
    before = len(stored.expanded(user, [], body.previous_response_id, conversation_id(body)))
    return items, len(items) - before, await to_thread.run_sync(responses_request, body, items)


def conversation_id(body: ResponsesBody) -> str | None:
    """The conversation that a body names. Raises ApiError 400."""
    given = body.conversation
    found = given.get("id") if isinstance(given, dict) else given
    if given and not isinstance(found, str):
        raise ApiError(400, "conversation must be an id, or an object with one")
    return found or None


def given_items(body: ResponsesBody) -> list[Object]:
    """The items of a body."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}] if body.input else []
    return body.input


def responses_request(body: ResponsesBody, items: Sequence[Object]) -> AnswerRequest:
    """Convert a body; items: its whole conversation. Decodes images: call it off the event loop.

    Raises ApiError 400, also for background requests and prompts that OpenAI stores, and PictureError.
    """
    if body.background:
        raise ApiError(400, "background is not supported; stream the answer, or wait for it")
    if body.prompt:
        raise ApiError(400, "prompt names a template that is stored at OpenAI; send its text as instructions and input")
    messages = conversation_of(items)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if not messages:  # some clients probe a server with an empty conversation
        messages.append({"role": "user", "content": ""})
    wants_logprobs = body.top_logprobs is not None or _LOGPROBS in (body.include or ())
    fields = body.request_fields(None, (body.top_logprobs or 0) if wants_logprobs else None)
    if body.truncation == "auto":
        fields["context_policy"] = ContextPolicy.DROP_MESSAGES
    return AnswerRequest(
        messages=messages,
        may_go_on=not body.tools,
        **with_choice(toolbox(body.tools or [], loaded_tools(items)), body.tool_choice),
        one_call=body.parallel_tool_calls is False,
        think=think_of(body.reasoning.effort if body.reasoning else None),
        may_skip_thinking=True,
        format=format_of(body.text and body.text.format),
        max_tokens=body.max_output_tokens,
        **fields,
    )


class _Writer(answering.Writer):
    """Output items (reasoning, message, calls) are opened, filled and closed in turn."""

    route = OpenAIRoute

    def __init__(self, body: ResponsesBody, tools: RequestTools, keep: Callable[[Object], None]) -> None:
        """keep: called with the response when it is complete."""
        self._keep = keep
        self._body = body
        self._fixed = _begun(body)
        self._tools = tools
        is_summary = body.reasoning is not None and bool(body.reasoning.summary)
        self._kinds = {PartKind.CONTENT: _MESSAGE, PartKind.REASONING: _SUMMARY if is_summary else _REASONING}
        self._seals = "reasoning.encrypted_content" in (body.include or ())
        self._items: list[Object] = []
        self._open: PartKind | None = None
        self._text = ""
        self._logprobs: list[Object] = []  # of the open message
        self._told = 0  # log-probabilities of content so far
        self._sequence = 0
        self._progress = TimedProgress(body.return_progress)
        self._timed: Object = {}  # timings of the current event, if all events of text have them

    @property
    def _response(self) -> Object:
        return {**self._fixed, "model": self._body.model}

    def begin(self, _run: RunningAnswers | None = None) -> list[bytes]:
        """See answering.Writer. Nothing if progress has already started the stream."""
        if self._sequence:
            return []
        return [self._event(kind, response=self._response) for kind in ("response.created", "response.in_progress")]

    def progress(self, progress: Object) -> bytes:
        """See answering.Writer. The events are our addition, and llama-server's."""
        lines = [*self.begin(), self._event("localllm.progress", progress=progress)]
        if timed := self._progress.fields(progress):
            lines.append(self._event("response.in_progress", response=self._response, **timed))
        return b"".join(lines)

    def event(self, run: RunningAnswers, _index: int, event: AnswerEvent) -> Iterator[bytes]:
        self._timed = {"timings": timings(event)} if self._body.timings_per_token else {}
        fresh = logprob_entries(run.answers[0].content_logprobs[self._told :])
        self._told += len(fresh)
        for part in event.parts:
            of_content = fresh if part.kind is PartKind.CONTENT else ()
            yield from self._part(part, of_content)
            if of_content:
                fresh = []

    def end(self, run: RunningAnswers) -> Iterator[bytes]:
        answer = run.answers[0]
        yield from self._close(_status(answer))
        response = self._ended(answer)
        yield self._event(f"response.{response['status']}", response=response, timings=response["timings"])

    def error(self, error: LocalLLMError) -> bytes:
        body = self.error_body(error)["error"]
        told = {"code": body["code"] or "server_error", "message": body["message"]}
        failed = {**self._response, "status": "failed", "error": told, "output": self._items}
        return b"".join(
            [
                self._event("error", **{name: body[name] for name in ("code", "message", "param")}),
                self._event("response.failed", response=failed),
            ]
        )

    def whole(self, run: RunningAnswers) -> Object:
        answer = run.answers[0]
        texts = ((PartKind.REASONING, answer.reasoning), (PartKind.CONTENT, answer.content))
        parts = [AnswerPart(kind, text) for kind, text in texts if text]
        logprobs = logprob_entries(answer.content_logprobs)
        for part in [*parts, *(called([call]) for call in answer.calls)]:
            self._part(part, logprobs if part.kind is PartKind.CONTENT else ())
        self._close(_status(answer))
        return self._ended(answer)

    def _event(self, kind: str, **fields: Any) -> bytes:
        """An event with its sequence number."""
        self._sequence += 1
        return sse({"type": kind, "sequence_number": self._sequence - 1, **fields}, event=kind)

    def _item_event(self, what: str) -> bytes:
        """An event about the last item as a whole."""
        return self._event(f"response.output_item.{what}", output_index=len(self._items) - 1, item=self._items[-1])

    def _part(self, part: AnswerPart, logprobs: Sequence[Object] = ()) -> list[bytes]:
        if part.kind is PartKind.TOOL_CALLS:
            return self._calls(part)
        lines: list[bytes] = []
        if self._open is not part.kind:
            lines = [*self._close(), *self._begin_item(part.kind)]
        self._text += part.text
        self._logprobs += logprobs
        kind = self._kinds[part.kind]
        more = _with(logprobs, kind) | self._timed
        return [*lines, self._event(f"response.{kind.text}.delta", **self._at(kind), delta=part.text, **more)]

    def _begin_item(self, part_kind: PartKind) -> list[bytes]:
        self._open, self._text, self._logprobs = part_kind, "", []
        kind = self._kinds[part_kind]
        item: Object = {
            "type": kind.item,
            "id": f"{kind.prefix}_{secrets.token_hex(12)}",
            "status": "in_progress",
            "content": [],
            **({"role": "assistant"} if kind is _MESSAGE else {"summary": []}),
        }
        self._items.append(item)
        part = _content_part(kind, "", ())
        return [self._item_event("added"), self._event(f"response.{kind.whole}.added", **self._at(kind), part=part)]

    def _close(self, status: str = "completed") -> list[bytes]:
        """Close the open item with this status. A call that is still open was cut off by the answer's end."""
        part_kind, self._open = self._open, None
        if part_kind is None:
            return []
        item = self._items[-1]
        if part_kind is PartKind.TOOL_CALLS:
            item |= {"status": "incomplete"} | ({"arguments": self._text} if item["type"] == _FUNCTION_CALL[0] else {})
            return [self._item_event("done")]
        kind = self._kinds[part_kind]
        part = _content_part(kind, self._text, self._logprobs)
        item |= {kind.field: [part], "status": status}
        if kind is not _MESSAGE and self._seals:
            item["encrypted_content"] = sealed(self._text)
        return [
            self._event(f"response.{kind.text}.done", **self._at(kind), text=self._text, **_with(self._logprobs, kind)),
            self._event(f"response.{kind.whole}.done", **self._at(kind), part=part),
            self._item_event("done"),
        ]

    def _calls(self, part: AnswerPart) -> list[bytes]:
        """Events for new parts of tool calls. An item ends with its call, at the latest when the next call begins."""
        lines: list[bytes] = []
        calls = list(part.tool_calls)
        for delta in part.deltas:
            if delta.name:
                if calls and self._open is PartKind.TOOL_CALLS:
                    lines += self._end_call(calls.pop(0))
                lines += [*self._close(), self._begin_call(delta.name)]
            if delta.arguments and self._items[-1]["type"] == _FUNCTION_CALL[0]:
                self._text += delta.arguments
                event = f"response.{_FUNCTION_CALL[3]}.delta"
                lines.append(self._event(event, **self._at_item(), delta=delta.arguments))
        return lines + [line for call in calls for line in self._end_call(call)]

    def _begin_call(self, name: str) -> bytes:
        tool = self._tools.client_tool(name)
        identity = {"call_id": f"call_{secrets.token_hex(12)}", "status": "in_progress"}
        if tool.kind in KINDS:
            own = KINDS[tool.kind]
            kind, prefix, fields = f"{tool.kind}_call", own.prefix, own.call({}) | own.fixed
        else:
            kind, prefix, field, _ = _CUSTOM_CALL if tool.is_custom else _FUNCTION_CALL
            named = {"namespace": tool.namespace} if tool.namespace else {}
            fields = {"name": tool.name, **named, field: ""}
        item: Object = {"type": kind, "id": f"{prefix}_{secrets.token_hex(12)}", **identity, **fields}
        self._items.append(item)
        self._open, self._text = PartKind.TOOL_CALLS, ""
        return self._item_event("added")

    def _end_call(self, call: ToolCall) -> list[bytes]:
        item, at = self._items[-1], self._at_item()
        if own := KINDS.get(item["type"].removesuffix("_call")):
            self._open = None
            item |= {**own.call(call.arguments), "status": "completed"}
            return [self._item_event("done")]
        is_custom = item["type"] == _CUSTOM_CALL[0]
        _, _, field, delta = _CUSTOM_CALL if is_custom else _FUNCTION_CALL
        text = custom_input(call) if is_custom else self._text
        item |= {field: text, "status": "completed"}
        self._open = None
        named = {} if is_custom else {"name": item["name"]}
        return [
            *([self._event(f"response.{delta}.delta", **at, delta=text)] if is_custom else []),
            self._event(f"response.{delta}.done", **at, **named, **{field: text}),
            self._item_event("done"),
        ]

    def _at_item(self) -> Object:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _at(self, kind: _Kind) -> Object:
        """The location of the last item's part."""
        return {**self._at_item(), kind.index: 0}

    def _ended(self, answer: Answer) -> Object:
        status = _status(answer)
        response = {
            **self._response,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items,
            "usage": item_usage(answer),
            "timings": timings(answer.last),
            **notes_of(answer.last),
        }
        self._keep(response)
        return response


def _status(answer: Answer) -> str:
    """How an answer ended, and with it the item that was open."""
    return "incomplete" if answer.last.finish_reason is FinishReason.LENGTH else "completed"


def _begun(body: ResponsesBody) -> Object:
    """The response before its first token."""
    sampling = body.sampling_fields()
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        **({"conversation": {"id": conversation_id(body)}} if body.conversation else {}),
        "store": body.store is not False,
        "temperature": sampling.get("temperature", 1.0),
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "top_logprobs": body.top_logprobs or 0,
        "tools": body.tools or [],
        "top_p": sampling.get("top_p", 1.0),
        "truncation": "auto" if body.truncate else body.truncation or "disabled",
        "usage": None,
    }


def _content_part(kind: _Kind, text: str, logprobs: Sequence[Object]) -> Object:
    more: Object = {"annotations": [], **_with(logprobs, kind)} if kind is _MESSAGE else {}
    return {"type": kind.part, "text": text, **more}


def _with(logprobs: Sequence[Object], kind: _Kind) -> Object:
    return {"logprobs": list(logprobs)} if kind is _MESSAGE else {}


router.include_router(bare)
