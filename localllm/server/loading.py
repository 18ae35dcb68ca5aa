"""Grants a model main memory and GPUs, given what others hold, and loads it."""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from cpu_kernels.limits import available_memory
from gguf_io import ModelFile, open_model
from gpu_offload.devices import Device, gpus
from gpu_offload.errors import LlamaCppMissingError
from gpu_offload.planner import DEFAULT_RESERVE, Plan
from gpu_offload.planner import plan as plan_placement
from localllm.engine.backends import BackendChoice, choose_backend, plan_native, plan_request
from localllm.engine.companions import draft_file, projector_of
from localllm.engine.loaded_model import LoadedModel, LoadProgress, draft_bytes, load_model
from localllm.engine.text_encoders import choose_text_encoder, encoder_bytes
from localllm.errors import OutOfMemoryError
from localllm.memory import RESERVE_BYTES
from localllm.server.catalog import CatalogEntry, about, with_files
from localllm.server.embeddings import EmbeddingModel
from localllm.server.served import ModelAbout
from localllm.settings import Settings
from models.errors import UnsupportedModelError

AMPLE_TOKENS = 8192
MIB = 2**20

Model = LoadedModel | EmbeddingModel


@dataclass(frozen=True, slots=True)
class Grant:
    """settings: place the model so. main: bytes of main memory, KV cache included.

    devices: bytes of each GPU, in llama.cpp's order; empty if none is used.
    """

    settings: Settings
    main: int
    devices: tuple[int, ...] = ()


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
        """Grant a KV cache budget: the memory left, halved if more models may be loaded, but not below AMPLE_TOKENS.

        While others load, the sums are rough, so a small budget is refused and the model waits for the loads to end.
        """
        fixed = settings.kv_mib is not None
        plan = plan_native(file, settings, room=room, draft=draft, beside=draft_bytes(draft))
        ample = AMPLE_TOKENS * plan.kv_bytes_per_token
        kv = min(plan.kv, max(plan.kv // 2, ample)) if not fixed and self._settings.max_models > 1 else plan.kv
        if others_load and not fixed and kv < ample:
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


def plan_model(
    settings: Settings, file: ModelFile, room: int, promised: Sequence[Sequence[int]], others_on_gpus: bool
) -> Grant:
    """Grant memory to a generating model. promised: the GPU grants of each load in progress.

    While other models occupy GPUs, a model that would fit whole without them is not split: the others are unloaded
    first. Raises OutOfMemoryError with the sums.
    """
    found = _gpus(promised)
    request = replace(plan_request(file, settings, projector_of(file, settings)), dry_run=True)
    made = plan_placement(file, found, room, request)
    if not made.uses[0].fits:
        raise _refusal(made, "Close other programs, choose a smaller quantisation, or set the context (ctx) lower.")
    if others_on_gpus and not (made.fits and _is_whole(made, settings)):
        raise _refusal(made, "The GPUs have too little room while the other models are loaded.")
    return Grant(settings, made.uses[0].needed, tuple(use.needed for use in made.uses[1:]))


def plan_embedder(
    settings: Settings, choice: BackendChoice, file: ModelFile, room: int, promised: Sequence[Sequence[int]]
) -> Grant:
    """Grant memory to an embedding model or reranker: with llama.cpp on the GPU with the most room, else main memory.

    Raises OutOfMemoryError with the sums, UnsupportedModelError if the native engine cannot compute the model.
    """
    weights, beside = encoder_bytes(file, choice)
    needed = weights + beside
    found = [] if settings.gpu_layers == 0 or choice.backend == "native" else _gpus(promised)
    if found:
        chosen = max(range(len(found)), key=lambda index: found[index].free_bytes)
        chosen = chosen if settings.main_gpu is None else min(settings.main_gpu, len(found) - 1)
        if needed + DEFAULT_RESERVE <= found[chosen].free_bytes:
            devices = tuple(needed if index == chosen else 0 for index in range(len(found)))
            return Grant(replace(settings, main_gpu=chosen), beside, devices)
    if needed + RESERVE_BYTES > room:
        raise OutOfMemoryError(
            f"The model does not fit into memory: it needs {needed // MIB:,} MiB and {RESERVE_BYTES // MIB} MiB in "
            f"reserve; {max(room, 0) // MIB:,} MiB are available. Close other programs."
        )
    return Grant(settings if choice.backend == "native" else replace(settings, gpu_layers=0), needed)


def _gpus(promised: Sequence[Sequence[int]]) -> list[Device]:
    """The GPUs with their free memory less all promised bytes. What a running load has allocated counts twice."""
    try:
        devices = gpus()
    except LlamaCppMissingError:  # loading reports it
        return []
    found = []
    for index, gpu in enumerate(devices):
        taken = sum(parts[index] for parts in promised if index < len(parts))
        found.append(replace(gpu, free_bytes=max(gpu.free_bytes - taken, 0)))
    return found


def _is_whole(made: Plan, settings: Settings) -> bool:
    """Whether the plan places on GPUs everything that the settings allow there."""
    if settings.gpu_layers is not None:
        return True
    return made.options.gpu_layers == made.layers and (
        settings.n_cpu_moe is not None or made.options.cpu_expert_layers == 0
    )


def _refusal(made: Plan, advice: str) -> OutOfMemoryError:
    table = "\n".join("  ".join(row) for row in made.rows())
    return OutOfMemoryError(f"The model does not fit into memory (MiB):\n{table}\n{advice}")
