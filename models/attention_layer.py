"""Records attention: queries, keys and values, their norms and rotation, KV pages, and the output projection."""

import math

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import activations, attention, kv_store, norms, sums
from cpu_kernels.records import Barrier
from models.architecture import RopePairs
from models.errors import UnsupportedModelError
from models.kv_pages import PageStore
from models.layer_sizes import Heads
from models.recording import Recording, Rows, forms
from models.rope_tables import NO_ROPE, Ropes, head_order
from models.weights import Matrix

_PARTS = ("q", "k", "v")
_LOG2E = math.log2(math.e)
_GATES = "attn_gate.weight"
_SECOND_NORM = "attn_norm_2.weight"
"""A second norm after attention: of the first norm's result plus the layer's input."""
_TO_THE_END = 1 << 40
_NO_LATENTS = (0,) * 5  # arguments of attention


class _HeadRows:
    """Buffers of queries, keys, values and attention results for heads of one kind, and the order of a head's values.

    turned: the order for queries and keys, with rotated pairs placed as kernels expect them. plain: for values.
    """

    def __init__(self, recording: Recording, heads: Heads) -> None:
        padded, size = heads.padded, heads.size
        self.heads = heads
        self.queries = recording.rows(heads.queries * padded)
        self.keys = recording.rows(heads.keys * padded)
        self.values = recording.rows(heads.keys * padded)
        self.attended = recording.rows(heads.queries * size)
        self.turned = head_order(heads, recording.architecture.rotation.pairs is RopePairs.NEIGHBOURS)
        self.plain = np.concatenate([np.arange(size), np.full(padded - size, -1)]).astype(np.int64)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Number of query, key and value heads."""
        return self.heads.queries, self.heads.keys, self.heads.keys


class AttentionLayers:
    """Buffers that attention layers of a model share, and the recording of one layer."""

    def __init__(self, recording: Recording, store: PageStore, ropes: Ropes, joined: Rows | None = None) -> None:
        """joined: rows of twice the width of x that attention reads in place of the normalised x."""
        self._recording, self._store, self._ropes = recording, store, ropes
        self._joined, self._inputs = joined, recording.config.embedding * (2 if joined else 1)
        config, builder = recording.config, recording.builder
        self._rows = {heads: _HeadRows(recording, heads) for heads in dict.fromkeys(config.layer_heads)}
        self._epsilon = builder.scalar(config.epsilon)
        architecture = recording.architecture
        self._gates = recording.rows(config.heads * config.head_size) if architecture.gated_attention else None
        self._softplus_gates: Rows | None = None
        if architecture.softplus_gates:
            self._softplus_gates = recording.rows(max(heads.queries * heads.size for heads in self._rows))
        cap = config.attention_cap if config.attention_cap is not None else architecture.attention_cap
        scale = architecture.scales.attention(config)
        self._cap = builder.scalar(cap)
        self._scale = builder.scalar(scale if cap else scale * _LOG2E)
        self._slopes: tuple[int, int] | None = None
        if architecture.alibi:
            slopes = alibi_slopes(config.heads, architecture.alibi) * _LOG2E
            self._slopes = builder.array(slopes.astype(np.float32)), builder.array(np.arange(16, dtype=np.float32))

    def record(self, layer: int) -> None:
        """Add attention(norm(x)) to x, or compute it into `aside` if the feed-forward network still reads x."""
        recording, prefix = self._recording, f"blk.{layer}."
        config, architecture = recording.config, recording.architecture
        rows, stores = self._rows[config.layer_heads[layer]], config.kv_layers[layer] == layer
        heads = rows.heads
        if architecture.norms.sums and recording.loader.has(prefix + _SECOND_NORM):
            recording.copy_aside()
        self._products(prefix, rows, stores)
        query_norm, key_norm = self._norms(prefix, rows, stores)
        turns = architecture.rotation.turns(config, layer)
        window = architecture.window(config, layer)
        query_rope, key_rope = self._ropes.of_layer(turns, window > 0)
        window, behind = self._extent(window)
        if turns and architecture.rotation.before_norms:
            if not (query_norm and key_norm):
                recording.loader.refuse_missing(f"{prefix}attn_{'k' if query_norm else 'q'}_norm.weight")
            for kind, norm, rope in (("q", query_norm, query_rope), ("k", key_norm, key_rope)):
                self._turn_then_normalise(rows, kind, norm, rope)
            query_norm = key_norm = 0
            query_rope = key_rope = NO_ROPE
        pages, strides = self._store.addresses(layer), self._store.head_bytes(layer)
        places = self._store.place_bytes(layer)
        shape = (heads.keys, heads.padded, heads.size)
        if stores:
            recording.builder.add(
                kv_store.KERNELS[self._store.types],
                rows.keys.address,
                rows.values.address,
                key_norm,
                *pages,
                *shape,
                key_rope,
                self._epsilon,
                *strides,
                *places,
                barrier=Barrier.ALWAYS,
            )
        recording.builder.add(
            attention.attention_kernel(*self._store.types, heads.group),
            rows.queries.address,
            rows.attended.address,
            query_norm,
            *pages,
            *shape,
            query_rope,
            self._epsilon,
            heads.group,
            self._scale,
            self._cap,
            window,
            *strides,
            self._sinks(prefix, heads.queries),
            behind,
            *places,
            config.longest_head,
            *(() if self._slopes is None else (*_NO_LATENTS, *self._slopes)),
            barrier=Barrier.ALWAYS,
        )
        self._output(prefix, rows)

    def _extent(self, window: int) -> tuple[int, int]:
        """How many tokens a row sees up to and including its own (0 for all), and how many behind it."""
        config, architecture = self._recording.config, self._recording.architecture
        if architecture.causal if config.causal is None else config.causal:
            return window, 0
        if window and not architecture.causal:
            return window // 2 + 1, window // 2
        return window, _TO_THE_END

    def _products(self, prefix: str, rows: _HeadRows, stores: bool) -> None:
        """Compute queries, keys and values, from one fused tensor or from three.

        stores: whether the layer stores its own keys and values; if not, weights for them in the file are not used.
        """
        recording, counts = self._recording, rows.counts
        orders = [
            _repeated(count, rows.heads.size, order)
            for count, order in zip(counts, (rows.turned, rows.turned, rows.plain), strict=True)
        ]
        if not stores:
            orders = orders[:1]
            unused = ("attn_k.weight", "attn_v.weight", "attn_k.bias", "attn_v.bias", "attn_k_norm.weight")
            recording.loader.leave_out(*(prefix + name for name in unused))
        if self._gates:
            self._gated_products(prefix, self._gates, rows, *orders)
            return
        fused = recording.loader.has(prefix + "attn_qkv.weight")
        matrices = [self._matrix(prefix, i, fused, rows, order) for i, order in enumerate(orders)]
        gates = self._gate_matrix(prefix, rows.heads)
        if self._joined:
            recording.pack(self._joined, self._inputs, forms(*matrices), stride=self._joined.stride)
        else:
            recording.norm_pack(attention_norm(recording, prefix), forms(*matrices, *gates))
        for matrix in gates:
            assert self._softplus_gates is not None
            recording.product(matrix, self._softplus_gates, last=False)
        outputs = (rows.queries, rows.keys, rows.values)[: len(orders)]
        for i, (matrix, out, order) in enumerate(zip(matrices, outputs, orders, strict=True)):
            addend = (self._bias(prefix, i, rows, order), 0)
            recording.product(matrix, out, addend=addend, last=i == len(orders) - 1)
        if stores and recording.architecture.value_norms:
            self._normalise_values(rows)

    def _gated_products(
        self,
        prefix: str,
        gates: Rows,
        rows: _HeadRows,
        queries: NDArray[np.int64],
        keys: NDArray[np.int64],
        values: NDArray[np.int64],
    ) -> None:
        """Like `_products`, if the second half of each query head's rows are gates of the head's output."""
        recording, heads, width = self._recording, rows.heads, self._recording.config.embedding
        size = heads.size
        name, count = prefix + "attn_q.weight", 2 * heads.queries * size
        queries = np.where(queries >= 0, queries + queries // size * size, -1)
        plain = np.arange(heads.queries * size)
        matrices = (
            recording.loader.part(name, count, width, queries),
            recording.loader.part(name, count, width, plain + (plain // size + 1) * size),
            recording.loader.matrix(prefix + "attn_k.weight", heads.keys * size, width, keys),
            recording.loader.matrix(prefix + "attn_v.weight", heads.keys * size, width, values),
        )
        recording.norm_pack(attention_norm(recording, prefix), forms(*matrices))
        outputs = (rows.queries, gates, rows.keys, rows.values)
        for i, (matrix, out) in enumerate(zip(matrices, outputs, strict=True)):
            recording.product(matrix, out, last=i == len(matrices) - 1)

    def _matrix(self, prefix: str, i: int, fused: bool, rows: _HeadRows, order: NDArray[np.int64]) -> Matrix:
        loader = self._recording.loader
        counts, size = rows.counts, rows.heads.size
        if fused:
            order = _moved(order, sum(counts[:i]) * size)
            return loader.part(prefix + "attn_qkv.weight", sum(counts) * size, self._inputs, order)
        name = f"{prefix}attn_{_PARTS[i]}.weight"
        if i == _PARTS.index("v") and self._recording.architecture.value_norms and not loader.has(name):
            name = prefix + "attn_k.weight"  # one tensor for both keys and values
        return loader.matrix(name, counts[i] * size, self._inputs, order)

    def _gate_matrix(self, prefix: str, heads: Heads) -> list[Matrix]:
        """The matrix of softplus gates, one gate per head or per value; empty if the architecture has none.

        Raises UnsupportedModelError for any other number of gates.
        """
        if self._softplus_gates is None:
            return []
        loader, width = self._recording.loader, self._recording.config.embedding
        name, values = prefix + _GATES, heads.queries * heads.size
        of_values = loader.has(name) and loader.rows(name) == values
        return [loader.matrix(name, values if of_values else heads.queries, width)]

    def _apply_gates(self, prefix: str, rows: _HeadRows) -> None:
        values, gates = rows.heads.queries * rows.heads.size, self._softplus_gates
        if gates is not None:
            count = self._recording.loader.rows(prefix + _GATES)
            arguments = (rows.attended.address, 4 * values, gates.address, gates.stride, count, values // count)
            self._recording.builder.add(sums.scale_by_gates, *arguments, barrier=Barrier.ALWAYS)

    def _normalise_values(self, rows: _HeadRows) -> None:
        """Normalise value heads. No barrier: threads divide the heads here as they do when storing them."""
        heads, builder = rows.heads, self._recording.builder
        weight = np.zeros(heads.padded, np.float32)
        weight[: heads.size] = 1.0
        arguments = (rows.values.address, heads.keys, builder.array(weight), heads.padded, heads.size, self._epsilon)
        builder.add(norms.norm_heads, *arguments, barrier=Barrier.NEVER)

    def _bias(self, prefix: str, i: int, rows: _HeadRows, order: NDArray[np.int64]) -> int:
        loader, counts, size = self._recording.loader, rows.counts, rows.heads.size
        name, values = f"{prefix}attn_{_PARTS[i]}.bias", counts[i] * size
        if loader.has(prefix + "attn_qkv.bias"):
            name, values, order = prefix + "attn_qkv.bias", sum(counts) * size, _moved(order, sum(counts[:i]) * size)
        return self._recording.builder.array(loader.vector(name, values, order)) if loader.has(name) else 0

    def _norms(self, prefix: str, rows: _HeadRows, stores: bool) -> tuple[int, int]:
        """Addresses of the per-head norms of queries and keys, or 0. Norms over all heads are recorded here instead."""
        found = [0, 0]
        parts = (("q", rows.queries, rows.heads.queries), ("k", rows.keys, rows.heads.keys))
        for i, (letter, values, heads) in enumerate(parts[: 2 if stores else 1]):
            name, size = f"{prefix}attn_{letter}_norm.weight", rows.heads.size
            if not self._recording.loader.has(name):
                continue
            if self._recording.loader.shape(name) == (size,):
                found[i] = self._vector(name, size, rows.turned)
            else:
                self._normalise_all(f"{prefix}attn_{letter}_norm", values, rows, heads)
        return found[0], found[1]

    def _normalise_all(self, norm: str, values: Rows, rows: _HeadRows, heads: int) -> None:
        """Normalise all heads of a row together, with LayerNorm if the architecture's other norms are LayerNorm."""
        recording, size = self._recording, rows.heads.size
        order, count, bias = _repeated(heads, size, rows.turned), heads * size, f"{norm}.bias"
        weight = self._vector(f"{norm}.weight", count, order)
        if not recording.architecture.norms.layer_norm:
            arguments = (values.address, values.stride, weight, count, values.width, self._epsilon)
            recording.builder.add(norms.norm_rows, *arguments, barrier=Barrier.ALWAYS)
            return
        if rows.heads.padded != size:
            raise UnsupportedModelError(
                f"{norm}.weight normalises all heads together. The native engine supports that only for head sizes "
                f"that are multiples of 32, and this one is {size}. Use --backend llama."
            )
        addend = self._vector(bias, count, order) if recording.loader.has(bias) else 0
        of_norm = (0, 0, 0, weight, addend, count, self._epsilon)
        recording.builder.add(norms.add_norm, values.address, values.stride, *of_norm, barrier=Barrier.ALWAYS)

    def _turn_then_normalise(self, rows: _HeadRows, kind: str, norm: int, rope: int) -> None:
        heads = rows.heads
        values, count = (rows.queries, heads.queries) if kind == "q" else (rows.keys, heads.keys)
        arguments = (values.address, count, norm, heads.padded, heads.size, rope, self._epsilon)
        self._recording.builder.add(norms.turn_then_normalise, *arguments, barrier=Barrier.ALWAYS)

    def _sinks(self, prefix: str, heads: int) -> int:
        """Address of the attention sinks' scores in base 2, one per query head, or 0 if the file has none."""
        name = prefix + "attn_sinks.weight"
        if not self._recording.loader.has(name):
            return 0
        return self._recording.builder.array(self._recording.loader.vector(name, heads) * _LOG2E)

    def _output(self, prefix: str, rows: _HeadRows) -> None:
        recording, heads = self._recording, rows.heads
        name, width = prefix + "attn_output.weight", recording.config.embedding
        matrix = recording.loader.matrix(name, width, heads.queries * heads.size)
        if self._gates:
            kind, form = activations.GATE_SIGMOID, matrix.format.form
            recording.gate_pack(kind, self._gates, rows.attended.address, matrix.k, form, up_stride=4 * matrix.k)
        else:
            self._apply_gates(prefix, rows)
            recording.pack(rows.attended, matrix.k, matrix.format.form, stride=4 * matrix.k)
        private = self._gates is None
        bias = prefix + "attn_output.bias"
        if recording.architecture.parallel:
            recording.leave_aside(matrix, bias, private=private)
        else:
            norms = recording.architecture.norms
            norm = norms.attention_sum if norms.sums else "post_attention_norm"
            recording.add_to_residual(matrix, bias, prefix + norm, private=private)
            if norms.sums and recording.loader.has(prefix + _SECOND_NORM):
                aside = recording.aside
                recording.add_and_norm(aside.address, aside.stride, prefix + _SECOND_NORM.removesuffix(".weight"))

    def _vector(self, name: str, size: int, order: NDArray[np.int64]) -> int:
        return self._recording.builder.array(self._recording.loader.vector(name, size, order))


