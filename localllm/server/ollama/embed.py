"""/api/embed and /api/embeddings."""

import time
from typing import Any, cast

from fastapi import APIRouter, Request

from localllm.server.json_body import JsonRoute
from localllm.server.ollama.schema import EmbedBody, EmbeddingsBody
from localllm.server.ollama.translate import NANOSECONDS, keep_alive
from localllm.server.portions import Embedder, embed_all
from localllm.server.responses import connected
from localllm.server.service import Service, TheService

router = APIRouter(route_class=JsonRoute, tags=["Ollama"])


@router.post("/api/embed")
async def embed(body: EmbedBody, request: Request, service: TheService) -> dict[str, Any]:
    """Turn texts into vectors of length 1."""
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    return await connected(request, _embed(body, texts, service))


@router.post("/api/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request, service: TheService) -> dict[str, Any]:
    """Turn one text into a vector: the older form. An empty text loads the model."""
    newer = EmbedBody(model=body.model, keep_alive=body.keep_alive)
    answer = await connected(request, _embed(newer, [body.prompt] if body.prompt else [], service))
    return {"embedding": answer["embeddings"][0] if answer["embeddings"] else []}


async def _embed(body: EmbedBody, texts: list[str], service: Service) -> dict[str, Any]:
    began = time.monotonic()
    async with service.lease(body.model, keep_alive(body.keep_alive), embeds=True) as lease:
        rows, tokens = [], 0
        if texts:
            model, truncate = cast("Embedder", lease.model), body.truncate is not False
            found, tokens = await embed_all(model, texts, truncate=truncate, dimensions=body.dimensions or None)
            rows = found.tolist()
    return {
        "model": body.model,
        "embeddings": rows,
        "total_duration": round((time.monotonic() - began) * NANOSECONDS),
        "load_duration": round(lease.load_s * NANOSECONDS),
        "prompt_eval_count": tokens,
    }
