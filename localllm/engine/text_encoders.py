"""Models whose states are pooled, into a vector a text or a score a pair of texts; which backend computes them."""

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
    """Texts in, one pooled row of numbers each. Not thread-safe; models.TextEncoder and gpu_offload's are the two.

    max_tokens: of one text. dimensions: numbers of a row; a reranker has one, its score.
    """

    max_tokens: int
    dimensions: int

    def pooled(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return each text's row: float32[len(texts), dimensions]. The caller adds special tokens, and normalises.

        Raises ValueError, before anything is computed, for a text that is empty or longer than max_tokens and for ids
        outside the vocabulary; LlamaCppError if the computation fails.
        """

    def close(self) -> None:
        """Free everything. Idempotent."""


def choose_text_encoder(file: ModelFile, settings: Settings) -> BackendChoice:
    """The backend that the settings name; for "auto", llama.cpp for GPUs and what the native engine does not know.

    Of the settings about devices only gpu_layers and main_gpu matter to models that are pooled. Raises
    UnsupportedModelError where the native engine is left with an architecture that it does not know.
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
    """Bytes of the weights, and the most that computing takes beside them; for llama.cpp's context an estimate.

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

    Where "auto" leaves the choice, a model that the native engine turns out not to know goes to llama.cpp. progress is
    called on this thread; what it raises ends the load and is raised again. Raises ModelFileError and its kin, for a
    reranker without a head too, and LlamaCppError.
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
