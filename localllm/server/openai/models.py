"""/v1/models and /v1/embeddings."""

import base64
from typing import Any

import numpy as np
from anyio import to_thread
from fastapi import APIRouter
from numpy.typing import NDArray

from localllm.server.bodies import Object, keep_alive_s
from localllm.server.embeddings import embed_all
from localllm.server.openai.schema import EmbeddingsBody
from localllm.server.openai.wire import BareRoute, OpenAIRoute
from localllm.server.served import ServedRow
from localllm.server.service import ServiceDep

router = APIRouter(route_class=OpenAIRoute, tags=["OpenAI"])
bare = APIRouter(route_class=BareRoute, tags=["OpenAI"])


@router.head("/v1/models", include_in_schema=False)
@router.head("/models", include_in_schema=False)
@router.get("/v1/models")
@router.get("/models")
async def models(service: ServiceDep) -> Object:
    """List the models that requests may name."""
    return {"object": "list", "data": [_row(about, context) for about, context in await service.rows()]}


@router.get("/v1/models/{model:path}")
async def model(model: str, service: ServiceDep) -> Object:
    """Describe one model."""
    about = await to_thread.run_sync(service.about, model)
    return _row(about, (await service.contexts([about]))[0])


@router.post("/v1/embeddings")
@bare.post("/embeddings")
async def embeddings(body: EmbeddingsBody, service: ServiceDep) -> Object:
    """Embed texts or lists of token ids."""
    given = body.input
    single = isinstance(given, str) or isinstance(given[0], int)
    texts: list[Any] = [given] if single else list(given)
    body.model = await service.model_or_only(body.model)
    async with service.lease_embedder(body.model, keep_alive_s(body.keep_alive)) as lease:
        rows, tokens = await embed_all(lease.model, texts, truncate=body.truncate, dimensions=body.dimensions)
    return {
        "object": "list",
        "model": body.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(row, body.encoding_format)}
            for index, row in enumerate(rows)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _row(about: ServedRow, context: int) -> Object:
    """A model in OpenAI's form, with its context and an adapter's parent as vLLM and llama.cpp name them."""
    told: Object = {"id": about.name, "object": "model", "created": about.created, "owned_by": about.owner}
    meta = {"n_ctx": context, "n_ctx_train": about.context, "n_embd": about.width, "size": about.size}
    known = {name: value for name, value in meta.items() if value}
    told |= {"root": about.parent, "parent": about.parent} if about.parent else {}
    return told | ({"max_model_len": context} if context else {}) | ({"meta": known} if known else {})


def _encoded(row: NDArray[np.float32], encoding: str) -> Any:
    return base64.b64encode(row.astype("<f4").tobytes()).decode() if encoding == "base64" else row.tolist()


router.include_router(bare)
