"""What a given division of a model needs on every device. Nothing is decided here; see planner."""

import math
from dataclasses import dataclass

from gpu_offload.compute import Batch, compute_bytes, mask_bytes
from gpu_offload.loading import output_rows
from gpu_offload.memory import LayerCache, ModelNeeds, cells_of
from gpu_offload.options import LlamaOptions
from gpu_offload.parking import parked_tokens
from gpu_offload.sequences import sequence_numbers

MAIN_MEMORY = "main memory"
# Inputs are kept four times when several GPUs work on batches one after the other (GGML_SCHED_MAX_COPIES).
_PIPELINE_COPIES = 4


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU to plan for, here or imagined. Sizes in bytes."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What one place would hold, in bytes. other: a draft model, a projector, adapters, parked prefixes.

    reserve: left to the desktop. available: what is free there now.
    """

    place: str
    weights: int
    kv: int
    compute: int
    other: int
    reserve: int
    available: int

    @property
    def needed(self) -> int:
        """All bytes but the reserve."""
        return self.weights + self.kv + self.compute + self.other

    @property
    def fits(self) -> bool:
        """Whether it fits beside the reserve; a place that takes nothing always does."""
        return not self.needed or self.needed + self.reserve <= self.available


class Placement:
    """A model laid out as options say, its units dealt out to GPUs.

    Units are the repeating layers and, last, the output layer. counts[i] units lie on GPU i, in order, the last unit on
    the last GPU that has any; the units before them lie in main memory, and so do the embeddings.
    """

    def __init__(self, needs: ModelNeeds, options: LlamaOptions, counts: tuple[int, ...]) -> None:
        self.needs = needs
        self.options = options
        self.counts = counts
        self.first = needs.layer_count + 1 - sum(counts)
        states = any(cache.state_bytes for cache in needs.caches)
        window = 0 if states else max(cache.window or 0 for cache in needs.caches)
        self._can_park = not states and (options.full_window_cache or not window)
        self._sequences = sequence_numbers(options, window)
        self._cells = [self._cells_of(cache) for cache in needs.caches]
        self._batch = Batch(
            rows=min(options.batch_rows, self._cells_of(LayerCache())),
            output_rows=output_rows(options),
            cells=self._cells_of(LayerCache()),
            window_cells=max(
                (cells for cells, cache in zip(self._cells, needs.caches, strict=True) if cache.window), default=0
            ),
            flash_attention=options.flash_attention is not False,
        )

    def weights(self, start: int, stop: int) -> int:
        """Bytes of the weights of units start..stop-1 that lie with them; experts kept in main memory are left out."""
        kept = self.options.cpu_expert_layers
        layers = self.needs.layers[start:stop]
        total = sum(layer.rest + (layer.experts if start + i >= kept else 0) for i, layer in enumerate(layers))
        return total + (self.needs.output_bytes if start <= self.needs.layer_count < stop else 0)

    def kv(self, start: int, stop: int) -> int:
        """Bytes of the KV cache of units start..stop-1."""
        type_k, type_v = self.options.type_k, self.options.type_v
        stored = zip(self._cells[start:stop], self.needs.caches[start:stop], strict=True)
        return sum(
            cells * cache.token_bytes(type_k, type_v) + self._sequences * cache.state_bytes for cells, cache in stored
        )

    def shared_out(self, share: float) -> tuple[int, int, int]:
        """Bytes of weights, KV and compute of a GPU that has this share of every matrix of the units on GPUs.

        llama.cpp gives each GPU whole heads, of which layers take turns to round, and a copy of tied embeddings.
        """
        needs, last = self.needs, self.needs.layer_count + 1
        copied = needs.tied_bytes if sum(self.counts) else 0
        weights = int((self.weights(self.first, last) - copied) * share) + copied
        heads = max(needs.shape.kv_heads, 1)
        kv = self.kv(self.first, last) * min(math.ceil(share * heads), heads) // heads
        return weights, kv, self.compute(last)

    def parked(self) -> int:
        """Bytes that prefixes may take in main memory beside the cells: none where layers lie on a GPU."""
        if sum(self.counts) or not self._can_park:
            return 0
        cells = self._cells_of(LayerCache())
        return self.kv(0, self.first) * parked_tokens(cells) // cells

    def compute(self, stop: int) -> int:
        """Bytes of the compute buffer of a GPU whose last unit is stop-1."""
        size = compute_bytes(self.needs.shape, self._batch, logits=stop > self.needs.layer_count)
        if sum(self.counts) == self.needs.layer_count + 1 and sum(1 for count in self.counts if count) > 1:
            size += (_PIPELINE_COPIES - 1) * mask_bytes(self._batch)
        return size + self._largest_visitor()

    def main_memory(self, available: int) -> MemoryUse:
        """What stays in main memory, whatever the GPUs hold.

        Weights that llama.cpp rearranges for the processor count once, though it reports them twice: those in the file
        are read no more, and the system takes their pages back when it needs them.
        """
        needs, options = self.needs, self.options
        layers = needs.layers
        weights = needs.embedding_bytes + self.weights(0, min(self.first, needs.layer_count))
        weights += sum(layer.experts for layer in layers[: options.cpu_expert_layers])
        if self.first > needs.layer_count:
            weights += needs.output_bytes - needs.tied_bytes  # here, tied embeddings are not copied
        results = self._sequences * needs.shape.vocabulary * 4
        if self.first or options.cpu_expert_layers:
            logits = self.first > needs.layer_count
            results += compute_bytes(needs.shape, self._batch, logits=logits)
        else:
            results += mask_bytes(self._batch) + self._batch.rows * needs.shape.embedding * 4
        return MemoryUse(MAIN_MEMORY, weights, self.kv(0, self.first), results, self.parked(), 0, available)

    def _cells_of(self, cache: LayerCache) -> int:
        options = self.options
        return cells_of(
            cache,
            options.context_tokens,
            self._sequences,
            options.batch_rows,
            full_window=options.full_window_cache,
        )

    def _largest_visitor(self) -> int:
        """Bytes of the largest matrix of main memory, which visits a GPU while it computes a long batch."""
        staying = self.needs.layers[: self.first]
        largest = max((max(layer.largest, layer.largest_expert) for layer in staying), default=0)
        experts = self.needs.layers[: self.options.cpu_expert_layers]
        return max([largest, *(layer.largest_expert for layer in experts)])
