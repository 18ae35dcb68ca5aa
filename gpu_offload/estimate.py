"""Memory of a model split across devices, estimated from the file's header.

Weights and KV cache are exact for the usual architectures; compute buffers are mostly within 10 %. Used for GPUs that
are not in this machine, without llama.cpp, and as a first guess that llama.cpp's own sizes correct: see
localllm.placement.llama.
"""

import math

from gpu_offload.loading import output_rows
from gpu_offload.memory import FileSizes
from gpu_offload.options import LlamaOptions, Use

# Inputs are kept four times when several GPUs form a pipeline (GGML_SCHED_MAX_COPIES).
_PIPELINE_COPIES = 4


class Estimate:
    """A model whose units are on GPUs: the repeating layers and, last, the output layer.

    counts[i] units are on GPU i, in order, up to the last unit; the units before them and the embeddings are in main
    memory.
    """

    def __init__(self, needs: FileSizes, options: LlamaOptions, counts: tuple[int, ...]) -> None:
        self._needs = needs
        self._options = options
        self._counts = counts
        self.first = needs.layer_count + 1 - sum(counts)  # the first unit on a GPU
        self._cells = (options.context_tokens + 255) // 256 * 256  # as llama.cpp rounds them

    def on_gpu(self, start: int, stop: int) -> Use:
        """The memory of a GPU that holds units start..stop-1."""
        if start >= stop:
            return Use()
        return Use(weights=self._weights(start, stop), kv=self._kv(start, stop), compute=self._compute(stop))

    def on_gpu_by_rows(self, share: float) -> Use:
        """The memory of a GPU that holds this share of every matrix of the units on GPUs.

        llama.cpp gives each GPU whole heads, which layers take turns to round up, and a copy of tied embeddings.
        """
        last = self._needs.layer_count + 1
        if self.first == last:
            return Use()
        copied = self._needs.tied_bytes
        weights = int((self._weights(self.first, last) - copied) * share) + copied
        heads = max((cache.heads for cache in self._needs.caches), default=0) or 1
        kv = self._kv(self.first, last) * min(math.ceil(share * heads), heads) // heads
        return Use(weights=weights, kv=kv, compute=self._compute(last))

    def in_main_memory(self) -> Use:
        """What stays in main memory. Weights that llama.cpp repacks for the CPU count once."""
        needs, kept = self._needs, self._options.cpu_expert_layers
        logits = self.first > needs.layer_count
        weights = needs.embedding_bytes + self._weights(0, min(self.first, needs.layer_count))
        weights += sum(layer.experts for layer in needs.layers[:kept])
        if logits:
            weights += needs.output_bytes - needs.tied_bytes  # here, tied embeddings are not copied
        compute = self._buffer(logits) if self.first or kept else self._mask + self._rows * needs.embedding * 4
        return Use(weights=weights, kv=self._kv(0, self.first), compute=compute)

    def _weights(self, start: int, stop: int) -> int:
        """Bytes of the weights of units start..stop-1, without experts that stay in main memory."""
        kept, last = self._options.cpu_expert_layers, self._needs.layer_count
        layers = enumerate(self._needs.layers[start:stop], start)
        total = sum(layer.rest + (layer.experts if index >= kept else 0) for index, layer in layers)
        return total + (self._needs.output_bytes if start <= last < stop else 0)

    def _kv(self, start: int, stop: int) -> int:
        """Bytes of the KV cache of units start..stop-1."""
        types = self._options.type_k, self._options.type_v
        sequences = self._options.max_sequences + 1
        return sum(
            self._cells * cache.token_bytes(*types) + sequences * cache.state_bytes
            for cache in self._needs.caches[start:stop]
        )

    def _compute(self, stop: int) -> int:
        """Bytes of the compute buffer of a GPU whose last unit is stop-1."""
        last = self._needs.layer_count + 1
        size = self._buffer(logits=stop == last)
        if sum(self._counts) == last and sum(1 for count in self._counts if count) > 1:
            size += (_PIPELINE_COPIES - 1) * self._mask
        # Matrices of main memory are copied to the GPU for long batches, one at a time.
        there = self._needs.layers[: max(self.first, self._options.cpu_expert_layers)]
        return size + max((layer.largest for layer in there), default=0)

    @property
    def _rows(self) -> int:
        return min(self._options.batch_rows, self._cells)

    @property
    def _mask(self) -> int:
        """Bytes of the attention masks (float16); models with sliding windows have two."""
        return self._rows * self._cells * 2 * (2 if self._needs.number("attention.sliding_window", 0) else 1)

    def _buffer(self, logits: bool) -> int:
        """Bytes of ggml's buffer of intermediate results: the peak of one layer, or the logits.

        Fitted to llama.cpp's sizes for models of many shapes, with flash attention.
        """
        needs = self._needs
        heads = [cache for cache in needs.caches if cache.heads]
        query = needs.heads * max((cache.key_length for cache in heads), default=0)
        stored = max((cache.heads * (cache.key_length + cache.value_length) for cache in heads), default=0)
        wide = 3 * needs.feed_forward
        if experts := needs.number("expert_used_count", 0):
            inner = needs.number("expert_feed_forward_length", 0)
            wide = max(wide if any(not layer.experts for layer in needs.layers) else 0, 3 * experts * inner)
            wide += experts * needs.embedding
        peak = self._mask + 4 * self._rows * (3 * needs.embedding + query + max(wide, query, stored))
        if not logits:
            return peak
        outputs = output_rows(self._options) * (needs.vocabulary + needs.embedding)
        return max(peak, 4 * (outputs + self._rows * needs.embedding))
