"""The models of this machine, loaded into this process."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, cast

from gguf_io import open_model
from gpu_offload.reranker import is_reranker
from localllm.answer.local import LocalModel
from localllm.engine.engine import EngineStats
from localllm.engine.loaded_model import LoadedModel
from localllm.library.entry import LibraryModel, ModelDefaults, Source
from localllm.server import details
from localllm.server.catalog import Catalog, CatalogEntry, facts_of
from localllm.server.embeddings import EmbeddingModel
from localllm.server.load_watch import LoadListener
from localllm.server.models_manager import ModelManager, Slot
from localllm.server.served import Embedder, ModelAbout, ModelDescription, ModelT, ResidentModel, ServedModel
from localllm.settings import Settings


@dataclass(frozen=True, slots=True)
class LocalLease(Generic[ModelT]):
    """See served.Lease."""

    model: ModelT
    load_s: float
    discard: Callable[[], None]


class LocalModels:
    """Fulfils ServedModels: finds models in a catalog, and has a manager load them."""

    def __init__(self, catalog: Catalog, manager: ModelManager) -> None:
        self.settings: Settings = catalog.settings
        self.entries = catalog.entries
        self.find = catalog.find
        self.release = manager.expire
        self.stop_loading = manager.stop_loading
        self.close = manager.close
        self._manager = manager

    def library_model(self, entry: CatalogEntry) -> LibraryModel:
        """See ServedModels."""
        return entry.model or LibraryModel((entry.name,), Source.PATH, entry.path)

    def about(self, entry: CatalogEntry) -> ModelAbout:
        """See ServedModels."""
        return details.about(entry)

    def capabilities(self, entry: CatalogEntry) -> list[str]:
        """See ServedModels."""
        return details.capabilities_of(entry, details.projector_for(entry, self.settings))

    def ranks(self, entry: CatalogEntry) -> bool:
        """See ServedModels."""
        with open_model(entry.path) as file:
            return is_reranker(file)

    def describe(self, entry: CatalogEntry, verbose: bool) -> ModelDescription:
        """See ServedModels."""
        projector = details.projector_for(entry, self.settings)
        return ModelDescription(
            about=details.about(entry),
            capabilities=details.capabilities_of(entry, projector),
            template=entry.behaviour.template or facts_of(entry.path).summary.chat_template or "",
            behaviour=entry.behaviour,
            defaults=entry.model.defaults() if entry.model else ModelDefaults(),
            info=details.model_info(entry.path, verbose),
            projector_info=details.model_info(projector, False) if projector else None,
            tensors=details.tensors_of(entry.path) if verbose else None,
        )

    @contextlib.asynccontextmanager
    async def lease(
        self, entry: CatalogEntry, keep_alive_s: float | None = None, listener: LoadListener | None = None
    ) -> "AsyncIterator[LocalLease[ServedModel]]":
        """See ServedModels. Raises what ModelManager.lease raises."""
        async with self._manager.lease(entry, keep_alive_s, listener=listener) as held:
            model = LocalModel(entry.name, cast("LoadedModel", held.model), entry.behaviour)
            yield LocalLease(model, held.load_s, lambda: self._manager.discard(held.slot))

    @contextlib.asynccontextmanager
    async def lease_embedder(
        self, entry: CatalogEntry, keep_alive_s: float | None = None
    ) -> "AsyncIterator[LocalLease[Embedder]]":
        """See ServedModels."""
        async with self._manager.lease(entry, keep_alive_s, embeds=True) as held:
            model = cast("EmbeddingModel", held.model)
            yield LocalLease(model, held.load_s, lambda: self._manager.discard(held.slot))

    async def resident(self) -> list[ResidentModel]:
        """See ServedModels."""
        loaded = sorted(self._manager.slots(), key=lambda slot: -slot.seconds_left)
        return [_resident(slot, slot.about) for slot in (*loaded, *self._manager.coming()) if slot.about]

    async def health(self) -> dict[str, Any]:
        """`status` "ok" says that the process lives, `ready` that a loaded model has computed a token."""
        return {
            "status": "ok",
            "ready": any(stats.generated_tokens > 0 for stats in self.engine_stats().values()),
            "models_loaded": len(self._manager.slots()),
            "models_loading": len(self._manager.coming()),
        }

    def engine_stats(self) -> Mapping[str, EngineStats]:
        """See ServedModels."""
        return {
            slot.entry.name: slot.model.engine.stats()
            for slot in self._manager.slots()
            if isinstance(slot.model, LoadedModel)
        }


def _resident(slot: Slot, about: ModelAbout) -> ResidentModel:
    left = slot.seconds_left
    if slot.model is None:
        return ResidentModel(about, left, about.size, about.context, loading=slot.watch.state)
    if isinstance(slot.model, EmbeddingModel):
        return ResidentModel(about, left, about.size, slot.model.max_tokens)
    engine, backend = slot.model.engine, slot.model.backend
    stats = engine.stats()
    used = (stats.pages_total - stats.pages_free) * stats.page_bytes
    return ResidentModel(
        about,
        left,
        max(about.size + used, backend.device_bytes),  # clients show device_bytes as a share of it
        engine.context,
        device_bytes=backend.device_bytes,
        more={
            "backend": backend.name,
            "backend_reason": backend.why,
            "cached_tokens": stats.cached_tokens,
            "running": stats.running,
            "waiting": stats.waiting,
        },
    )
