"""Grants a model main memory and GPUs, given what others hold, and loads it."""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from cpu_kernels.limits import available_memory
from gguf_io import open_model
from gguf_io.runner_info import LoadProgress
from localllm.errors import OutOfMemoryError
from localllm.placement.backends import gpus_here, place
from localllm.placement.companions import draft_file
from localllm.placement.loaded_model import LoadedModel, load_model
from localllm.placement.placement import Placement
from localllm.placement.text_encoders import place_text_encoder
from localllm.server.catalog import CatalogEntry, about, with_files
from localllm.server.embeddings import EmbeddingModel
from localllm.server.served import ServedRow
from localllm.settings import Settings

AMPLE_TOKENS = 8192
MIB = 2**20

Model = LoadedModel | EmbeddingModel


class MemoryLoader:
    """Loads models so that everything they hold or were granted fits into memory. Its methods block.

    A model is granted its placement. A load in progress counts with all of it, although part of it may be allocated
    already: plans made meanwhile get too little rather than too much. The same holds for each GPU. llama.cpp loads one
    model at a time, since its error messages do not say which load they belong to.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._llama = threading.Lock()

    def describe(self, entry: CatalogEntry) -> ServedRow:
        """A model's row in lists. Raises ModelFileError or another file error."""
        return about(entry, self._settings.lora)

    def plan(
        self, entry: CatalogEntry, embeds: bool, loaded: Sequence[Model], coming: Sequence[Placement]
    ) -> Placement:
        """Grant a load its memory, given the loaded models and the loads in progress. Not thread-safe.

        Raises OutOfMemoryError with the sums, ModelFileError or another file error.
        """
        settings, room = with_files(self._settings, entry), self.room(loaded, coming)
        gpus = partial(gpus_here, [placed.gpu_bytes for placed in coming])
        try:
            with open_model(entry.path) as file:
                if embeds:
                    return place_text_encoder(file, settings, room=room, gpus=gpus).checked()
                on_gpus = any(placed.device_bytes for placed in coming) or any(map(_on_gpus, loaded))
                with draft_file(settings.draft) as draft:
                    held = sum(model.placement.main_bytes for model in loaded)
                    placing = partial(place, file, room=room, gpus=gpus, draft=draft, held=held)
                    return self._granted(placing, settings, on_gpus, bool(coming))
        except OutOfMemoryError as error:
            held = all_held(loaded, coming) // MIB
            raise OutOfMemoryError(f"{error}\n{len(loaded) + len(coming)} other models hold {held:,} MiB.") from error

    def load(self, entry: CatalogEntry, embeds: bool, placed: Placement, progress: LoadProgress) -> Model:
        """Load as planned. progress is called on this thread; an exception from it ends the load.

        Raises ModelFileError or another file error, LlamaCppMemoryError if a device has less room than it reported.
        """
        with nullcontext() if placed.backend == "native" else self._llama:
            progress("loading weights", 0.0)
            if embeds:
                return EmbeddingModel(entry.path, placed.settings, progress, placed)
            return load_model(entry.path, placed.settings, progress, entry.behaviour.template, placed)

    def _granted(
        self, placing: Callable[[Settings], Placement], settings: Settings, others_on_gpus: bool, others_load: bool
    ) -> Placement:
        """The placement of a generating model.

        On the native engine, a KV cache budget is the memory left, halved if more models may be loaded, but not below
        AMPLE_TOKENS. While others load, the sums are rough, so a small budget is refused and the model waits for the
        loads to end. While other models occupy GPUs, a model that would fit whole without them is not split: the others
        are unloaded first. Raises OutOfMemoryError with the sums.
        """
        placed = placing(settings).checked()
        if placed.backend == "llama":
            return granted_on_llama(placed, others_on_gpus)
        if settings.kv_mib is not None or placed.needs is None:
            return placed
        kv, ample = placed.uses[0].kv, placed.needs.kv(AMPLE_TOKENS)
        granted = min(kv, max(kv // 2, ample)) if self._settings.max_models > 1 else kv
        if others_load and granted < ample:
            raise OutOfMemoryError(f"{placed.sums()}\nThat is too little while other models load.")
        return placing(replace(settings, kv_mib=max(granted // MIB, 1))).checked()

    def room(self, loaded: Sequence[Model], coming: Sequence[Placement]) -> int:
        """Bytes that are neither used nor promised."""
        promised = sum(map(promised_bytes, loaded)) + sum(placed.main_bytes for placed in coming)
        room = available_memory() - promised
        if self._settings.memory_mib is not None:
            room = min(room, self._settings.memory_mib * MIB - all_held(loaded, coming))
        return room


def all_held(loaded: Sequence[Model], coming: Sequence[Placement]) -> int:
    """Bytes of main memory that models hold or were granted, all memory for keys and values included."""
    return sum(model.placement.main_bytes for model in loaded) + sum(placed.main_bytes for placed in coming)


def promised_bytes(model: Model) -> int:
    """Bytes that a model uses or may still allocate but that the system counts as free.

    Its KV cache and its copies may grow (llama.cpp allocates its cells at the start); mapped weights are page cache.
    """
    if isinstance(model, EmbeddingModel):
        return 0
    stats, placed = model.engine.stats(), model.placement
    growing = 0
    if placed.backend == "native":
        growing = placed.uses[0].kv - (stats.pages_total - stats.pages_free) * stats.page_bytes
    if placed.draft is not None and placed.draft.backend == "native":
        growing += placed.draft.uses[0].kv
    return stats.copies_limit - stats.copies_bytes + growing + placed.mapped


def _on_gpus(model: Model) -> bool:
    return isinstance(model, LoadedModel) and model.placement.device_bytes > 0


def granted_on_llama(placed: Placement, others_on_gpus: bool) -> Placement:
    """Raises OutOfMemoryError with the sums if it does not fit, see MemoryLoader._granted."""
    if not placed.uses[0].fits:
        raise _refusal(placed, "Close other programs, choose a smaller quantisation, or set the context (ctx) lower.")
    if others_on_gpus and not (placed.fits and _is_whole(placed)):
        raise _refusal(placed, "The GPUs have too little room while the other models are loaded.")
    return placed


def _is_whole(placed: Placement) -> bool:
    """Whether everything that the settings allow there lies on GPUs."""
    if placed.settings.gpu_layers is not None:
        return True
    return placed.options.gpu_layers == placed.layers and (
        placed.settings.n_cpu_moe is not None or placed.options.cpu_expert_layers == 0
    )


def _refusal(placed: Placement, advice: str) -> OutOfMemoryError:
    table = "\n".join("  ".join(row) for row in placed.rows())
    return OutOfMemoryError(f"The model does not fit into memory (MiB):\n{table}\n{advice}")
