"""/v1/chat/completions."""

from collections.abc import Iterator, Sequence

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from localllm.answer.event import Answer, AnswerEvent
from localllm.answer.request import AnswerRequest
from localllm.server.answering import answer
from localllm.server.bodies import keep_alive_s, offered_tools
from localllm.server.contents import openai_message
from localllm.server.openai.schema import ChatBody
from localllm.server.openai.wire import (
    ChunkWriter,
    Object,
    OpenAIRoute,
    finish_reason,
    format_of,
    think_of,
    tool_calls,
    tool_choice_of,
)
from localllm.server.service import Run, ServiceDep
from localllm.server.wire import logprob_entries, sse

router = APIRouter(route_class=OpenAIRoute, tags=["OpenAI"])


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, http: Request, service: ServiceDep) -> Response:
    """Answer a conversation."""
    request = await to_thread.run_sync(chat_request, body)
    return await answer(
        http,
        service,
        body.model,
        [request],
        _Writer(body, "chatcmpl", "chat.completion.chunk"),
        stream=bool(body.stream),
        progress=body.progress,
        keep_alive_s=keep_alive_s(body.keep_alive),
        choices=body.n or 1,
    )


def chat_request(body: ChatBody) -> AnswerRequest:
    """Convert a chat body. Decodes images: call it off the event loop. Raises ApiError 400, PictureError."""
    effort = body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)
    switch = body.chat_template_kwargs.enable_thinking if body.chat_template_kwargs else None
    wanted = (body.top_logprobs or 0) if body.logprobs or body.top_logprobs else None
    return AnswerRequest(
        messages=[openai_message(message) for message in body.messages],
        tools=[] if body.tool_choice == "none" else offered_tools(body.tools),
        tool_choice=tool_choice_of(body.tool_choice),
        think=switch if effort is None else think_of(effort),
        format=format_of(body.response_format),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        **body.request_fields(body.stop, wanted),
    )


class _Writer(ChunkWriter):
    """See answering.Writer."""

    def begin(self, run: Run) -> Iterator[bytes]:
        for index in range(len(run.streams)):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def event(self, _run: Run, index: int, event: AnswerEvent, before: Answer) -> Iterator[bytes]:
        if event.parts or event.logprobs:
            yield self._chunk(index, _delta(event, len(before.calls)), logprobs=_logprobs(event))
        if event.finish_reason is not None:
            reason = finish_reason(event, bool(before.calls or event.calls))
            yield self._chunk(index, {}, finish_reason=reason)

    def whole(self, _run: Run, answers: Sequence[Answer]) -> Object:
        choices = [_choice(index, answer) for index, answer in enumerate(answers)]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage(answers)}

    def _chunk(self, index: int, delta: Object, **more: object) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return sse({**self._head, "choices": [choice]})


def _choice(index: int, answer: Answer) -> Object:
    message: Object = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
    if answer.reasoning:
        message["reasoning"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = tool_calls(answer)
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(answer),
        "finish_reason": finish_reason(answer.last, bool(answer.calls)),
    }


def _delta(event: AnswerEvent, calls_before: int) -> Object:
    delta: Object = {}
    if event.content:
        delta["content"] = event.content
    if event.reasoning:
        delta["reasoning"] = event.reasoning
    if event.calls:
        calls = enumerate(tool_calls(event), start=calls_before)
        delta["tool_calls"] = [{"index": index, **call} for index, call in calls]
    return delta


def _logprobs(part: AnswerEvent | Answer) -> Object | None:
    return {"content": logprob_entries(part.logprobs)} if part.logprobs else None
