"""/api/generate and /api/chat."""

from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from localllm.engine.loaded_model import LoadedModel
from localllm.engine.request import GenerationRequest
from localllm.errors import LocalLLMError
from localllm.server.answers import Answer, Piece
from localllm.server.front.catalog import ForeignLease
from localllm.server.front.model import not_told
from localllm.server.json_body import JsonRoute
from localllm.server.models_manager import Lease
from localllm.server.ollama import translate
from localllm.server.ollama.schema import ChatBody, Common, GenerateBody
from localllm.server.ollama.translate import load_progress
from localllm.server.responses import NDJSON, LoadLines, connected, ndjson, respond, with_errors
from localllm.server.service import Prepare, Run, Service, TheService

router = APIRouter(route_class=JsonRoute, tags=["Ollama"])

# How much of an answer is said: its pieces in, the object's own fields out.
Say = Callable[[Piece | Answer, int], dict[str, Any]]


@router.post("/api/generate")
async def generate(body: GenerateBody, request: Request, service: TheService) -> Response:
    """Continue a prompt. An empty one loads the model, or unloads it where keep_alive is 0."""
    translate.check_generate(body)
    if not body.prompt and not body.suffix and not body.context:
        return await _load(body, {"response": ""}, request, service)
    return await _answer(
        body,
        _said_in_generate,
        lambda model, behaviour: translate.prepare_generate(model, behaviour, body),
        request,
        service,
    )


@router.post("/api/chat")
async def chat(body: ChatBody, request: Request, service: TheService) -> Response:
    """Answer a conversation. An empty one loads the model, or unloads it where keep_alive is 0."""
    asked = await to_thread.run_sync(translate.chat_of, body)
    if not body.messages:
        return await _load(body, {"message": {"role": "assistant", "content": ""}}, request, service)
    return await _answer(
        body,
        _said_in_chat,
        lambda model, behaviour: translate.prepare_chat_body(model, behaviour, body, asked),
        request,
        service,
    )


def _said_in_generate(piece: Piece | Answer, _calls_before: int) -> dict[str, Any]:
    return {"response": piece.content, **({"thinking": piece.reasoning} if piece.reasoning else {})}


def _said_in_chat(piece: Piece | Answer, calls_before: int) -> dict[str, Any]:
    return {"message": translate.message_of(piece.content, piece.reasoning, piece.calls, calls_before)}


async def _load(body: Common, empty: dict[str, Any], request: Request, service: Service) -> Response:
    """Load or unload a model, and say which."""
    keep_alive = translate.keep_alive(body.keep_alive)
    if keep_alive == 0:
        await service.expire(body.model)
        return JSONResponse(_loaded(body, empty, "unload"))

    async def whole(_lease: Lease | ForeignLease) -> dict[str, Any]:
        return _loaded(body, empty, "load")

    async def lines(_lease: Lease | ForeignLease) -> AsyncGenerator[bytes, None]:
        yield ndjson(_loaded(body, empty, "load"))

    load_lines = _load_lines(body, empty)
    running = service.lease(body.model, keep_alive, told=load_lines.told)
    streams = body.progress and body.stream is not False
    return await respond(
        request, running, whole=whole, lines=lines if streams else None, media_type=NDJSON, load_lines=load_lines
    )


def _loaded(body: Common, empty: dict[str, Any], reason: str) -> dict[str, Any]:
    return {**translate.line(body.model, empty), "done": True, "done_reason": reason}


def _load_lines(body: Common, empty: dict[str, Any]) -> LoadLines:
    """Lines that tell how far the model's load is."""
    return LoadLines(
        lambda state: ndjson(translate.line(body.model, empty, progress=load_progress(state))), _error_line
    )


async def _answer(body: Common, say: Say, prepare: Prepare, request: Request, service: Service) -> Response:
    async def whole(run: Run) -> dict[str, Any]:
        (answer,) = await run.answers()
        said = say(answer, 0)
        if answer.logprobs:
            said["logprobs"] = translate.logprobs_of(answer.logprobs, run.model.tokenizer)
        return _final(body, run, answer, said)

    def lines(run: Run) -> AsyncGenerator[bytes, None]:
        return with_errors(_lines(body, say, run), _error_line)

    if body.debug_render_only:
        return JSONResponse(await connected(request, _rendered(body, say, prepare, service)))
    load_lines = _load_lines(body, say(Piece(), 0)) if body.progress else None
    told = load_lines.told if load_lines else None
    running = service.run(body.model, translate.keep_alive(body.keep_alive), prepare, told)
    streams = body.stream is not False
    return await respond(
        request, running, whole=whole, lines=lines if streams else None, media_type=NDJSON, load_lines=load_lines
    )


async def _rendered(body: Common, say: Say, prepare: Prepare, service: Service) -> dict[str, Any]:
    """The prompt's text, for who looks for a mistake in a template; nothing is computed."""
    async with service.lease(body.model, translate.keep_alive(body.keep_alive)) as lease:
        model = lease.model
        if not isinstance(model, LoadedModel):
            raise not_told("the text of a prompt")
        (prepared,) = await to_thread.run_sync(prepare, model, (await service.find(body.model)).behaviour)
    request = cast("GenerationRequest", prepared.request)
    text = prepared.rendered or model.tokenizer.decode(request.prompt)
    told = {"rendered_template": text, **({"image_count": len(request.images)} if request.images else {})}
    return translate.line(body.model, say(Piece(), 0), _debug_info=told)


async def _lines(body: Common, say: Say, run: Run) -> AsyncGenerator[bytes, None]:
    answer = Answer()
    async for piece in run.pieces():
        if piece.progress and body.progress:
            progress = translate.progress_of(piece.progress)
            yield ndjson(translate.line(body.model, say(Piece(), 0), progress=progress))
        if piece.says_something:
            said = say(piece, len(answer.calls))
            if piece.logprobs:
                said["logprobs"] = translate.logprobs_of(piece.logprobs, run.model.tokenizer)
            yield ndjson(translate.line(body.model, said))
        answer.add(piece)
    yield ndjson(_final(body, run, answer, say(Piece(), 0)))


def _final(body: Common, run: Run, answer: Answer, said: dict[str, Any]) -> dict[str, Any]:
    if isinstance(body, GenerateBody) and not body.raw and not body.images:
        said["context"] = [*run.prepared[0].request.prompt, *answer.token_ids]
    return translate.final(body.model, said, answer.last, run.total_s, run.lease.load_s)


def _error_line(error: LocalLLMError) -> bytes:
    return ndjson({"error": str(error)})
