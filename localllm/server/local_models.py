"""Models of this machine, loaded into this process."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from anyio import to_thread

from gguf_io.runner_info import AdapterSet
from localllm.answer.local import LocalModel
from localllm.engine.sequence import adapter_set
from localllm.errors import LocalLLMError, RequestError
from localllm.library.entry import LibraryModel
from localllm.placement.companions import usual_adapters
from localllm.placement.loaded_model import LoadedModel
from localllm.server.catalog import Catalog, CatalogEntry, about, capabilities, describe, facts_of, with_files
from localllm.server.embeddings import EmbeddingModel
from localllm.server.errors import ApiError
from localllm.server.load_watch import LoadListener
from localllm.server.loading import MemoryLoader
from localllm.server.models_manager import LoadSlot, ModelManager
from localllm.server.options import ServerOptions
from localllm.server.served import Embedder, Lease, Resident, ServedDetails, ServedModel, ServedRow
from localllm.settings import Settings


class LocalModels:
    """Finds models in a catalog and loads them with a manager. Implements ServedModels, which documents the methods."""

    def __init__(self, catalog: Catalog, manager: ModelManager) -> None:
        self.settings: Settings = catalog.settings
        self.entries = catalog.entries
        self.names = catalog.names
        self.find = catalog.find
        self.release = manager.expire
        self.stop_loading = manager.stop_loading
        self.close = manager.close
        self._manager = manager
        self._weights: dict[tuple[Path, str], AdapterSet] = {}  # changed by requests; by file and adapters

    def library_model(self, entry: CatalogEntry) -> LibraryModel:
        return entry.model

    def about(self, entry: CatalogEntry) -> ServedRow:
        return about(entry, self.settings.lora)

    def capabilities(self, entry: CatalogEntry) -> list[str]:
        return capabilities(entry, self.settings.mmproj, self.settings.backend)

    def ranks(self, entry: CatalogEntry) -> bool:
        return facts_of(entry.path).only == "reranking"

    def identity(self, entry: CatalogEntry) -> str:
        files = [(path, path.stat().st_mtime_ns, weight) for path, weight in self.adapters(entry)]
        return f"{self.about(entry).digest} {entry.behaviour} {files}"

    def adapters(self, entry: CatalogEntry) -> list[tuple[Path, float]]:
        found = usual_adapters(with_files(self.settings, entry).lora)
        chosen = self._with_weights(entry).behaviour.adapters
        if chosen is None:
            return found
        weights = dict(chosen)
        return [(path, weights.get(number, 0.0)) for number, (path, _) in enumerate(found)]

    def set_adapters(self, entry: CatalogEntry, chosen: Sequence[tuple[int, float]]) -> None:
        if entry.adapter:
            raise RequestError(f'"{entry.name}:{entry.adapter}" always applies that adapter; name "{entry.name}"')
        self._weights[self._weighed(entry)] = adapter_set(chosen, len(self.adapters(entry)))

    def _weighed(self, entry: CatalogEntry) -> tuple[Path, str]:
        return entry.path, with_files(self.settings, entry).lora

    def _with_weights(self, entry: CatalogEntry) -> CatalogEntry:
        """The entry with the weights that requests have set, unless its name chooses an adapter."""
        weights = self._weights.get(self._weighed(entry))
        if weights is None or entry.adapter:
            return entry
        return replace(entry, behaviour=replace(entry.behaviour, adapters=weights))

    def describe(self, entry: CatalogEntry, verbose: bool) -> ServedDetails:
        return describe(entry, self.settings, verbose)

    @contextlib.asynccontextmanager
    async def lease(
        self, entry: CatalogEntry, keep_alive_s: float | None, listener: LoadListener | None
    ) -> AsyncIterator[Lease[ServedModel]]:
        if entry.name not in self.loaded() and not await to_thread.run_sync(_may_generate, entry):
            raise ApiError(400, f'"{entry.name}" does not support chat: it is a model for embeddings or for ranking')
        async with self._manager.lease(entry, keep_alive_s, listener=listener) as held:
            model = LocalModel(entry.name, cast("LoadedModel", held.model), self._with_weights(entry).behaviour)
            yield Lease(held.name, model, held.load_s, held.discard)

    @contextlib.asynccontextmanager
    async def lease_embedder(self, entry: CatalogEntry, keep_alive_s: float | None) -> AsyncIterator[Lease[Embedder]]:
        async with self._manager.lease(entry, keep_alive_s, embeds=True) as held:
            model = cast("EmbeddingModel", held.model).using(self._with_weights(entry).behaviour.adapters)
            yield Lease(held.name, model, held.load_s, held.discard)

    async def resident(self) -> list[Resident]:
        open_slots = [slot for slot in self._manager.slots() if slot.closing is None]
        loaded = sorted(open_slots, key=lambda slot: -slot.seconds_left)
        found: dict[str, Resident] = {}
        for slot in (*loaded, *self._manager.coming()):
            if slot.about:
                row, before = _resident(slot, slot.about), found.get(slot.entry.name)
                found[slot.entry.name] = _together(before, row) if before else row
        return list(found.values())

    async def health(self) -> dict[str, Any]:
        """status "ok": the process is alive; ready: a loaded model has computed a token."""
        return {
            "status": "ok",
            "ready": any(model.engine.stats().generated_tokens > 0 for model in self.loaded().values()),
            "models_loaded": len(self._manager.slots()),
            "models_loading": len(self._manager.coming()),
        }

    def loaded(self) -> Mapping[str, LoadedModel]:
        slots = self._manager.slots()
        return {slot.entry.name: slot.model for slot in slots if isinstance(slot.model, LoadedModel)}


def _may_generate(entry: CatalogEntry) -> bool:
    """Whether a model can chat. True for an unreadable file: it may be loaded already, or the load reports why not."""
    with contextlib.suppress(OSError, LocalLLMError):
        return facts_of(entry.path).only is None
    return True


def _together(first: Resident, other: Resident) -> Resident:
    """One row for a model that is loaded twice, to answer and to embed. first: the one that stays longer."""
    shown = other if other.context > first.context else first
    return replace(
        shown,
        seconds_left=first.seconds_left,
        size=first.size + other.size,
        device_bytes=first.device_bytes + other.device_bytes,
        loading=first.loading,
    )


def _resident(slot: LoadSlot, about: ServedRow) -> Resident:
    left = slot.seconds_left
    if slot.model is None:
        return Resident(about, left, about.size, about.context, loading=slot.watch.state)
    if isinstance(slot.model, EmbeddingModel):
        more = {"backend": slot.model.placement.name, "backend_reason": slot.model.placement.why}
        return Resident(about, left, about.size, slot.model.max_tokens, more=more)
    engine, placed = slot.model.engine, slot.model.placement
    stats = engine.stats()
    used = (stats.pages_total - stats.pages_free) * stats.page_bytes
    return Resident(
        about,
        left,
        max(about.size + used, placed.device_bytes),  # clients show device_bytes as a share of it
        engine.most_tokens,
        device_bytes=placed.device_bytes,
        more={
            "backend": placed.name,
            "backend_reason": placed.why,
            "cached_tokens": stats.cached_tokens,
            "kv_bytes": used,
            "kv_window_bytes": stats.window_pages * stats.page_bytes,
            "running": stats.running,
            "waiting": stats.waiting,
        },
    )


def models_here(served: Sequence[str], options: ServerOptions) -> Callable[[], LocalModels]:
    """A factory for the models of this machine. Raises LocalLLMError if a named one cannot be served."""
    catalog = Catalog(served, options.settings)
    return lambda: LocalModels(catalog, ModelManager(options, MemoryLoader(options.settings)))