def alibi_slopes(heads: int, exponent: float) -> NDArray[np.float64]:
    """ALiBi slopes, float64[heads]: what a head's scores lose per token of distance (Press et al., 2022).

    Slopes are powers of two down to 2^-exponent. If the number of heads is not a power of two, the heads beyond the
    largest power of two take every other slope of a series twice as long.
    """
    whole = 1 << heads.bit_length() - 1
    first = -exponent / whole * np.arange(1, whole + 1)
    others = -exponent / (2 * whole) * np.arange(1, 2 * (heads - whole), 2)
    return np.asarray(2.0 ** np.concatenate([first, others]))


def attention_norm(recording: Recording, prefix: str) -> str | None:
    """The tensor of the norm before a layer's attention, None if there is none."""
    norms = recording.architecture.norms
    name = prefix + "attn_norm"
    optional = not norms.first and prefix == "blk.0." and not recording.loader.has(f"{name}.weight")
    return name if norms.before and not optional else None


def _moved(order: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """The order for rows that begin at row `first` of a fused tensor."""
    return np.where(order >= 0, order + first, -1)


def _repeated(heads: int, size: int, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order of one head's rows, repeated for all heads."""
    firsts = np.arange(heads)[:, None] * size
    return np.where(order >= 0, order + firsts, -1).reshape(-1)
