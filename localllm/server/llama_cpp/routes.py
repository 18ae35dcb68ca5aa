"""Routes of llama.cpp's server: /tokenize, /detokenize, /apply-template, /infill and /rerank."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from pydantic import Field

from gguf_io.interruption import checkpoint
from localllm.answer.event import Answer, AnswerEvent
from localllm.answer.request import UNLIMITED, AnswerRequest
from localllm.engine.request import FinishReason
from localllm.errors import LocalLLMError
from localllm.server.answering import answer
from localllm.server.bodies import (
    Body,
    Extensions,
    Messages,
    Object,
    Sampled,
    Tokens,
    Tools,
    keep_alive_s,
    offered_tools,
)
from localllm.server.contents import openai_message
from localllm.server.embeddings import rank_all
from localllm.server.errors import ApiError, kind_of, known, message_of, status_of
from localllm.server.json_body import ProtocolRoute
from localllm.server.limits import MAX_INT, MAX_RERANK_DOCUMENTS
from localllm.server.service import Run, Service, ServiceDep
from localllm.server.streams import connected, interruptible
from localllm.server.wire import SSE, SSE_COMMENT, sse, usage

_KINDS = {401: "authentication_error", 404: "not_found_error", 501: "not_supported_error", 503: "unavailable_error"}


class LlamaCppRoute(ProtocolRoute):
    """A route of llama.cpp's server."""

    @staticmethod
    def error_body(status: int, message: str, _code: str | None = None) -> Object:
        """An error, as a response or within a stream."""
        return {"error": {"code": status, "message": message, "type": kind_of(status, _KINDS)}}


router = APIRouter(route_class=LlamaCppRoute, tags=["llama.cpp"])


class ModelBody(Body):
    """A request about a model."""

    model: str


class TokenizeBody(ModelBody):
    """/tokenize. add_special adds BOS and the like; parse_special parses the names of special tokens."""

    content: str
    add_special: bool = False
    parse_special: bool = False
    with_pieces: bool = False


class DetokenizeBody(ModelBody):
    """/detokenize."""

    tokens: Tokens


class TemplateBody(ModelBody):
    """/apply-template."""

    messages: Messages
    tools: Tools | None = None


class InfillBody(Sampled):
    """/infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    n_predict: Annotated[int, Field(ge=-1, le=MAX_INT)] = -1


class Document(Body):
    """A document in Cohere's format."""

    text: str


class RerankBody(Extensions):
    """/rerank. truncate shortens long documents from the end; without it they are an error."""

    model: str = ""
    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_RERANK_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    return_documents: bool = False


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, http: Request, service: ServiceDep) -> Object:
    """Text to token ids."""
    return await connected(http, _tokenize(body, service))


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, http: Request, service: ServiceDep) -> Object:
    """Token ids to text."""
    return await connected(http, _detokenize(body, service))


@router.post("/apply-template")
async def apply_template(body: TemplateBody, http: Request, service: ServiceDep) -> Object:
    """A conversation's prompt."""
    return await connected(http, _apply_template(body, service))


@router.post("/infill")
async def infill(body: InfillBody, http: Request, service: ServiceDep) -> Response:
    """Fill in the text between a prefix and a suffix."""
    request = AnswerRequest(
        prompt=body.input_prefix,
        suffix=body.input_suffix,
        max_tokens=UNLIMITED if body.n_predict < 0 else body.n_predict,
        **body.request_fields(body.stop),
    )
    return await answer(
        http,
        service,
        body,
        [request],
        _InfillWriter(),
        stream=bool(body.stream),
        progress=body.progress,
        keep_alive_s=keep_alive_s(body.keep_alive),
    )


@router.post("/v1/rerank")
@router.post("/rerank")
async def rerank(body: RerankBody, http: Request, service: ServiceDep) -> Object:
    """Rank documents for a query, best first, in Jina's and Cohere's format."""
    return await connected(http, _rerank(body, service))


async def _tokenize(body: TokenizeBody, service: Service) -> Object:
    async with service.lease(body.model) as lease:
        tokenizer = lease.model.tokenizer

        def work() -> Object:
            ids = tokenizer.encode(body.content, body.add_special, body.parse_special)
            if not body.with_pieces:
                return {"tokens": ids}
            pieces = []
            for token in ids:
                checkpoint()
                pieces.append({"id": token, "piece": _piece(tokenizer.token_bytes(token))})
            return {"tokens": pieces}

        return await interruptible(work)


async def _detokenize(body: DetokenizeBody, service: Service) -> Object:
    async with service.lease(body.model) as lease:
        return {"content": await to_thread.run_sync(lease.model.tokenizer.decode, body.tokens)}


async def _apply_template(body: TemplateBody, service: Service) -> Object:
    request = AnswerRequest(
        messages=[openai_message(message) for message in body.messages], tools=offered_tools(body.tools)
    )
    async with service.lease(body.model) as lease:
        prompt = await to_thread.run_sync(lease.model.prepare, request)
        return {"prompt": known(prompt.text, "the text of a prompt")}


async def _rerank(body: RerankBody, service: Service) -> Object:
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    entry = await service.find(body.model)
    if not await to_thread.run_sync(service.models.ranks, entry):  # before anything is loaded
        raise ApiError(
            400,
            f'"{entry.name}" is not a reranker: its file has no classification head. Pull one, such as a '
            "Qwen3-Reranker or jina-reranker in GGUF.",
        )
    async with service.lease_embedder(body.model, keep_alive_s(body.keep_alive)) as lease:
        scores, tokens = await rank_all(lease.model, body.query, documents, truncate=body.truncate)
    best = sorted(range(len(documents)), key=lambda index: -scores[index])[: body.top_n]
    return {
        "model": body.model,
        "object": "list",
        "results": [
            {
                "index": index,
                "relevance_score": float(scores[index]),
                **({"document": {"text": documents[index]}} if body.return_documents else {}),
            }
            for index in best
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


class _InfillWriter:
    """See answering.Writer."""

    media_type = SSE

    def begin(self, _run: Run) -> Sequence[bytes]:
        return ()

    def progress(self, progress: Object) -> bytes:
        return sse({"content": "", "stop": False, "progress": progress})

    def alive(self) -> bytes:
        return SSE_COMMENT

    def event(self, _run: Run, _index: int, event: AnswerEvent, _before: Answer) -> Iterator[bytes]:
        if event.content:
            yield sse({"content": event.content, "stop": False})

    def end(self, run: Run, answers: Sequence[Answer]) -> Iterator[bytes]:
        yield sse({**self.whole(run, answers), "content": ""})

    def error(self, error: LocalLLMError) -> bytes:
        return sse(LlamaCppRoute.error_body(status_of(error), message_of(error)))

    def whole(self, _run: Run, answers: Sequence[Answer]) -> Any:
        answer = answers[0]
        return {"content": answer.content, "stop": True, **_ended(answer.last), "usage": usage([answer.last])}


def _ended(last: AnswerEvent) -> dict[str, str]:
    if last.stop_string:
        return {"stop_type": "word", "stopping_word": last.stop_string}
    return {"stop_type": "limit" if last.finish_reason is FinishReason.LENGTH else "eos", "stopping_word": ""}


def _piece(data: bytes) -> str | list[int]:
    """The token's text, or its bytes if they are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
