"""A model that turns texts into vectors."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gguf_io import load_tokenizer, open_model
from gpu_offload.embedder import LlamaEmbedder
from gpu_offload.options import LlamaOptions
from localllm.server.errors import ApiError
from localllm.settings import Settings


class EmbeddingModel:
    """An embedder and its tokenizer. Thread-safe; one call computes at a time."""

    def __init__(self, path: Path, settings: Settings) -> None:
        """Load. Raises ModelFileError, TokenizerError, LlamaCppError."""
        self._lock = threading.Lock()
        self.file = open_model(path)
        try:
            self._tokenizer = load_tokenizer(self.file)
            self._embedder = LlamaEmbedder(self.file, LlamaOptions(threads=settings.threads))
        except BaseException:
            self.file.close()
            raise

    @property
    def max_tokens(self) -> int:
        """Longest text."""
        return self._embedder.max_tokens

    def tokenise(self, text: str) -> list[int]:
        """Token ids with the special tokens that the model wants."""
        return self._tokenizer.encode(text)

    def embed(
        self, texts: Sequence[Sequence[int]], *, truncate: bool, dimensions: int | None
    ) -> tuple[NDArray[np.float32], int]:
        """Rows of Euclidean length 1, float32[len(texts), dimensions], and how many tokens were read.

        dimensions keeps the first numbers of each row, which are scaled to length 1 again; None keeps all. Raises
        ApiError 400 for an empty text, one that is too long where truncate is false, and too many dimensions.
        """
        if dimensions is not None and not 1 <= dimensions <= self._embedder.dimensions:
            raise ApiError(400, f"dimensions is {dimensions}; this model has {self._embedder.dimensions}")
        fitted = [self._fitted(text, truncate) for text in texts]
        with self._lock:
            found = self._embedder.embed(fitted)[:, :dimensions]
        found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return found, sum(map(len, fitted))

    def _fitted(self, text: Sequence[int], truncate: bool) -> Sequence[int]:
        """The text, or its beginning with its last token, which may be a special one."""
        if not text:
            raise ApiError(400, "the input is empty; send at least one token")
        if min(text) < 0 or max(text) >= self._tokenizer.vocab_size:
            raise ApiError(400, f"a token is outside the vocabulary (0 to {self._tokenizer.vocab_size - 1})")
        if len(text) <= self.max_tokens:
            return text
        if not truncate:
            raise ApiError(400, f"the input has {len(text)} tokens and the model takes {self.max_tokens}")
        return [*text[: self.max_tokens - 1], text[-1]]

    def close(self) -> None:
        """Free everything. Idempotent."""
        with self._lock:
            self._embedder.close()
        self.file.close()
