"""Plans and loads a model within the memory that other models leave."""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from cpu_kernels.limits import available_memory
from gguf_io import ModelFile, open_model
from localllm.engine.backends import BackendChoice, choose_backend, plan_native
from localllm.engine.companions import draft_file
from localllm.engine.loaded_model import LoadedModel, LoadProgress, draft_bytes, load_model
from localllm.engine.text_encoders import choose_text_encoder
from localllm.errors import OutOfMemoryError
from localllm.server.catalog import CatalogEntry, about, with_files
from localllm.server.embeddings import EmbeddingModel
from localllm.server.llama_plans import MIB, Grant, plan_embedder, plan_model
from localllm.server.served import ModelAbout
from localllm.settings import Settings
from models.errors import UnsupportedModelError

AMPLE_TOKENS = 8192

Model = LoadedModel | EmbeddingModel


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a model will be loaded. room: bytes of main memory that were available."""

    entry: CatalogEntry
    grant: Grant
    embeds: bool
    native: bool
    room: int


class MemoryLoader:
    """Loads models so that everything they hold or were granted fits into memory. Its methods block.

    A load in progress counts with its whole grant, although part of it may be allocated already: plans made meanwhile
    get too little rather than too much. The same holds for each GPU. llama.cpp loads one model at a time, since its
    error messages do not say which load they belong to.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._llama = threading.Lock()

    def describe(self, entry: CatalogEntry) -> ModelAbout:
        """A model's row in lists. Raises ModelFileError or another file error."""
        return about(entry)

    def plan(self, entry: CatalogEntry, embeds: bool, loaded: Sequence[Model], coming: Sequence[LoadPlan]) -> LoadPlan:
        """Grant a load its memory, given the loaded models and the loads in progress. Not thread-safe.

        Raises OutOfMemoryError with the sums, ModelFileError or another file error.
        """
        settings = with_files(self._settings, entry)
        room = self._room(loaded, coming)
        promised = [plan.grant.devices for plan in coming]
        try:
            with open_model(entry.path) as file:
                if embeds:
                    grant, native = _embedder_grant(settings, file, room, promised)
                    return LoadPlan(entry, grant, True, native, room)
                with draft_file(settings) as draft:
                    without_others = room + sum(map(_held, loaded))
                    native = choose_backend(file, settings, without_others, draft).backend == "native"
                    if native:
                        try:
                            grant = self._native_grant(settings, file, draft, room, bool(coming))
                        except UnsupportedModelError:  # loading reports it, or uses llama.cpp
                            grant, native = Grant(settings, file.weights_bytes), False
                    else:
                        on_gpus = any(map(any, promised)) or any(map(_on_gpus, loaded))
                        grant = plan_model(settings, file, room, promised, on_gpus)
                    return LoadPlan(entry, grant, False, native, room)
        except OutOfMemoryError as error:
            held = _all_held(loaded, coming) // MIB
            raise OutOfMemoryError(f"{error}\n{len(loaded) + len(coming)} other models hold {held:,} MiB.") from error

    def load(self, plan: LoadPlan, progress: LoadProgress) -> Model:
        """Load as planned. progress is called on this thread; an exception from it ends the load.

        Raises ModelFileError or another file error, LlamaCppMemoryError if a device has less room than it reported.
        """
        with nullcontext() if plan.native else self._llama:
            progress("loading weights", 0.0)
            if plan.embeds:
                return EmbeddingModel(plan.entry.path, plan.grant.settings, progress)
            return load_model(plan.entry.path, plan.grant.settings, progress, plan.entry.behaviour.template, plan.room)

    def _native_grant(
        self, settings: Settings, file: ModelFile, draft: ModelFile | None, room: int, others_load: bool
    ) -> Grant:
        """Grant a KV cache budget: the memory left, halved if more models may be loaded.

        While others load, the sums are rough, so a small budget is refused and the model waits for the loads to end.
        """
        fixed = settings.kv_mib is not None
        plan = plan_native(file, settings, room=room, draft=draft, beside=draft_bytes(draft))
        kv = plan.kv // 2 if not fixed and self._settings.max_models > 1 else plan.kv
        if others_load and not fixed and kv < AMPLE_TOKENS * plan.kv_bytes_per_token:
            raise OutOfMemoryError(f"{plan}\nThat is too little while other models load.")
        kv_mib = max(kv // MIB, 1)
        return Grant(replace(settings, kv_mib=kv_mib), plan.needed - plan.kv + kv_mib * MIB)

    def _room(self, loaded: Sequence[Model], coming: Sequence[LoadPlan]) -> int:
        """Bytes that are neither used nor promised."""
        promised = sum(map(_promised, loaded)) + sum(plan.grant.main for plan in coming)
        room = available_memory() - promised
        if self._settings.memory_mib is not None:
            room = min(room, self._settings.memory_mib * MIB - _all_held(loaded, coming))
        return room


def _embedder_grant(
    settings: Settings, file: ModelFile, room: int, promised: Sequence[Sequence[int]]
) -> tuple[Grant, bool]:
    """The grant of an embedding model, and whether the native engine computes it."""
    choice = choose_text_encoder(file, settings)
    try:
        return plan_embedder(settings, choice, file, room, promised), choice.backend == "native"
    except UnsupportedModelError as error:  # loading reports it, or uses llama.cpp
        return plan_embedder(settings, BackendChoice("llama", str(error)), file, room, promised), False


def _all_held(loaded: Sequence[Model], coming: Sequence[LoadPlan]) -> int:
    """Bytes of main memory that models hold or were granted."""
    return sum(map(_held, loaded)) + sum(plan.grant.main for plan in coming)


def _promised(model: Model) -> int:
    """Bytes that a model uses or may still allocate but that the system counts as free.

    Its KV cache and its copies may grow (llama.cpp allocates its cells at the start); mapped weights are page cache.
    """
    if isinstance(model, EmbeddingModel):
        return 0
    stats = model.engine.stats()
    allocated = model.backend.backend == "llama"
    growing = 0 if allocated else stats.pages_free * stats.page_bytes
    return stats.copies_limit - stats.copies_bytes + growing + model.backend.mapped_bytes


def _on_gpus(model: Model) -> bool:
    return isinstance(model, LoadedModel) and model.backend.device_bytes > 0


def _held(model: Model) -> int:
    """Bytes of main memory for a model's weights and its whole KV cache budget."""
    if isinstance(model, EmbeddingModel):
        return model.held_bytes
    stats = model.engine.stats()
    stored = stats.pages_total * stats.page_bytes + stats.copies_limit
    if model.backend.backend == "native":
        return model.backend.main_bytes + stored
    return max(model.file.weights_bytes + stored - model.backend.device_bytes, 0)
