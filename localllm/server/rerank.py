"""/v1/rerank: documents ordered by how well they answer a query, in the shape of Jina's and Cohere's protocols."""

from typing import Annotated, Any, cast

from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import Field

from gguf_io import open_model
from gpu_offload.reranker import is_reranker
from localllm.server.catalog import CatalogEntry
from localllm.server.errors import ApiError
from localllm.server.front.catalog import ForeignEntry
from localllm.server.json_body import JsonRoute
from localllm.server.limits import MAX_INT, MAX_RERANK_DOCUMENTS
from localllm.server.openai.schema import Body, Extensions
from localllm.server.openai.translate import keep_alive
from localllm.server.portions import Embedder, rank_all
from localllm.server.responses import connected
from localllm.server.service import Service, TheService

router = APIRouter(route_class=JsonRoute, tags=["Native"])


class Document(Body):
    """A document as Cohere has it."""

    text: str


class RerankBody(Extensions):
    """/v1/rerank. truncate shortens documents that are too long, from their end; without it they are an error."""

    model: str = ""
    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_RERANK_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    return_documents: bool = False


@router.post("/v1/rerank")
@router.post("/rerank")
async def rerank(body: RerankBody, request: Request, service: TheService) -> dict[str, Any]:
    """Order documents by how well they answer the query, best first."""
    return await connected(request, _rerank(body, service))


async def _rerank(body: RerankBody, service: Service) -> dict[str, Any]:
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    await to_thread.run_sync(_check, await service.find(body.model))
    async with service.lease(body.model, keep_alive(body), embeds=True) as lease:
        model = cast("Embedder", lease.model)
        scores, tokens = await rank_all(model, body.query, documents, truncate=body.truncate)
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


def _check(entry: CatalogEntry | ForeignEntry) -> None:
    """Raise ApiError 400 for what is no reranker, before anything is loaded. A server elsewhere says so itself."""
    if isinstance(entry, ForeignEntry):
        return
    with open_model(entry.path) as file:
        if not is_reranker(file):
            raise ApiError(
                400,
                f'"{entry.name}" is no reranker: its file has no classification head. Pull one, such as a '
                "Qwen3-Reranker or jina-reranker in GGUF.",
            )
