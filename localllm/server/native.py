"""Routes that llama.cpp's server has and the other protocols lack."""

from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any, TypeVar

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from localllm.engine.loaded_model import LoadedModel
from localllm.engine.request import FinishReason, TokenEvent
from localllm.library.behaviour import Behaviour
from localllm.server.chat import check_roles, infill_tokens, prepare_text
from localllm.server.front.model import ForeignModel, not_told
from localllm.server.json_body import JsonRoute
from localllm.server.limits import MAX_INT, MAX_MESSAGES, MAX_TOOLS
from localllm.server.ollama.translate import load_progress, progress_of
from localllm.server.openai.chat import error_event, usage
from localllm.server.openai.schema import Message, Sampled, Tokens, Tool
from localllm.server.openai.translate import keep_alive, limits_of, message_of, offered_tools, sampling_of
from localllm.server.responses import SSE, LoadLines, connected, respond, sse, with_errors
from localllm.server.service import Prepared, Run, Service, TheService

router = APIRouter(route_class=JsonRoute, tags=["Native"])

T = TypeVar("T")


class Body(BaseModel):
    """A request about a model."""

    model_config = ConfigDict(protected_namespaces=())

    model: str


class TokenizeBody(Body):
    """/tokenize. add_special puts BOS and its like around; parse_special reads control tokens' names as tokens."""

    content: str
    add_special: bool = False
    parse_special: bool = False
    with_pieces: bool = False


class DetokenizeBody(Body):
    """/detokenize."""

    tokens: Tokens


class TemplateBody(Body):
    """/apply-template."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None


class InfillBody(Sampled):
    """/infill: what stands between the two texts."""

    input_prefix: str = ""
    input_suffix: str = ""
    n_predict: Annotated[int, Field(ge=-1, le=MAX_INT)] = -1


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request, service: TheService) -> dict[str, Any]:
    """Text to token ids."""

    def work(model: LoadedModel) -> dict[str, Any]:
        ids = model.tokenizer.encode(body.content, add_special=body.add_special, parse_special=body.parse_special)
        if not body.with_pieces:
            return {"tokens": ids}
        return {"tokens": [{"id": token, "piece": _piece(model.tokenizer.token_bytes(token))} for token in ids]}

    return await connected(request, _on_model(service, body.model, work))


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request, service: TheService) -> dict[str, str]:
    """Token ids to text."""

    def work(model: LoadedModel) -> dict[str, str]:
        return {"content": model.tokenizer.decode(body.tokens)}

    return await connected(request, _on_model(service, body.model, work))


@router.post("/apply-template")
async def apply_template(body: TemplateBody, request: Request, service: TheService) -> dict[str, str]:
    """The prompt that a conversation becomes."""

    def work(model: LoadedModel) -> dict[str, str]:
        messages = [message_of(message) for message in body.messages]
        check_roles(messages)
        return {"prompt": model.template.render(messages, tools=offered_tools(body.tools, None) or None)}

    return await connected(request, _on_model(service, body.model, work))


@router.post("/infill")
async def infill(body: InfillBody, request: Request, service: TheService) -> Response:
    """Write what stands between a prefix and a suffix."""

    def prepare(model: LoadedModel | ForeignModel, behaviour: Behaviour) -> list[Prepared]:
        tokens = infill_tokens(model, body.model, body.input_prefix, body.input_suffix)
        most = None if body.n_predict < 0 else body.n_predict
        limits = limits_of(body, sampling_of(body, None, behaviour), most, behaviour, body.stop)
        return [prepare_text(model, tokens, limits)]

    async def whole(run: Run) -> dict[str, Any]:
        (answer,) = await run.answers()
        return {
            "content": answer.content,
            "stop": True,
            **_ended(answer.last),
            "usage": usage([answer.last]),
        }

    def lines(run: Run) -> AsyncGenerator[bytes, None]:
        return with_errors(_events(run, progress if body.progress else None), error_event)

    def progress(told: dict[str, Any]) -> bytes:
        return sse({"content": "", "stop": False, "progress": told})

    load_lines = LoadLines(lambda state: progress(load_progress(state)), error_event) if body.progress else None
    running = service.run(body.model, keep_alive(body), prepare, load_lines.told if load_lines else None)
    streamed = lines if body.stream else None
    return await respond(request, running, whole=whole, lines=streamed, media_type=SSE, load_lines=load_lines)


async def _events(run: Run, progress: Callable[[dict[str, Any]], bytes] | None) -> AsyncGenerator[bytes, None]:
    async for piece in run.pieces():
        if piece.progress and progress:
            yield progress(progress_of(piece.progress))
        if piece.content:
            yield sse({"content": piece.content, "stop": False})
        if piece.last:
            yield sse({"content": "", "stop": True, **_ended(piece.last), "usage": usage([piece.last])})


def _ended(last: TokenEvent) -> dict[str, str]:
    if last.stop_string:
        return {"stop_type": "word", "stopping_word": last.stop_string}
    return {"stop_type": "limit" if last.finish_reason is FinishReason.LENGTH else "eos", "stopping_word": ""}


async def _on_model(service: Service, name: str, work: Callable[[LoadedModel], T]) -> T:
    async with service.lease(name) as lease:
        model = lease.model
        if not isinstance(model, LoadedModel):
            raise not_told("tokens and templates")
        return await to_thread.run_sync(work, model)


def _piece(data: bytes) -> str | list[int]:
    """Text, or the bytes of a token that is no whole UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
