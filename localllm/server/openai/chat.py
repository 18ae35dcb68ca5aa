"""/v1/chat/completions."""

from collections import defaultdict
from collections.abc import Iterator

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from localllm.answer.event import Answer, AnswerEvent, PartKind
from localllm.answer.request import AnswerRequest
from localllm.server import answering
from localllm.server.bodies import Object, note_ignored, shown
from localllm.server.contents import openai_message
from localllm.server.errors import ApiError
from localllm.server.openai.schema import ChatBody
from localllm.server.openai.tools import toolbox, with_choice
from localllm.server.openai.wire import (
    BareRoute,
    CallDeltas,
    ChunkWriter,
    OpenAIRoute,
    called,
    constraint_of,
    finish_reason,
    function_of,
    think_of,
)
from localllm.server.service import RunningAnswers, ServiceDep
from localllm.server.wire import logprob_entries, notes_of, sse

router = APIRouter(route_class=OpenAIRoute, tags=["OpenAI"])
bare = APIRouter(route_class=BareRoute, tags=["OpenAI"])


@router.post("/v1/chat/completions")
@bare.post("/chat/completions")
async def chat_completions(body: ChatBody, http: Request, service: ServiceDep) -> Response:
    """Answer a conversation."""
    body.model = await service.model_or_only(body.model)
    request = await to_thread.run_sync(chat_request, body)
    return await answering.answer(http, service, body, [request], _Writer(body), body.n or 1)


@router.post("/v1/chat/completions/input_tokens")
@bare.post("/chat/completions/input_tokens")
async def input_tokens(body: ChatBody, service: ServiceDep) -> Object:
    """Count the tokens of a conversation's prompt, as llama-server does."""
    request = await to_thread.run_sync(chat_request, body)
    return {
        "object": "response.input_tokens",
        "input_tokens": await answering.count_tokens(service, body.model, request),
    }


def chat_request(body: ChatBody) -> AnswerRequest:
    """Convert a chat body. Decodes images: call it off the event loop. Raises ApiError 400, PictureError."""
    for kind in body.modalities or ():
        if kind != "text":
            note_ignored(f"modality {shown(kind)}")
    wanted = (body.top_logprobs or 0) if body.logprobs or body.top_logprobs else None
    return AnswerRequest(
        messages=[openai_message(message) for message in body.messages],
        may_go_on=_may_go_on(body),
        **with_choice(toolbox(_tools(body)), body.tool_choice or body.function_call),
        one_call=body.parallel_tool_calls is False or body.functions is not None,
        **_thinking(body),
        **constraint_of(body),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        **body.request_fields(body.stop, wanted),
    )


def _may_go_on(body: ChatBody) -> bool:
    """Whether the answer continues an assistant's message at the end; if the body does not say, without tools only.

    Agents take up a conversation after an answer, as OpenAI's models do. Raises ApiError 400.
    """
    if body.add_generation_prompt and body.continue_final_message:
        raise ApiError(400, "add_generation_prompt and continue_final_message exclude each other; send one of them")
    continues = body.continue_final_message or body.add_generation_prompt is False
    if continues and body.messages[-1].role != "assistant":
        name = "continue_final_message" if body.continue_final_message else "add_generation_prompt: false"
        raise ApiError(400, f"{name} needs an assistant's message at the end, which the answer continues")
    begins = body.add_generation_prompt or body.continue_final_message is False or bool(_tools(body))
    return continues or not begins


def _tools(body: ChatBody) -> list[Object]:
    return [*(body.tools or []), *({"type": "function", "function": one} for one in body.functions or [])]


def _thinking(body: ChatBody) -> Object:
    """The fields `think` and `template_arguments` of an AnswerRequest. Raises ApiError 400."""
    more = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)
    effort = more.pop("reasoning_effort", None) if effort is None else effort
    switches = [more.pop(name, None) for name in ("enable_thinking", "thinking")]
    switch = next((value for value in switches if value is not None), None)
    if not isinstance(switch, bool | None) or not isinstance(effort, str | None):
        raise ApiError(400, "chat_template_kwargs: enable_thinking must be true or false, reasoning_effort a text")
    return {"think": switch if effort is None else think_of(effort), "template_arguments": more}


class _Writer(ChunkWriter):
    def __init__(self, body: ChatBody) -> None:
        super().__init__(body, "chatcmpl", "chat.completion.chunk")
        self._tools = toolbox(_tools(body))
        self._is_older = bool(body.functions)  # calls are written as `function_call`
        self._calls = defaultdict[int, CallDeltas](lambda: CallDeltas(self._tools))

    def begin(self, run: RunningAnswers) -> Iterator[bytes]:
        for index in range(len(run.streams)):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def _content(self, index: int, text: str) -> bytes:
        return self._chunk(index, {"content": text})

    def _chunks(self, run: RunningAnswers, index: int, event: AnswerEvent) -> Iterator[bytes]:
        delta = self._delta(event, self._calls[index])
        if delta or event.logprobs:
            yield self._chunk(index, delta, self._timings(event), logprobs=_logprobs(event))
        if event.finish_reason is not None:
            reason, timed = self._reason(run.answers[index]), self._timings(event, is_last=True)
            yield self._chunk(index, {}, timed, finish_reason=reason, **notes_of(event))

    def whole(self, run: RunningAnswers) -> Object:
        choices = [self._choice(index, answer) for index, answer in enumerate(run.answers)]
        return {**self._head, "object": "chat.completion", "choices": choices, **self._totals(run)}

    def _chunk(self, index: int, delta: Object, timed: Object | None = None, **more: object) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return sse({**self._head, "choices": [choice], **(timed or {})})

    def _choice(self, index: int, answer: Answer) -> Object:
        message: Object = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
        if answer.reasoning:
            message["reasoning"] = answer.reasoning
        if answer.calls and self._is_older:
            message["function_call"] = function_of(answer.calls[0])
        elif answer.calls:
            message["tool_calls"] = [called(call, self._tools.client_tool(call.name)) for call in answer.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(answer),
            "finish_reason": self._reason(answer),
            **notes_of(answer.last),
        }

    def _delta(self, event: AnswerEvent, calls: CallDeltas) -> Object:
        delta: Object = {}
        if content := event.text(PartKind.CONTENT):
            delta["content"] = content
        if event.reasoning:
            delta["reasoning"] = event.reasoning
        added = calls.of(event)
        if added and not self._is_older:
            delta["tool_calls"] = added
        elif added and added[0]["index"] == 0:
            delta["function_call"] = added[0]["function"]
        return delta

    def _reason(self, answer: Answer) -> str:
        return "function_call" if answer.calls and self._is_older else finish_reason(answer)


def _logprobs(part: AnswerEvent | Answer) -> Object | None:
    return {"content": logprob_entries(part.logprobs)} if part.logprobs else None


router.include_router(bare)
