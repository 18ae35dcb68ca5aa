"""Models with pooled states (a vector per text, or a score per pair of texts): their placement and how they open."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.limits import available_memory
from gguf_io import ModelFile
from gguf_io.runner_info import AdapterSet, LoadProgress
from gpu_offload.options import LlamaOptions, Use
from localllm.errors import RequestError
from localllm.placement.backends import Gpus, automatic_choice, gpus_here, llama_is_here, log_fallback
from localllm.placement.companions import WITHOUT, lora_of_encoder, open_adapters
from localllm.placement.memory import RESERVE_BYTES
from localllm.placement.placement import Placement
from localllm.settings import Settings
from models.errors import UnsupportedModelError, kernels_needed
from models.registry import TEXT_ENCODERS, find_architecture
from models.text_encoder import TextEncoder as NativeTextEncoder
from models.text_encoder import encoder_needs

_LLAMA_CONTEXT_BYTES = 256 << 20  # an estimate


class TextEncoder(Protocol):
    """Texts in, one pooled row of numbers each. Not thread-safe. models and gpu_offload implement it.

    max_tokens: of one text. dimensions: numbers in a row; a reranker has one, its score.
    """

    max_tokens: int
    dimensions: int

    def pooled(self, texts: Sequence[Sequence[int]], adapters: AdapterSet = ()) -> NDArray[np.float32]:
        """Return each text's row: float32[len(texts), dimensions]. The caller adds special tokens, and normalises.

        adapters: number and weight of each LoRA adapter that applies. Raises ValueError, before computing anything, for
        a text that is empty or longer than max_tokens and for ids outside the vocabulary; LlamaCppError if the
        computation fails.
        """

    def close(self) -> None:
        """Free everything. Idempotent."""


def place_text_encoder(
    file: ModelFile, settings: Settings, *, room: int | None = None, gpus: Gpus = gpus_here
) -> Placement:
    """Choose the backend of an embedding model or reranker and place its bytes, from its header.

    The settings' backend; for "auto", llama.cpp if there is a GPU or the native engine lacks the architecture. LoRA
    adapters need the native engine. llama.cpp takes the GPU with the most room, else main memory.
    Of the device settings, only gpu_layers and main_gpu apply. room, gpus: as for localllm.placement.backends.place,
    which also says what is returned if it does not fit. Raises UnsupportedModelError if the choice is the native engine
    and it does not support the architecture, RequestError for adapters on llama.cpp.
    """
    room = available_memory() if room is None else room
    settings = replace(settings, lora=lora_of_encoder(settings.lora, file))
    if settings.lora:
        if settings.backend == "llama":
            raise RequestError(
                f"{file.path.name}: adapters of embedding models and rerankers need the native engine.",
                remedy="Use --backend native, or leave out --lora.",
            )
        settings = replace(settings, backend="native")
    reason = "LoRA adapters need it" if settings.lora else "chosen by the backend setting"
    chosen = Placement("native", reason, settings=settings)
    if settings.backend == "auto":
        plain = replace(settings, split_mode=None, n_cpu_moe=None, lora="", rpc="", mmproj=WITHOUT)
        known = file.architecture in TEXT_ENCODERS
        lacking = "" if known else f"the native engine does not know the architecture {file.architecture!r}"
        chosen = replace(automatic_choice(plain, lambda: lacking), settings=settings)
    elif settings.backend == "llama":
        chosen = replace(chosen, backend="llama")
    if chosen.backend == "llama":
        return _on_llama(file, chosen, room, gpus)
    find_architecture(file.architecture, TEXT_ENCODERS)
    try:
        with open_adapters(settings.lora, file) as adapters:
            needs = encoder_needs(file, adapters=adapters)
    except UnsupportedModelError as error:
        return _to_llama(file, chosen, error, room, gpus)
    return _in_main_memory(chosen, Use(weights=needs.weights, compute=needs.buffers, available=room))


def open_text_encoder(
    file: ModelFile, placed: Placement, progress: LoadProgress | None = None
) -> tuple[TextEncoder, Placement]:
    """Load a model to pool its states.

    With backend "auto", a model that the native engine turns out not to support goes to llama.cpp, with a warning.
    progress is called on this thread; an exception from it aborts the load and is propagated. Raises OutOfMemoryError,
    ModelFileError and its subclasses, also for a reranker without a head, and LlamaCppError.
    """
    settings = placed.checked().settings
    if placed.backend == "native":
        try:
            with kernels_needed(), open_adapters(settings.lora, file) as adapters:
                return NativeTextEncoder(file, settings.threads, progress, adapters), placed
        except UnsupportedModelError as error:
            placed = _to_llama(file, placed, error, placed.uses[0].available, gpus_here)
            log_fallback(file, placed)
    from gpu_offload.text_encoder import LlamaTextEncoder

    return LlamaTextEncoder(file, placed.options, progress), placed


def _to_llama(file: ModelFile, chosen: Placement, error: "UnsupportedModelError", room: int, gpus: Gpus) -> Placement:
    """llama.cpp's placement of what the native engine turned out not to support; raises the error if not allowed."""
    if chosen.settings.backend == "native" or not llama_is_here():
        raise error
    reason = f"the native engine cannot: {error.message}"
    return _on_llama(file, replace(chosen, backend="llama", reason=reason), room, gpus)


def _on_llama(file: ModelFile, chosen: Placement, room: int, gpus: Gpus) -> Placement:
    from localllm.placement.llama import DEFAULT_RESERVE

    settings, weights = chosen.settings, file.weights_bytes
    options = LlamaOptions(threads=settings.threads, gpu_layers=0, main_gpu=settings.main_gpu or 0, split_mode="none")
    found = gpus() if settings.gpu_layers != 0 else []
    if found:
        index = max(range(len(found)), key=lambda index: found[index].free_bytes)
        index = index if settings.main_gpu is None else min(settings.main_gpu, len(found) - 1)
        if weights + _LLAMA_CONTEXT_BYTES + DEFAULT_RESERVE <= found[index].free_bytes:
            on_gpu = Use(weights=weights, compute=_LLAMA_CONTEXT_BYTES, reserve=DEFAULT_RESERVE)
            uses = [
                replace(on_gpu if number == index else Use(), place=gpu.label, available=gpu.free_bytes)
                for number, gpu in enumerate(found)
            ]
            main = Use("main memory", compute=_LLAMA_CONTEXT_BYTES, available=room)
            options = replace(options, gpu_layers=settings.gpu_layers, main_gpu=index)
            return replace(chosen, uses=(main, *uses), options=options)
    return _in_main_memory(
        replace(chosen, options=options), Use(weights=weights, compute=_LLAMA_CONTEXT_BYTES, available=room)
    )


def _in_main_memory(chosen: Placement, use: Use) -> Placement:
    placed = replace(chosen, uses=(replace(use, place="main memory", reserve=RESERVE_BYTES),))
    if placed.fits:
        return placed
    problem = (
        f"The model does not fit into memory: it needs {use.needed >> 20:,} MiB and {RESERVE_BYTES >> 20} MiB in "
        f"reserve; {max(use.available, 0) >> 20:,} MiB are available. Close other programs."
    )
    return replace(placed, problem=problem)
