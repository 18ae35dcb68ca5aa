"""Embedding models and rerankers of this machine."""

import copy
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gguf_io import load_tokenizer, open_model
from gguf_io.interruption import checkpoint
from gguf_io.pooling import is_reranker
from gguf_io.runner_info import AdapterSet, LoadProgress
from gguf_io.tokenizer.pairs import Pairs
from localllm.engine.sequence import adapter_set
from localllm.placement.companions import usual_adapters
from localllm.placement.placement import Placement
from localllm.placement.text_encoders import open_text_encoder, place_text_encoder
from localllm.server.errors import ApiError, InputTooLongError
from localllm.server.limits import MAX_EMBED_TEXTS
from localllm.server.served import Embedder
from localllm.server.streams import interruptible
from localllm.settings import Settings


class EmbeddingModel:
    """An embedding model, or a reranker, and its tokenizer. Thread-safe: calls take turns, batch by batch.

    placement: the backend that computes it, why, and the most memory that it takes.
    """

    def __init__(
        self, path: Path, settings: Settings, progress: LoadProgress | None = None, placed: Placement | None = None
    ) -> None:
        """Load. progress is called on this thread; an exception from it ends the load and propagates.

        placed: where to load it; None places it on this machine with the settings. Raises what place_text_encoder and
        open_text_encoder raise, and TokenizerError.
        """
        self._lock = threading.Lock()
        self.file = open_model(path)
        try:
            self.tokenizer = load_tokenizer(self.file)
            self._ranks = is_reranker(self.file)
            self._pairs = Pairs(self.file.metadata, self.tokenizer)
            placed = placed or place_text_encoder(self.file, settings)
            self._encoder, self.placement = open_text_encoder(self.file, placed, progress)
            weights = [
                (number, weight) for number, (_, weight) in enumerate(usual_adapters(self.placement.settings.lora))
            ]
            self._adapters, self._adapter_count = adapter_set(weights, len(weights)), len(weights)
        except BaseException:
            self.file.close()
            raise

    def using(self, adapters: AdapterSet | None) -> Self:
        """This model with other weights of its adapters; None changes nothing. Raises ApiError 400 if it has none."""
        if adapters is None:
            return self
        if adapters and not self._adapter_count:
            raise ApiError(400, f"{self.file.path.stem} has no adapters: those of this server are for other models")
        changed = copy.copy(self)
        changed._adapters = adapters
        return changed

    @property
    def max_tokens(self) -> int:
        """The longest text, in tokens."""
        return self._encoder.max_tokens

    def batches(self, sizes: Sequence[int]) -> list[slice]:
        """Which texts to compute together: as many as fit into one pass of the model. sizes: their tokens."""
        found, first, total = [], 0, 0
        for index, size in enumerate(sizes):
            total += min(size, self.max_tokens)
            if total > self.max_tokens and index > first:
                found.append(slice(first, index))
                first, total = index, min(size, self.max_tokens)
        return [*found, slice(first, len(sizes))]

    def embed(
        self, texts: Sequence[str | Sequence[int]], *, truncate: bool, dimensions: int | None
    ) -> tuple[NDArray[np.float32], int]:
        """See served.Embedder.

        Raises ApiError 400 for an empty text, one that is too long where truncate is false, and too many dimensions.
        """
        if self._ranks:
            raise ApiError(400, f"{self.file.path.stem} is a reranker and cannot embed; use /v1/rerank")
        most = self._encoder.dimensions
        if dimensions is not None and not 1 <= dimensions <= most:
            raise ApiError(400, f"dimensions must be 1 to {most} for this model (got {dimensions})")
        tokens = [self.tokenizer.encode(text) if isinstance(text, str) else text for text in texts]
        fitted = [self._fitted(text, truncate) for text in tokens]
        found = self._pooled(fitted)[:, :dimensions]
        found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return found, sum(map(len, fitted))

    def rank(self, query: str, documents: Sequence[str], *, truncate: bool) -> tuple[NDArray[np.float32], int]:
        """See served.Embedder.

        Raises ApiError 400 for a model that is not a reranker, and for a pair that is too long; with truncate only if
        the query alone is too long.
        """
        if not self._ranks:
            raise ApiError(400, f"{self.file.path.stem} is not a reranker; /api/show lists what a model can do")
        pairs = [self._fitted_pair(query, document, truncate) for document in documents]
        return self._pooled(pairs)[:, 0], sum(map(len, pairs))

    def _pooled(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Each text's row. Between two batches, others may compute, and a checkpoint may end the work."""
        found = []
        for batch in self.batches([len(text) for text in texts]):
            checkpoint()
            with self._lock:
                found.append(self._encoder.pooled(texts[batch], self._adapters))
        return np.concatenate(found)

    def _fitted_pair(self, query: str, document: str, truncate: bool) -> list[int]:
        """Tokens of the pair, its document shortened from the end until it fits."""
        while True:
            pair = self._pairs.encode(query, document)
            if len(pair) <= self.max_tokens:
                return pair
            if not truncate or not document:
                what = "query and document have" if document else "the query alone has"
                raise InputTooLongError(what, len(pair), self.max_tokens)
            # 15/16: cut a little more than the excess, since tokens differ in length.
            document = document[: min(len(document) * self.max_tokens // len(pair), len(document) - 1) * 15 // 16]

    def _fitted(self, text: Sequence[int], truncate: bool) -> Sequence[int]:
        """The tokens. Too many are truncated, keeping the last token, which may be a special one."""
        if not text:
            raise ApiError(400, "the input is empty; send at least one token")
        if min(text) < 0 or max(text) >= self.tokenizer.vocab_size:
            raise ApiError(400, f"a token is outside the vocabulary (0 to {self.tokenizer.vocab_size - 1})")
        if len(text) <= self.max_tokens:
            return text
        if not truncate:
            raise InputTooLongError("the input has", len(text), self.max_tokens)
        return [*text[: self.max_tokens - 1], text[-1]]

    def close(self) -> None:
        """Free everything. Idempotent."""
        with self._lock:
            self._encoder.close()
        self.file.close()


async def embed_all(
    model: Embedder, texts: Sequence[str | Sequence[int]], *, truncate: bool, dimensions: int | None
) -> tuple[NDArray[np.float32], int]:
    """Embed texts or token ids on another thread. Raises ApiError 400 for too many texts."""
    if len(texts) > MAX_EMBED_TEXTS:
        raise ApiError(400, f"input has {len(texts)} texts; at most {MAX_EMBED_TEXTS} are embedded in one request")
    return await interruptible(partial(model.embed, texts, truncate=truncate, dimensions=dimensions))
