"""/api/generate and /api/chat."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from localllm.answer.event import Answer, AnswerEvent
from localllm.answer.local import LocalModel
from localllm.answer.placeholders import has_images
from localllm.answer.request import AnswerRequest
from localllm.engine.request import ContextPolicy
from localllm.errors import LocalLLMError
from localllm.library.errors import LibraryError
from localllm.library.go_templates import is_jinja
from localllm.library.go_translation import translated
from localllm.server.answering import Writer, answer
from localllm.server.bodies import Object, keep_alive_s, offered_tools
from localllm.server.errors import ApiError, known
from localllm.server.json_body import ProtocolRoute
from localllm.server.limits import MAX_PREPARING
from localllm.server.load_watch import LoadState
from localllm.server.ollama import wire
from localllm.server.ollama.options import read_options
from localllm.server.ollama.schema import Common, GenerateBody, OllamaChatBody
from localllm.server.service import RunningAnswers, Service, ServiceDep, for_user_of
from localllm.server.streams import held_lines, interruptible, streamed
from localllm.server.wire import NDJSON, load_progress, logprob_entries, ndjson

router = APIRouter(route_class=ProtocolRoute, tags=["Ollama"])

# Makes the fields of an answer's text, from an event or a whole answer and the number of earlier tool calls.
Fields = Callable[[AnswerEvent | Answer, int], Object]


@router.post("/api/generate")
async def generate(body: GenerateBody, http: Request, service: ServiceDep) -> Response:
    """Continue a prompt. An empty prompt loads the model, or unloads it if keep_alive is 0."""
    _check(body)
    if not body.prompt and not body.suffix and not body.context:
        return await _load(body, {"response": ""}, service)
    request = await to_thread.run_sync(generate_request, body)
    return await _answer(body, request, _generate_fields, http, service)


@router.post("/api/chat")
async def chat(body: OllamaChatBody, http: Request, service: ServiceDep) -> Response:
    """Answer a conversation. An empty one loads the model, or unloads it if keep_alive is 0."""
    request = await to_thread.run_sync(chat_request, body)
    if not body.messages:
        return await _load(body, {"message": {"role": "assistant", "content": ""}}, service)
    return await _answer(body, request, _chat_fields, http, service)


@router.post("/api/cost")
async def cost(body: OllamaChatBody, http: Request, service: ServiceDep) -> Object:
    """What a conversation would compute if it were sent to a loaded model now, by its counts. Nothing is generated."""
    (request,) = for_user_of(http, [await to_thread.run_sync(chat_request, body)])
    if has_images(request.messages):
        raise ApiError(400, "the cost of a conversation with images is not known before they are encoded")
    models, entry = await service.find(body.model)
    if entry.name not in models.loaded():
        raise ApiError(404, f"model '{entry.name}' is not loaded in this process")
    async with models.lease(entry, keep_alive_s(body.keep_alive), None) as lease:
        assert isinstance(lease.model, LocalModel)
        asked = await interruptible(partial(lease.model.expected_counts, request), MAX_PREPARING)
        counts = await asyncio.wrap_future(asked)
    return {
        "model": body.model,
        "prompt_eval_count": counts.prompt,
        "prompt_eval_cached_count": counts.cached,
    }


def chat_request(body: OllamaChatBody) -> AnswerRequest:
    """Convert a chat body. Decodes images: call it off the event loop. Raises ApiError 400, PictureError.

    Whole old messages are dropped if they do not fit, unless truncate is false.
    """
    return AnswerRequest(
        messages=[wire.conversation_message(message) for message in body.messages or []],
        tools=offered_tools(body.tools),
        context_policy=ContextPolicy.REFUSE if body.truncate is False else ContextPolicy.DROP_MESSAGES,
        **_common(body),
    )


def generate_request(body: GenerateBody) -> AnswerRequest:
    """Convert a generate body: a raw prompt, a gap to fill, or a user's message. Raises as chat_request does."""
    keeps = body.truncate is False or body.shift is False
    common = {**_common(body), "context_policy": ContextPolicy.REFUSE if keeps else ContextPolicy.ROLLING}
    prompt = body.prompt or ""
    if body.suffix or body.raw or not prompt:
        if body.system:
            raise ApiError(400, "system needs a prompt, and no suffix; put its text into the prompt")
        return AnswerRequest(prompt=prompt, suffix=body.suffix or None, before=body.context or (), **common)
    messages = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": wire.content_of(prompt, body.images)})
    template = _jinja(body.template) if body.template else None
    before = tuple(body.context or ())
    return AnswerRequest(messages=messages, before=before, template=template, continues_text=not template, **common)


def _jinja(template: str) -> str:
    """A request's template, translated to Jinja if needed. Raises ApiError 400."""
    try:
        return template if is_jinja(template) else translated(template)
    except LibraryError as error:
        raise ApiError(400, f"template: {error} Write it in Jinja, or leave it out.") from error


