"""/v1/models and /v1/embeddings."""

import base64
from typing import Any, cast

import numpy as np
from anyio import to_thread
from fastapi import APIRouter, Request

from localllm.server.catalog import CatalogEntry
from localllm.server.front.catalog import ForeignEntry
from localllm.server.json_body import JsonRoute
from localllm.server.openai import translate
from localllm.server.openai.schema import EmbeddingsBody
from localllm.server.portions import Embedder, embed_all
from localllm.server.responses import connected
from localllm.server.service import Service, TheService

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.get("/v1/models")
async def models(service: TheService) -> dict[str, Any]:
    """List the models that requests may name."""
    entries = await to_thread.run_sync(service.entries)
    return {"object": "list", "data": [_row(entry) for entry in entries]}


@router.get("/v1/models/{model:path}")
async def model(model: str, service: TheService) -> dict[str, Any]:
    """Tell of one model."""
    return _row(await service.find(model))


def _row(entry: CatalogEntry | ForeignEntry) -> dict[str, Any]:
    return {
        "id": entry.name,
        "object": "model",
        "created": 0 if isinstance(entry, ForeignEntry) else int(entry.path.stat().st_mtime),
        "owned_by": "remote" if isinstance(entry, ForeignEntry) else "library",
    }


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request, service: TheService) -> dict[str, Any]:
    """Turn texts or token ids into vectors."""
    return await connected(request, _embed(body, service))


async def _embed(body: EmbeddingsBody, service: Service) -> dict[str, Any]:
    given = body.input
    single = isinstance(given, str) or isinstance(given[0], int)
    texts: list[Any] = [given] if single else list(given)
    async with service.lease(body.model, translate.keep_alive(body), embeds=True) as lease:
        model = cast("Embedder", lease.model)
        rows, tokens = await embed_all(model, texts, truncate=body.truncate, dimensions=body.dimensions)
    return {
        "object": "list",
        "model": body.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(row, body.encoding_format)}
            for index, row in enumerate(rows)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _encoded(row: "np.ndarray[Any, np.dtype[np.float32]]", encoding: str) -> Any:
    return base64.b64encode(row.astype("<f4").tobytes()).decode() if encoding == "base64" else row.tolist()
