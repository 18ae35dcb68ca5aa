"""Text vectors from llama.cpp: one normalised row a text, pooled as the model's file says."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gguf_io.model_file import ModelFile
from gpu_offload.errors import LlamaCppError
from gpu_offload.library import llama
from gpu_offload.loading import LoadProgress
from gpu_offload.options import LlamaOptions
from gpu_offload.pooled import PooledTexts


class LlamaEmbedder(PooledTexts):
    """An embedding model, or any other, whose last hidden states are pooled into one vector a text.

    Pooling is `<architecture>.pooling_type` of the file (mean, first or last token), and the mean where it says none.
    """

    def __init__(self, model: ModelFile, options: LlamaOptions, progress: LoadProgress | None = None) -> None:
        """Load the model. Raises LlamaCppError and its kin; rerankers, which score pairs of texts, are refused."""
        library = llama()
        pooling = model.metadata.get_int(f"{model.architecture}.pooling_type", library.LLAMA_POOLING_TYPE_MEAN)
        if pooling == library.LLAMA_POOLING_TYPE_RANK:
            raise LlamaCppError(f"{model.path} is a reranker: it scores pairs of texts and makes no vectors.")
        super().__init__(model, options, pooling or library.LLAMA_POOLING_TYPE_MEAN, progress)
        self.dimensions = int(library.llama_model_n_embd_out(self._model))

    def embed(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return a row of Euclidean length 1 for each text of token ids: float32[len(texts), dimensions].

        Special tokens are the caller's to add. Raises what `pooled` raises.
        """
        found = self.pooled(texts, self.dimensions)
        found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return found
