"""Which models there are, what they are, and which are loaded."""

import contextlib
import time
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any

from anyio import to_thread
from fastapi import APIRouter
from starlette.responses import PlainTextResponse

from localllm.errors import LocalLLMError
from localllm.server.catalog import Catalog
from localllm.server.embedding_model import EmbeddingModel
from localllm.server.file_details import told_of
from localllm.server.front.catalog import ForeignCatalog, ForeignEntry
from localllm.server.json_body import JsonRoute
from localllm.server.model_details import capabilities_of, projector_for
from localllm.server.models_manager import Slot
from localllm.server.ollama import foreign
from localllm.server.ollama.schema import ShowBody
from localllm.server.ollama.showing import shown
from localllm.server.ollama.translate import load_progress
from localllm.server.options import FOREVER
from localllm.server.service import TheService

router = APIRouter(route_class=JsonRoute, tags=["Ollama"])

# How long a list of models is held up by finding out what they can do; what is known stays known for the next one.
_LIST_SECONDS = 2.0

# A date that no program takes for near, where a model stays for good.
_NEVER = datetime(2318, 1, 1, tzinfo=UTC)


@router.get("/", response_class=PlainTextResponse)
@router.head("/", include_in_schema=False)
async def root() -> str:
    """Say that a server is there, in the words that Ollama's clients look for."""
    return "Ollama is running"


@router.get("/api/version")
@router.head("/api/version", include_in_schema=False)
async def tell_version() -> dict[str, str]:
    """This program's version."""
    return {"version": version("localllm")}


@router.get("/api/tags")
@router.head("/api/tags", include_in_schema=False)
async def tags(service: TheService) -> dict[str, Any]:
    """List the models that requests may name."""
    catalog = service.catalog
    if isinstance(catalog, ForeignCatalog):
        return {"models": await to_thread.run_sync(foreign.tags, catalog)}
    return {"models": await to_thread.run_sync(_tags, catalog)}


@router.post("/api/show")
async def show(body: ShowBody, service: TheService) -> dict[str, Any]:
    """Tell what a model is."""
    entry = await service.find(body.model)
    if isinstance(entry, ForeignEntry):
        return foreign.show(entry)
    assert isinstance(service.catalog, Catalog)
    return await to_thread.run_sync(shown, entry, service.catalog.settings, body)


@router.get("/api/ps")
@router.head("/api/ps", include_in_schema=False)
async def ps(service: TheService) -> dict[str, Any]:
    """List the loaded models, those that stay longest first, and those that load."""
    if isinstance(service.catalog, ForeignCatalog):
        return {"models": await to_thread.run_sync(foreign.ps, service.catalog, service.options.keep_alive_s)}
    slots = sorted(service.manager.slots(), key=lambda slot: -slot.seconds_left)
    return {"models": [_loaded(slot) for slot in (*slots, *service.manager.coming()) if slot.about]}


def _tags(catalog: Catalog) -> list[dict[str, Any]]:
    """All models. What a file and its template can do is only known by trying: the list does not wait long for it."""
    entries = catalog.entries()
    patience_ends = time.monotonic() + _LIST_SECONDS
    rows = []
    for entry in entries:
        names = {"name": entry.name, "model": entry.name}
        row: dict[str, Any] = {**names, "modified_at": entry.modified_at, **told_of(entry.path)}
        if time.monotonic() < patience_ends:
            with contextlib.suppress(LocalLLMError):  # a request for this model is told what is wrong with it
                row["capabilities"] = capabilities_of(entry, projector_for(entry, catalog.settings))
        rows.append(row)
    return rows


def _loaded(slot: Slot) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": slot.entry.name,
        "model": slot.entry.name,
        **slot.about,
        "expires_at": _expiry(slot),
        "size_vram": 0,
    }
    row["context_length"] = row["details"]["context_length"]
    if slot.model is None:
        row["loading"] = load_progress(slot.watch.state)
    elif isinstance(slot.model, EmbeddingModel):
        row["context_length"] = slot.model.max_tokens
    else:
        stats = slot.model.engine.stats()
        used = (stats.pages_total - stats.pages_free) * stats.page_bytes
        row |= {
            # Clients show one as a share of the other.
            "size": max(row["size"] + used, slot.model.backend.device_bytes),
            "size_vram": slot.model.backend.device_bytes,
            "backend": slot.model.backend.name,
            "backend_reason": slot.model.backend.why,
            "context_length": slot.model.engine.context,
            "cached_tokens": stats.cached_tokens,
            "running": stats.running,
            "waiting": stats.waiting,
        }
    return row


def _expiry(slot: Slot) -> str:
    left = slot.seconds_left
    never = left == FOREVER or left > timedelta.max.total_seconds() / 10**4
    return (_NEVER if never else datetime.now(UTC) + timedelta(seconds=left)).isoformat().replace("+00:00", "Z")
