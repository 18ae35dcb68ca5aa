"""A model that turns texts into vectors, or pairs of texts into scores."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gguf_io import load_tokenizer, open_model
from gpu_offload.embedder import LlamaEmbedder
from gpu_offload.loading import LoadProgress
from gpu_offload.options import LlamaOptions
from gpu_offload.reranker import LlamaReranker, is_reranker
from localllm.server.errors import ApiError
from localllm.settings import Settings


class EmbeddingModel:
    """An embedder, or a reranker where the file is one, and its tokenizer. Thread-safe; one call computes at a time."""

    def __init__(self, path: Path, settings: Settings, progress: LoadProgress | None = None) -> None:
        """Load. progress is called on this thread; what it raises ends the load and is raised again.

        Raises ModelFileError, TokenizerError, LlamaCppError.
        """
        self._lock = threading.Lock()
        self.file = open_model(path)
        try:
            self._tokenizer = load_tokenizer(self.file)
            options = LlamaOptions(
                threads=settings.threads,
                gpu_layers=settings.gpu_layers,
                main_gpu=settings.main_gpu or 0,
                split_mode="none",
            )
            self._computes: LlamaEmbedder | LlamaReranker = (
                LlamaReranker(self.file, self._tokenizer, options, progress)
                if is_reranker(self.file)
                else LlamaEmbedder(self.file, options, progress)
            )
        except BaseException:
            self.file.close()
            raise

    @property
    def max_tokens(self) -> int:
        """Longest text."""
        return self._computes.max_tokens

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
        embedder = self._computes
        if not isinstance(embedder, LlamaEmbedder):
            raise ApiError(400, f"{self.file.path.stem} is a reranker and makes no vectors; ask it at /v1/rerank")
        if dimensions is not None and not 1 <= dimensions <= embedder.dimensions:
            raise ApiError(400, f"dimensions is {dimensions}; this model has {embedder.dimensions}")
        fitted = [self._fitted(text, truncate) for text in texts]
        with self._lock:
            found = embedder.embed(fitted)[:, :dimensions]
        found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return found, sum(map(len, fitted))

    def rank(self, query: str, documents: Sequence[str], *, truncate: bool) -> tuple[NDArray[np.float32], int]:
        """The score of each document for the query, higher is better, and how many tokens were read.

        Raises ApiError 400 for a model that is no reranker, and for a pair that is too long: where truncate is true,
        only if the query alone is.
        """
        reranker = self._computes
        if not isinstance(reranker, LlamaReranker):
            raise ApiError(400, f"{self.file.path.stem} is no reranker; see /api/show for what a model can do")
        pairs = [self._fitted_pair(reranker, query, document, truncate) for document in documents]
        with self._lock:
            scores = reranker.scores(pairs)
        return scores, sum(map(len, pairs))

    def _fitted_pair(self, reranker: LlamaReranker, query: str, document: str, truncate: bool) -> list[int]:
        """The pair, its document shortened from the end until it fits."""
        while True:
            pair = reranker.pair(query, document)
            if len(pair) <= self.max_tokens:
                return pair
            if not truncate or not document:
                problem = "query and document have" if document else "the query has without any document"
                raise ApiError(400, f"{problem} {len(pair)} tokens and the model takes {self.max_tokens}")
            # A little more than the share that is too much, since tokens differ in length.
            document = document[: min(len(document) * self.max_tokens // len(pair), len(document) - 1) * 15 // 16]

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
            self._computes.close()
        self.file.close()
