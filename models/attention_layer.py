"""Attention as operations: queries, keys and values, their norms and rotation, pages, and the way back."""

import math

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import activations, attention, kv_store, norms
from cpu_kernels.records import Barrier
from models.architecture import RopePairs
from models.buffers import Rows
from models.kv_pages import PageStore
from models.recording import Recording, forms
from models.rope_tables import NO_ROPE, Ropes, head_order
from models.weights import Matrix

_PARTS = ("q", "k", "v")
_LOG2E = math.log2(math.e)
_TO_THE_END = 1 << 40


class AttentionLayers:
    """Buffers that all attention layers of a model share, and the recording of one layer."""

    def __init__(self, recording: Recording, store: PageStore, ropes: Ropes) -> None:
        self._recording, self._store, self._ropes = recording, store, ropes
        config, builder = recording.config, recording.builder
        padded, size = config.padded_head, config.head_size
        self._queries = recording.rows(config.heads * padded)
        self._keys = recording.rows(config.kv_heads * padded)
        self._values = recording.rows(config.kv_heads * padded)
        self._attended = recording.rows(config.heads * size)
        self._epsilon = builder.scalar(config.epsilon)
        architecture = recording.architecture
        self._gates = recording.rows(config.heads * size) if architecture.gated_attention else None
        cap = config.attention_cap if config.attention_cap is not None else architecture.attention_cap
        scale = architecture.scales.attention(config)
        self._cap = builder.scalar(cap)
        self._scale = builder.scalar(scale if cap else scale * _LOG2E)
        self._turned = head_order(config, architecture.rotation.pairs is RopePairs.NEIGHBOURS)
        self._plain = np.concatenate([np.arange(size), np.full(padded - size, -1)]).astype(np.int64)

    def record(self, layer: int) -> None:
        """Add attention(norm(x)) to x, or leave it aside where the feed-forward network still reads x."""
        recording, prefix = self._recording, f"blk.{layer}."
        config, architecture = recording.config, recording.architecture
        self._products(prefix)
        query_norm, key_norm = self._norms(prefix)
        turns = architecture.rotation.turns(config, layer)
        window = architecture.window(config, layer)
        query_rope, key_rope = self._ropes.of_layer(turns, window > 0)
        window, behind = self._extent(window)
        if turns and architecture.rotation.before_norms:
            if not (query_norm and key_norm):
                recording.loader.refuse_missing(f"{prefix}attn_{'k' if query_norm else 'q'}_norm.weight")
            for rows, heads, norm, rope in (
                (self._queries, config.heads, query_norm, query_rope),
                (self._keys, config.kv_heads, key_norm, key_rope),
            ):
                self._turn_then_normalise(rows, heads, norm, rope)
            query_norm = key_norm = 0
            query_rope = key_rope = NO_ROPE
        pages = self._store.addresses(layer)
        shape = (config.kv_heads, config.padded_head, config.head_size)
        recording.builder.add(
            kv_store.KERNELS[self._store.types],
            self._keys.address,
            self._values.address,
            key_norm,
            *pages,
            *shape,
            key_rope,
            self._epsilon,
            *self._store.head_bytes,
            barrier=Barrier.ALWAYS,
        )
        recording.builder.add(
            attention.attention_kernel(*self._store.types, config.group),
            self._queries.address,
            self._attended.address,
            query_norm,
            *pages,
            *shape,
            query_rope,
            self._epsilon,
            config.group,
            self._scale,
            self._cap,
            window,
            *self._store.head_bytes,
            self._sinks(prefix),
            behind,
            barrier=Barrier.ALWAYS,
        )
        self._output(prefix)

    def _extent(self, window: int) -> tuple[int, int]:
        """Tokens that a row of a layer sees up to its own (0 for all), and behind it."""
        config, architecture = self._recording.config, self._recording.architecture
        if architecture.causal if config.causal is None else config.causal:
            return window, 0
        if window and not architecture.causal:
            return window // 2 + 1, window // 2
        return window, _TO_THE_END

    def _products(self, prefix: str) -> None:
        """Queries, keys and values of the rows, from one fused tensor or from three."""
        recording, config = self._recording, self._recording.config
        counts = (config.heads, config.kv_heads, config.kv_heads)
        orders = [
            self._repeated(heads, order)
            for heads, order in zip(counts, (self._turned, self._turned, self._plain), strict=True)
        ]
        if self._gates:
            self._gated_products(prefix, self._gates, *orders)
            return
        fused = recording.loader.has(prefix + "attn_qkv.weight")
        matrices = [self._matrix(prefix, i, fused, counts, order) for i, order in enumerate(orders)]
        recording.norm_pack(attention_norm(recording, prefix), forms(*matrices))
        outputs = (self._queries, self._keys, self._values)
        for i, (matrix, rows, order) in enumerate(zip(matrices, outputs, orders, strict=True)):
            recording.product(matrix, rows, addend=(self._bias(prefix, i, counts, order), 0), last=i == len(_PARTS) - 1)

    def _gated_products(
        self, prefix: str, gates: Rows, queries: NDArray[np.int64], keys: NDArray[np.int64], values: NDArray[np.int64]
    ) -> None:
        """Likewise, where each head's queries come with gates of its output: the second half of its rows."""
        recording, config = self._recording, self._recording.config
        size, width = config.head_size, config.embedding
        name, rows = prefix + "attn_q.weight", 2 * config.heads * size
        queries = np.where(queries >= 0, queries + queries // size * size, -1)
        plain = np.arange(config.heads * size)
        matrices = (
            recording.loader.part(name, rows, width, queries),
            recording.loader.part(name, rows, width, plain + (plain // size + 1) * size),
            recording.loader.matrix(prefix + "attn_k.weight", config.kv_heads * size, width, keys),
            recording.loader.matrix(prefix + "attn_v.weight", config.kv_heads * size, width, values),
        )
        recording.norm_pack(attention_norm(recording, prefix), forms(*matrices))
        outputs = (self._queries, gates, self._keys, self._values)
        for i, (matrix, out) in enumerate(zip(matrices, outputs, strict=True)):
            recording.product(matrix, out, last=i == len(matrices) - 1)

    def _matrix(self, prefix: str, i: int, fused: bool, counts: tuple[int, ...], order: NDArray[np.int64]) -> Matrix:
        config, loader = self._recording.config, self._recording.loader
        size = config.head_size
        if not fused:
            return loader.matrix(f"{prefix}attn_{_PARTS[i]}.weight", counts[i] * size, config.embedding, order)
        order = _moved(order, sum(counts[:i]) * size)
        return loader.part(prefix + "attn_qkv.weight", sum(counts) * size, config.embedding, order)

    def _bias(self, prefix: str, i: int, counts: tuple[int, ...], order: NDArray[np.int64]) -> int:
        loader, size = self._recording.loader, self._recording.config.head_size
        name, values = f"{prefix}attn_{_PARTS[i]}.bias", counts[i] * size
        if loader.has(prefix + "attn_qkv.bias"):
            name, values, order = prefix + "attn_qkv.bias", sum(counts) * size, _moved(order, sum(counts[:i]) * size)
        return self._recording.builder.array(loader.vector(name, values, order)) if loader.has(name) else 0

    def _norms(self, prefix: str) -> tuple[int, int]:
        """Addresses of the norms of each query's and key's head, or 0. Norms of all heads together are done at once."""
        config = self._recording.config
        found = []
        for letter, rows, heads in (("q", self._queries, config.heads), ("k", self._keys, config.kv_heads)):
            name = f"{prefix}attn_{letter}_norm.weight"
            shape = self._recording.loader.shape(name)
            if shape is None:
                found.append(0)
            elif shape == (config.head_size,):
                found.append(self._vector(name, config.head_size, self._turned))
            else:
                size = heads * config.head_size
                weight = self._vector(name, size, self._repeated(heads, self._turned))
                arguments = (rows.address, rows.stride, weight, size, rows.width, self._epsilon)
                self._recording.builder.add(norms.norm_rows, *arguments, barrier=Barrier.ALWAYS)
                found.append(0)
        return found[0], found[1]

    def _turn_then_normalise(self, rows: Rows, heads: int, norm: int, rope: int) -> None:
        config = self._recording.config
        arguments = (rows.address, heads, norm, config.padded_head, config.head_size, rope, self._epsilon)
        self._recording.builder.add(norms.turn_then_normalise, *arguments, barrier=Barrier.ALWAYS)

    def _sinks(self, prefix: str) -> int:
        """Address of the scores of attention sinks in base 2, one a query head, or 0."""
        name, heads = prefix + "attn_sinks.weight", self._recording.config.heads
        if not self._recording.loader.has(name):
            return 0
        return self._recording.builder.array(self._recording.loader.vector(name, heads) * _LOG2E)

    def _output(self, prefix: str) -> None:
        recording, config = self._recording, self._recording.config
        matrix = recording.loader.matrix(
            prefix + "attn_output.weight", config.embedding, config.heads * config.head_size
        )
        if self._gates:
            kind, form = activations.GATE_SIGMOID, matrix.format.form
            recording.gate_pack(kind, self._gates, self._attended, matrix.k, form, up_stride=4 * matrix.k)
        else:
            recording.pack(self._attended, matrix.k, matrix.format.form)
        private = self._gates is None
        bias = prefix + "attn_output.bias"
        if recording.architecture.parallel:
            recording.leave_aside(matrix, bias, private=private)
        else:
            norms = recording.architecture.norms
            norm = norms.attention_sum if norms.sums else "post_attention_norm"
            recording.add_to_residual(matrix, bias, prefix + norm, private=private)

    def _vector(self, name: str, size: int, order: NDArray[np.int64]) -> int:
        return self._recording.builder.array(self._recording.loader.vector(name, size, order))

    def _repeated(self, heads: int, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """The order of a head's rows repeated for all heads."""
        firsts = np.arange(heads)[:, None] * self._recording.config.head_size
        return np.where(order >= 0, order + firsts, -1).reshape(-1)


def attention_norm(recording: Recording, prefix: str) -> str | None:
    """The tensor of the norm before a layer's attention, None where there is none."""
    norms = recording.architecture.norms
    name = prefix + "attn_norm"
    optional = not norms.first and prefix == "blk.0." and not recording.loader.has(f"{name}.weight")
    return name if norms.before and not optional else None


def _moved(order: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """An order of rows that begin at row `first` of a fused tensor."""
    return np.where(order >= 0, order + first, -1)
