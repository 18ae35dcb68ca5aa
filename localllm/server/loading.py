"""Planning and loading one model beside others, within memory."""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from cpu_kernels.limits import available_memory
from gguf_io import ModelFile, open_model
from localllm.engine.backends import choose_backend, native_kv_bytes
from localllm.engine.loaded_model import DRAFT_KV_MIB, LoadedModel, LoadProgress, load_model
from localllm.errors import OutOfMemoryError
from localllm.library import resolve
from localllm.memory import plan_memory
from localllm.server.catalog import CatalogEntry, with_files
from localllm.server.embedding_model import EmbeddingModel
from localllm.server.file_details import told_of
from localllm.server.llama_plans import EMBEDDING_BYTES, MIB, plan_embedder, plan_model
from localllm.server.options import ServerOptions
from localllm.settings import Settings
from models.errors import UnsupportedModelError

AMPLE_TOKENS = 8192

Model = LoadedModel | EmbeddingModel


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What one load was granted. needed: bytes of main memory, keys and values included; room: what there was.

    devices: bytes of each GPU, in llama.cpp's order; empty where none is used.
    """

    entry: CatalogEntry
    settings: Settings
    embeds: bool
    native: bool
    needed: int
    room: int
    devices: tuple[int, ...] = ()


class MemoryLoader:
    """Loads models so that what all of them hold or were promised fits into memory together.

    A load under way counts with all that it was granted, although part of it may be in memory already: who plans
    meanwhile gets too little rather than too much. The same holds for each GPU. llama.cpp itself loads one model after
    the other: what it says of a failure is not told apart by loads.
    """

    def __init__(self, settings: Settings, options: ServerOptions) -> None:
        self._settings = settings
        self._options = options
        self._llama = threading.Lock()

    def describe(self, entry: CatalogEntry) -> dict[str, Any]:
        """Size, digest and details of a model's file. Raises ModelFileError and its kin."""
        return told_of(entry.path)

    def plan(self, entry: CatalogEntry, embeds: bool, beside: Sequence[Model], coming: Sequence[LoadPlan]) -> LoadPlan:
        """Grant a load its memory beside models that are loaded and loads under way; for one thread at a time.

        Raises OutOfMemoryError with the sums, ModelFileError and its kin.
        """
        settings = with_files(self._settings, entry)
        room = self._room(beside, coming)
        try:
            with open_model(entry.path) as file:
                promised = [plan.devices for plan in coming]
                if embeds:
                    grant = plan_embedder(settings, file, room, promised)
                    return LoadPlan(entry, grant.settings, True, False, grant.main, room, grant.devices)
                if choose_backend(file, settings).backend == "llama":
                    on_gpus = any(map(any, promised)) or any(map(_on_gpus, beside))
                    grant = plan_model(settings, file, room, promised, on_gpus)
                    return LoadPlan(entry, grant.settings, False, False, grant.main, room, grant.devices)
                try:
                    return self._plan_native(entry, settings, file, room, bool(coming))
                except UnsupportedModelError:  # loading it says so, or takes llama.cpp
                    return LoadPlan(entry, settings, False, False, file.weights_bytes, room)
        except OutOfMemoryError as error:
            held = (sum(map(_held, beside)) + sum(plan.needed for plan in coming)) // MIB
            raise OutOfMemoryError(f"{error}\n{len(beside) + len(coming)} other models hold {held:,} MiB.") from error

    def load(self, plan: LoadPlan, progress: LoadProgress) -> Model:
        """Load as planned. progress is called on this thread; what it raises ends the load and is raised again.

        Raises ModelFileError and its kin, LlamaCppMemoryError where a device has less room than it said.
        """
        with nullcontext() if plan.native else self._llama:
            progress("loading weights", 0.0)
            if plan.embeds:
                return EmbeddingModel(plan.entry.path, plan.settings, progress)
            return load_model(plan.entry.path, plan.settings, progress, plan.entry.behaviour.template, plan.room)

    def _plan_native(
        self, entry: CatalogEntry, settings: Settings, file: ModelFile, room: int, others_load: bool
    ) -> LoadPlan:
        """A budget of keys and values: what is left, halved where more models may be loaded.

        While others load and the sums are rough, no small budget is granted: the model can wait for them.
        """
        per_token = native_kv_bytes(file, settings)
        weights = file.weights_bytes + _draft_bytes(settings)
        fixed = None if settings.kv_mib is None else settings.kv_mib * MIB
        plan = plan_memory(weights, per_token, fixed, room)
        kv = plan.kv // 2 if fixed is None and self._options.max_models > 1 else plan.kv
        if others_load and fixed is None and kv < AMPLE_TOKENS * per_token:
            raise OutOfMemoryError(f"{plan}\nThat is too little while other models load.")
        kv_mib = max(kv // MIB, 1)
        return LoadPlan(entry, replace(settings, kv_mib=kv_mib), False, True, weights + kv_mib * MIB, room)

    def _room(self, beside: Sequence[Model], coming: Sequence[LoadPlan]) -> int:
        """Bytes that nothing uses or has been promised."""
        promised = sum(map(_promised, beside)) + sum(plan.needed for plan in coming)
        room = available_memory() - promised
        if self._options.memory_bytes is not None:
            held = sum(map(_held, beside)) + sum(plan.needed for plan in coming)
            room = min(room, self._options.memory_bytes - held)
        return room


def _draft_bytes(settings: Settings) -> int:
    """What the draft model takes: its weights, and keys and values of its own."""
    if not settings.draft:
        return 0
    with open_model(resolve(settings.draft)) as file:
        return file.weights_bytes + DRAFT_KV_MIB * MIB


def _promised(model: Model) -> int:
    """Bytes of keys and values that a model may still store. llama.cpp has taken all of its cells at the start."""
    if isinstance(model, EmbeddingModel):
        return 0
    stats = model.engine.stats()
    allocated = model.backend.backend == "llama"
    return stats.copies_limit - stats.copies_bytes + (0 if allocated else stats.pages_free * stats.page_bytes)


def _on_gpus(model: Model) -> bool:
    return isinstance(model, LoadedModel) and model.backend.device_bytes > 0


def _held(model: Model) -> int:
    """Bytes of main memory for a model's weights and for all the keys and values that it may store."""
    if isinstance(model, EmbeddingModel):
        return model.file.weights_bytes + EMBEDDING_BYTES
    stats = model.engine.stats()
    stored = stats.pages_total * stats.page_bytes + stats.copies_limit
    return max(model.file.weights_bytes + stored - model.backend.device_bytes, 0)
