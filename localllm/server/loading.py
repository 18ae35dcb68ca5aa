"""Loading one model beside others, within memory."""

from dataclasses import replace

import psutil

from gguf_io import ModelFile, open_model
from localllm.engine.backends import choose_backend, native_kv_bytes
from localllm.engine.loaded_model import LoadedModel, load_model
from localllm.engine.memory_plan import plan_memory
from localllm.errors import OutOfMemoryError
from localllm.server.catalog import CatalogEntry
from localllm.server.embedding_model import EmbeddingModel
from localllm.server.models_manager import Model
from localllm.server.options import ServerOptions
from localllm.settings import Settings

MIB = 2**20


class MemoryLoader:
    """Loads models so that the keys and values promised to all of them fit into memory together."""

    def __init__(self, settings: Settings, options: ServerOptions) -> None:
        self._settings = settings
        self._options = options

    def __call__(self, entry: CatalogEntry, embeds: bool, beside: list[Model]) -> Model:
        """Load a model. Raises OutOfMemoryError with the sums, ModelFileError and its kin."""
        if embeds:
            return EmbeddingModel(entry.path, self._settings)
        settings = self._settings
        if lora := entry.behaviour.settings.get("lora"):
            settings = replace(settings, lora=settings.lora or str(lora))
        with open_model(entry.path) as file:
            settings = self._within_memory(settings, file, beside)
        return load_model(entry.path, settings, template=entry.behaviour.template)

    def _within_memory(self, settings: Settings, file: ModelFile, beside: list[Model]) -> Settings:
        """The settings with a budget of keys and values: what is left, halved where more models may be loaded.

        llama.cpp plans its own memory, on devices too.
        """
        if choose_backend(file, settings).backend == "llama":
            return settings
        room = self._room(beside)
        per_token = native_kv_bytes(file, settings)
        kv = None if settings.kv_mib is None else settings.kv_mib * MIB
        try:
            plan = plan_memory(file.size_bytes, per_token, kv, room)
        except OutOfMemoryError as error:
            held = sum(map(_held, beside)) // MIB
            raise OutOfMemoryError(f"{error}\n{len(beside)} loaded models hold {held:,} MiB.") from error
        if kv is None and self._options.max_models > 1:
            return replace(settings, kv_mib=max(plan.kv // 2 // MIB, 1))
        return replace(settings, kv_mib=max(plan.kv // MIB, 1))

    def _room(self, beside: list[Model]) -> int:
        """Bytes that no loaded model uses or has been promised."""
        promised = sum(
            stats.pages_free * stats.page_bytes
            for stats in (model.engine.stats() for model in beside if isinstance(model, LoadedModel))
        )
        room = psutil.virtual_memory().available - promised
        if self._options.memory_bytes is not None:
            room = min(room, self._options.memory_bytes - sum(map(_held, beside)))
        return room


def _held(model: Model) -> int:
    """Bytes of a model's weights and of all the keys and values that it may store."""
    if isinstance(model, EmbeddingModel):
        return model.file.size_bytes
    stats = model.engine.stats()
    return model.file.size_bytes + stats.pages_total * stats.page_bytes
