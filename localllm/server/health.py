"""Whether the process lives, and whether it can answer; figures for Prometheus."""

from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from localllm.engine.loaded_model import LoadedModel
from localllm.server.front.catalog import ForeignCatalog
from localllm.server.service import TheService

router = APIRouter(tags=["Operation"])


@router.get("/health")
async def health(service: TheService) -> dict[str, Any]:
    """`status` "ok" says that the process lives, `ready` that a model which is loaded has computed a token.

    Where a server elsewhere computes, `ready` is its own: whether it can be reached and tells its models.
    """
    if isinstance(service.catalog, ForeignCatalog):
        return await to_thread.run_sync(_elsewhere, service.catalog)
    engines = [slot.model.engine for slot in service.manager.slots() if isinstance(slot.model, LoadedModel)]
    ready = [engine.stats().generated_tokens > 0 for engine in engines]
    return {
        "status": "ok",
        "ready": any(ready),
        "models_loaded": len(service.manager.slots()),
        "models_loading": len(service.manager.coming()),
    }


def _elsewhere(catalog: ForeignCatalog) -> dict[str, Any]:
    """Ready is a server elsewhere that tells its models; reason says what keeps it."""
    trouble = catalog.trouble()
    said = {"status": "ok", "ready": trouble is None, "remote": str(catalog.server.endpoint)}
    return said if trouble is None else {**said, "reason": trouble}


@router.get("/metrics")
async def metrics(service: TheService) -> Response:
    """Figures in Prometheus' text format."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
