"""Embedding models and rerankers on llama.cpp: texts in, one pooled row of numbers each out."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.cores import usable_cores
from gguf_io.model_file import ModelFile
from gguf_io.pooling import Pooling, pooling_of
from gguf_io.runner_info import AdapterSet, LoadProgress
from gpu_offload.decoding import Batch
from gpu_offload.errors import LlamaCppError
from gpu_offload.library import complaints, failure, llama
from gpu_offload.loading import load_model
from gpu_offload.options import LlamaOptions

MAX_TOKENS = 2048  # of one text, which is computed in one pass; attention memory is quadratic in it
_SEQUENCES = 32  # most texts in a batch


class LlamaTextEncoder:
    """A model whose last hidden states are pooled into one row per text. Not thread-safe; close it after use.

    max_tokens: of one text. dimensions: numbers per row; a reranker has one, its score.
    """

    def __init__(self, model: ModelFile, options: LlamaOptions, progress: LoadProgress | None = None) -> None:
        """Load the model; only the options about threads and devices are used.

        progress is called on this thread; an exception in it ends the load. Raises ModelFileError for a reranker
        without a classification head, LlamaCppError and its subclasses.
        """
        pooling = pooling_of(model)
        self._lib = llama()
        with ExitStack() as opened:
            self._model: Any = load_model(model, options, progress)
            opened.callback(self._lib.llama_model_free, self._model)
            self.max_tokens = min(int(self._lib.llama_model_n_ctx_train(self._model)), MAX_TOKENS)
            self._context: Any = self._open(model, options, pooling)
            opened.callback(self._lib.llama_free, self._context)
            self._resources = opened.pop_all()
        self._memory = self._lib.llama_get_memory(self._context)
        self._compute = self._lib.llama_decode if self._memory else self._lib.llama_encode
        self._batch = Batch(self.max_tokens)
        self._vocab_size = int(self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model)))
        self.dimensions = 1 if pooling is Pooling.RANK else int(self._lib.llama_model_n_embd_out(self._model))

    def pooled(self, texts: Sequence[Sequence[int]], adapters: AdapterSet = ()) -> NDArray[np.float32]:
        """Return each text's row: float32[len(texts), dimensions]. The caller adds special tokens, and normalises.

        Raises ValueError, before anything is computed, for adapters, which are not loaded here, for a text that is
        empty or longer than max_tokens and for ids outside the vocabulary; LlamaCppError if the computation fails.
        """
        if self._context is None:
            raise ValueError("this model is closed")
        if adapters:
            raise ValueError(f"there are no adapters; {adapters} names some")
        rows = [np.array(text, dtype=np.int64) for text in texts]
        for number, row in enumerate(rows):
            if not 1 <= len(row) <= self.max_tokens:
                raise ValueError(f"text {number} has {len(row)} tokens, outside 1..{self.max_tokens}")
            if row.min() < 0 or row.max() >= self._vocab_size:
                raise ValueError(f"text {number} has token ids outside 0..{self._vocab_size - 1}")
        found = np.empty((len(rows), self.dimensions), dtype=np.float32)
        first = 0
        while first < len(rows):
            lengths = np.cumsum([len(row) for row in rows[first : first + _SEQUENCES]])
            count = int(np.searchsorted(lengths, self.max_tokens, side="right"))
            found[first : first + count] = self._together(rows[first : first + count])
            first += count
        return found

    def close(self) -> None:
        """Free the context and the model. Idempotent."""
        self._context = None
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, model: ModelFile, options: LlamaOptions, pooling: Pooling) -> Any:
        library = self._lib
        params = library.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self.max_tokens
        params.n_seq_max = _SEQUENCES
        params.kv_unified = True
        params.embeddings = True
        params.pooling_type = int(pooling)  # llama.cpp's numbers are the format's
        params.n_threads = params.n_threads_batch = options.threads or usable_cores()
        context = library.llama_init_from_model(self._model, params)
        if not context:
            raise failure(f"llama.cpp cannot make a pooling context for {model.path}")
        return context

    def _together(self, rows: list[NDArray[np.int64]]) -> NDArray[np.float32]:
        """Compute texts in one batch, each as a sequence of its own."""
        if self._memory:
            self._lib.llama_memory_clear(self._memory, True)
        lengths = [len(row) for row in rows]
        positions = np.concatenate([np.arange(length) for length in lengths])
        sequences = np.repeat(np.arange(len(rows)), lengths)
        self._batch.fill(np.concatenate(rows), positions, sequences, np.arange(len(positions)), len(positions))
        status = self._compute(self._context, self._batch.struct)
        if status:
            raise LlamaCppError(f"llama.cpp failed to compute texts with status {status}:\n{complaints()}")
        found = [self._lib.llama_get_embeddings_seq(self._context, index) for index in range(len(rows))]
        return np.stack([np.ctypeslib.as_array(row, shape=(self.dimensions,)) for row in found])
