"""Models with pooled states (a vector per text, or a score per pair of texts), and the choice of their backend."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gguf_io import ModelFile
from localllm.engine.backends import BackendChoice, automatic_choice, llama_is_here
from localllm.engine.companions import WITHOUT
from localllm.settings import Settings

_LLAMA_CONTEXT_BYTES = 256 << 20


class TextEncoder(Protocol):
    """Texts in, one pooled row of numbers each. Not thread-safe. models and gpu_offload implement it.

    max_tokens: of one text. dimensions: numbers in a row; a reranker has one, its score.
    """

    max_tokens: int
    dimensions: int

    def pooled(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return each text's row: float32[len(texts), dimensions]. The caller adds special tokens, and normalises.

        Raises ValueError, before computing anything, for a text that is empty or longer than max_tokens and for ids
        outside the vocabulary; LlamaCppError if the computation fails.
        """

    def close(self) -> None:
        """Free everything. Idempotent."""


def choose_text_encoder(file: ModelFile, settings: Settings) -> BackendChoice:
    """The settings' backend; for "auto", llama.cpp if there is a GPU or the native engine lacks the architecture.

    Of the device settings, only gpu_layers and main_gpu apply. Raises UnsupportedModelError if the choice is the native
    engine and it does not support the architecture.
    """
    from models.registry import TEXT_ENCODERS, find_architecture

    if settings.backend == "auto":
        plain = replace(settings, split_mode=None, n_cpu_moe=None, lora="", rpc="", mmproj=WITHOUT)
        known = file.architecture in TEXT_ENCODERS
        lacking = "" if known else f"the native engine does not know the architecture {file.architecture!r}"
        choice = automatic_choice(plain, lambda: lacking)
    else:
        choice = BackendChoice(settings.backend, "chosen by the backend setting")
    if choice.backend == "native":
        find_architecture(file.architecture, TEXT_ENCODERS)
    return choice


def encoder_bytes(file: ModelFile, choice: BackendChoice) -> tuple[int, int]:
    """Bytes of the weights, and the maximum that computing needs beside them, an estimate for llama.cpp's context.

    Raises UnsupportedModelError.
    """
    if choice.backend == "llama":
        return file.weights_bytes, _LLAMA_CONTEXT_BYTES
    from models.needs import encoder_needs

    return encoder_needs(file)


def open_text_encoder(
    file: ModelFile, settings: Settings, progress: Callable[[str, float], None] | None = None
) -> tuple[TextEncoder, BackendChoice]:
    """Load a model to pool its states.

    With backend "auto", a model that the native engine turns out not to support goes to llama.cpp. progress is called
    on this thread; an exception from it aborts the load and is propagated. Raises ModelFileError and its subclasses,
    also for a reranker without a head, and LlamaCppError.
    """
    from models.errors import UnsupportedModelError, kernels_needed
    from models.text_encoder import TextEncoder as NativeTextEncoder

    choice = choose_text_encoder(file, settings)
    if choice.backend == "native":
        try:
            with kernels_needed():
                return NativeTextEncoder(file, settings.threads, progress), choice
        except UnsupportedModelError as error:
            if settings.backend == "native" or not llama_is_here():
                raise
            choice = BackendChoice("llama", f"the native engine cannot: {error}")
    from gpu_offload.options import LlamaOptions
    from gpu_offload.text_encoder import LlamaTextEncoder

    options = LlamaOptions(
        threads=settings.threads,
        gpu_layers=settings.gpu_layers,
        main_gpu=settings.main_gpu or 0,
        split_mode="none",
    )
    return LlamaTextEncoder(file, options, progress), choice