def _check(body: GenerateBody) -> None:
    """Raise ApiError 400 for fields that exclude each other."""
    if body.images and (body.raw or body.suffix or body.context):
        raise ApiError(400, "images cannot be used with raw, suffix or context; leave those out")
    if body.template and (body.suffix or not body.prompt):
        raise ApiError(400, "template needs a prompt, and no suffix: gaps are marked by the model's own tokens")
    if body.raw and (body.template or body.system or body.context):
        raise ApiError(400, "raw mode does not support template, system, or context")


def _common(body: Common) -> Object:
    fields = read_options(body.options)
    if body.logprobs or body.top_logprobs:
        fields["sampling"]["logprobs"] = body.top_logprobs or 0
    think = body.think or None if isinstance(body.think, str) else body.think
    return {**fields, "think": think, "thinks_before_format": True, "format": body.format}


def _generate_fields(part: AnswerEvent | Answer, _calls_before: int) -> Object:
    return {"response": part.content, **({"thinking": part.reasoning} if part.reasoning else {})}


def _chat_fields(part: AnswerEvent | Answer, calls_before: int) -> Object:
    return {"message": wire.answer_message(part.content, part.reasoning, part.calls, calls_before)}


class _Writer(Writer):
    media_type = NDJSON

    def __init__(self, body: Common, fields: Fields) -> None:
        self._body = body
        self._fields = fields
        self._empty = fields(AnswerEvent(), 0)

    def progress(self, progress: Object) -> bytes:
        return ndjson(wire.line(self._body.model, self._empty, progress=progress))

    def alive(self) -> bytes:
        return ndjson(wire.line(self._body.model, self._empty))

    def event(self, run: RunningAnswers, _index: int, event: AnswerEvent) -> Iterator[bytes]:
        if event.parts or event.logprobs:
            calls_before = len(run.answers[0].calls) - len(event.calls)
            yield ndjson(wire.line(self._body.model, self._content(event, calls_before)))

    def end(self, run: RunningAnswers) -> Iterator[bytes]:
        yield ndjson(self._final(run, self._empty))

    def error(self, error: LocalLLMError) -> bytes:
        return wire.error_line(error)

    def whole(self, run: RunningAnswers) -> Object:
        return self._final(run, self._content(run.answers[0], 0))

    def _content(self, part: AnswerEvent | Answer, calls_before: int) -> Object:
        fields = self._fields(part, calls_before)
        return {**fields, "logprobs": logprob_entries(part.logprobs)} if part.logprobs else fields

    def _final(self, run: RunningAnswers, content: Object) -> Object:
        body, answer, tokens = self._body, run.answers[0], run.prompts[0].tokens
        if isinstance(body, GenerateBody) and not body.raw and not body.images and tokens is not None:
            content = {**content, "context": [*tokens, *answer.token_ids]}
        return wire.final(body.model, content, answer.last, run.total_s, run.lease.load_s)


async def _answer(body: Common, request: AnswerRequest, fields: Fields, http: Request, service: Service) -> Response:
    if body.debug_render_only:
        return JSONResponse(await _rendered(body, request, fields, service))
    return await answer(http, service, body, [request], _Writer(body, fields), streams=True)


async def _rendered(body: Common, request: AnswerRequest, fields: Fields, service: Service) -> Object:
    """The prompt's text, for debugging a template. Generates nothing."""
    prompt = await service.prompt(body.model, request, keep_alive_s(body.keep_alive))
    info = {
        "rendered_template": known(prompt.text, "the text of a prompt"),
        **({"image_count": len(prompt.pictures)} if prompt.pictures else {}),
    }
    return wire.line(body.model, fields(AnswerEvent(), 0), _debug_info=info)


async def _load(body: Common, empty: Object, service: Service) -> Response:
    """Load or unload a model."""
    keep_alive = keep_alive_s(body.keep_alive)
    reason = "unload" if keep_alive == 0 else "load"
    loaded = {**wire.line(body.model, empty), "done": True, "done_reason": reason}
    if keep_alive == 0:
        models, entry = await service.find(body.model)
        models.release(entry)
        return JSONResponse(loaded)
    if not body.progress or body.stream is False:
        async with service.lease(body.model, keep_alive):
            return JSONResponse(loaded)

    async def lines(_lease: object) -> AsyncGenerator[bytes, None]:
        yield ndjson(loaded)

    def state_line(state: LoadState) -> bytes:
        return ndjson(wire.line(body.model, empty, progress=load_progress(state)))

    loading = held_lines(lambda listener: service.lease(body.model, keep_alive, listener), lines, state_line)
    return await streamed(loading, wire.error_line, NDJSON)
