"""Records attention: queries, keys and values, their norms and rotation, KV pages, and the output projection."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import activations, attention, kv_store, norms, sums
from models.errors import UnsupportedModelError
from models.kv_pages import PageStore
from models.layers.rope import NO_ROPE, Ropes, pair_order
from models.recording import NOTHING, Place, Recording, Rows
from models.sizes.attention import Heads
from models.weights import Matrix, filled, padded, repeated

_LOG2E = math.log2(math.e)
_GATES = "attn_gate.weight"
_SECOND_NORM = "attn_norm_2"
"""A second norm after attention: of the first norm's result plus the layer's input."""
_TO_THE_END = 1 << 40


@dataclass(frozen=True)
class _Part:
    """A part of the projection of a layer's input: queries, their gates, keys or values.

    letter: of its tensor. rows: what it is computed into. first, count: its first row in a fused tensor, and the rows
    of its own tensor. order: the source of each packed row in the latter, -1 for zeros.
    """

    letter: str
    rows: Rows
    first: int
    count: int
    order: NDArray[np.int64]


class _HeadRows:
    """Buffers of queries, keys, values and attention results for heads of one kind, and how they are projected.

    turned: the order of a query's or key's values, with rotated pairs placed as kernels expect them. total: rows of a
    fused tensor. gates: for gates that follow each query head in its tensor, None if there are none.
    """

    def __init__(self, recording: Recording, heads: Heads, gates: Rows | None) -> None:
        padded, size = heads.padded, heads.size
        self.heads = heads
        self.queries = recording.rows(heads.queries * padded)
        self.keys = recording.rows(heads.keys * padded)
        self.values = recording.rows(heads.keys * padded)
        self.attended = recording.rows(heads.queries * size)
        self.turned = pair_order(size, padded, heads.rope_size, recording.architecture.rotation.pairs)
        apart = 2 * size if gates else size
        queries, keys = heads.queries * apart, heads.keys * size
        of_queries, of_keys = np.arange(0, queries, apart), np.arange(0, keys, size)
        self.total = queries + 2 * keys
        self.parts = [
            _Part("q", self.queries, 0, queries, repeated(self.turned, of_queries)),
            _Part("k", self.keys, queries, keys, repeated(self.turned, of_keys)),
            _Part("v", self.values, queries + keys, keys, repeated(filled(size, padded), of_keys)),
        ]
        if gates:
            self.parts.insert(1, _Part("q", gates, 0, queries, repeated(np.arange(size) + size, of_queries)))


class AttentionLayers:
    """Buffers that attention layers of a model share, and the recording of one layer."""

    def __init__(self, recording: Recording, store: PageStore, ropes: Ropes, joined: Rows | None = None) -> None:
        """joined: rows of twice the width of x that attention reads in place of the normalised x."""
        self._recording, self._store, self._ropes = recording, store, ropes
        self._joined, self._inputs = joined, recording.config.embedding * (2 if joined else 1)
        config, builder, architecture = recording.config, recording.builder, recording.architecture
        sizes = config.attention
        self._gates: Rows | None = None
        if architecture.attention.gated or architecture.attention.softplus_gates:
            self._gates = recording.rows(max(heads.queries * heads.size for heads in sizes.layer_heads))
        among = self._gates if architecture.attention.gated else None
        self._rows = {heads: _HeadRows(recording, heads, among) for heads in dict.fromkeys(sizes.layer_heads)}
        cap = sizes.cap if sizes.cap is not None else architecture.attention.cap
        scale = architecture.scales.attention(config)
        self._cap = builder.scalar(cap)
        self._scale = builder.scalar(scale if cap else scale * _LOG2E)
        self._alibi = attention.Alibi()
        if architecture.attention.alibi:
            slopes = alibi_slopes(config.attention.usual.queries, architecture.attention.alibi) * _LOG2E
            arrays = slopes.astype(np.float32), np.arange(16, dtype=np.float32)
            self._alibi = attention.Alibi(slopes=builder.array(arrays[0]), numbers=builder.array(arrays[1]))

    def record(self, layer: int) -> None:
        """Add attention(norm(x)) to x, or compute it into `aside` if the feed-forward network still reads x."""
        recording, prefix = self._recording, f"blk.{layer}."
        config, architecture = recording.config, recording.architecture
        rows, stores = self._rows[config.attention.layer_heads[layer]], config.attention.kv_layers[layer] == layer
        heads = rows.heads
        if architecture.norms.sums and recording.loader.has(f"{prefix}{_SECOND_NORM}.weight"):
            recording.copy_x(recording.aside.place)
        self._products(prefix, rows, stores)
        if architecture.attention.plain_head_norms(config, layer):
            query_norm = key_norm = self._plain_norm(heads)
        else:
            query_norm, key_norm = self._norms(prefix, rows, stores)
        turns = architecture.rotation.turns(config, layer)
        window = architecture.attention.window(config, layer)
        query_rope, key_rope = self._ropes.of_layer(turns, window > 0)
        if turns and architecture.rotation.before_norms:
            if not (query_norm and key_norm):
                recording.loader.refuse_missing(f"{prefix}attn_{'k' if query_norm else 'q'}_norm.weight")
            of_queries, of_keys = (rows.queries.address, heads.queries), (rows.keys.address, heads.keys)
            for values, norm, rope in ((of_queries, query_norm, query_rope), (of_keys, key_norm, key_rope)):
                arguments = norms.TurnThenNormalise(
                    x=values[0],
                    heads=values[1],
                    weight=norm,
                    padded=heads.padded,
                    size=heads.size,
                    rope=rope,
                    epsilon=recording.plain_epsilon,
                )
                recording.add(norms.turn_then_normalise, arguments)
            query_norm = key_norm = 0
            query_rope = key_rope = NO_ROPE
        pages = self._store.of_layer(layer)
        if stores:
            recording.add(
                kv_store.KERNELS[self._store.types],
                kv_store.StoreKV(
                    keys=rows.keys.address,
                    values=rows.values.address,
                    norm=key_norm,
                    pages=pages,
                    kv_heads=heads.keys,
                    padded=heads.padded,
                    size=heads.size,
                    rope=key_rope,
                    epsilon=recording.plain_epsilon,
                ),
            )
        recording.add(
            attention.attention_kernel(*self._store.types, heads.group),
            attention.Attention(
                queries=rows.queries.address,
                out=rows.attended.address,
                query_norm=query_norm,
                pages=pages,
                kv_heads=heads.keys,
                group=heads.group,
                padded=heads.padded,
                size=heads.size,
                rope=query_rope,
                epsilon=recording.plain_epsilon,
                scale=self._scale,
                cap=self._cap,
                mask=self._mask(window),
                sinks=self._sinks(prefix, heads.queries),
                longest=config.longest_head,
                alibi=self._alibi,
            ),
        )
        self._output(prefix, rows)

    def _mask(self, window: int) -> attention.Mask:
        """The tokens that a row of a layer sees. window: the layer's, 0 for none."""
        config, architecture = self._recording.config, self._recording.architecture
        if architecture.attention.causal if config.attention.causal is None else config.attention.causal:
            extent, behind = -window if architecture.attention.chunked else window, 0
        elif window and not architecture.attention.causal:
            extent, behind = window // 2 + 1, window // 2
        else:
            extent, behind = window, _TO_THE_END
        return attention.Mask(
            window=extent, behind=behind, images=int(extent > 0 or not architecture.attention.images_in_windows)
        )

    def _products(self, prefix: str, rows: _HeadRows, stores: bool) -> None:
        """Compute queries, keys and values, from one fused tensor or from three.

        stores: whether the layer stores its own keys and values; if not, weights for them in the file are not used.
        """
        recording, parts = self._recording, rows.parts
        if not stores:
            parts = [part for part in parts if part.letter == "q"]
            unused = ("attn_k.weight", "attn_v.weight", "attn_k.bias", "attn_v.bias", "attn_k_norm.weight")
            recording.loader.leave_out(*(prefix + name for name in unused))
        products = [(*self._projection(prefix, part, rows), part.rows) for part in parts]
        if recording.architecture.attention.softplus_gates and self._gates:
            products.insert(0, (self._gate_matrix(prefix, rows.heads), NOTHING, self._gates))
        matrices, _, _ = zip(*products, strict=True)
        if self._joined:
            recording.pack(self._joined.place, *matrices)
        else:
            recording.norm_pack(attention_norm(recording, prefix), *matrices)
        for i, (matrix, bias, out) in enumerate(products, 1):
            recording.product(matrix, out.place, addend=bias, last=i == len(products))
        if stores and recording.architecture.attention.value_norms:
            self._normalise_values(rows)

    def _source(self, prefix: str, part: _Part, kind: str, rows: _HeadRows) -> tuple[str, int, NDArray[np.int64]]:
        """The tensor, fused or not, of a part's matrix or bias, its rows, and the source of each packed row."""
        fused = f"{prefix}attn_qkv.{kind}"
        if self._recording.loader.has(fused):
            return fused, rows.total, np.where(part.order >= 0, part.order + part.first, -1)
        return f"{prefix}attn_{part.letter}.{kind}", part.count, part.order

    def _projection(self, prefix: str, part: _Part, rows: _HeadRows) -> tuple[Matrix, Place]:
        """A part's matrix and bias."""
        recording, loader = self._recording, self._recording.loader
        name, count, order = self._source(prefix, part, "weight", rows)
        if part.letter == "v" and recording.architecture.attention.value_norms and not loader.has(name):
            name = prefix + "attn_k.weight"  # one tensor for both keys and values
        matrix = loader.matrix(name, count, self._inputs, order)
        name, count, order = self._source(prefix, part, "bias", rows)
        return matrix, Place(recording.vector(name, count, order), 0) if loader.has(name) else NOTHING

    def _gate_matrix(self, prefix: str, heads: Heads) -> Matrix:
        """The matrix of softplus gates, one gate per head or per value.

        Raises UnsupportedModelError for any other number of gates.
        """
        loader, width = self._recording.loader, self._recording.config.embedding
        name, values = prefix + _GATES, heads.queries * heads.size
        of_values = loader.has(name) and loader.rows(name) == values
        return loader.matrix(name, values if of_values else heads.queries, width)

    def _apply_softplus_gates(self, prefix: str, rows: _HeadRows, gates: Rows) -> None:
        values, count = rows.heads.queries * rows.heads.size, self._recording.loader.rows(prefix + _GATES)
        arguments = sums.ScaleByGates(
            x=rows.attended.address,
            x_stride=4 * values,
            gates=gates.address,
            gates_stride=gates.stride,
            count=count,
            size=values // count,
        )
        self._recording.add(sums.scale_by_gates, arguments)

    def _plain_norm(self, heads: Heads) -> int:
        """Address of the weights of a head's norm without weights: ones."""
        return self._recording.builder.array(np.ones(heads.padded, np.float32))

    def _normalise_values(self, rows: _HeadRows) -> None:
        """Normalise value heads."""
        heads, recording = rows.heads, self._recording
        arguments = norms.NormHeads(
            x=rows.values.address,
            heads=heads.keys,
            weight=self._plain_norm(heads),
            padded=heads.padded,
            size=heads.size,
            epsilon=recording.plain_epsilon,
        )
        recording.add(norms.norm_heads, arguments)

    def _norms(self, prefix: str, rows: _HeadRows, stores: bool) -> tuple[int, int]:
        """Addresses of the per-head norms of queries and keys, or 0. Norms over all heads are recorded here instead."""
        found = [0, 0]
        parts = (("q", rows.queries, rows.heads.queries), ("k", rows.keys, rows.heads.keys))
        for i, (letter, values, heads) in enumerate(parts[: 2 if stores else 1]):
            name, size = f"{prefix}attn_{letter}_norm.weight", rows.heads.size
            if not self._recording.loader.has(name):
                continue
            if self._recording.loader.shape(name) == (size,):
                found[i] = self._recording.vector(name, size, rows.turned)
            else:
                self._normalise_all(f"{prefix}attn_{letter}_norm", values, rows, heads)
        return found[0], found[1]

    def _normalise_all(self, norm: str, values: Rows, rows: _HeadRows, heads: int) -> None:
        """Normalise all heads of a row together, with LayerNorm if the architecture's other norms are LayerNorm."""
        recording, size = self._recording, rows.heads.size
        order, count, bias = repeated(rows.turned, np.arange(heads) * size), heads * size, f"{norm}.bias"
        weight = recording.vector(f"{norm}.weight", count, order)
        if not recording.architecture.norms.layer_norm:
            arguments = norms.NormRows(
                x=values.address,
                stride=values.stride,
                weight=weight,
                size=count,
                padded=values.width,
                epsilon=recording.plain_epsilon,
            )
            recording.add(norms.norm_rows, arguments)
            return
        if rows.heads.padded != size:
            raise UnsupportedModelError(
                f"{norm}.weight normalises all heads together. The native engine supports that only for head sizes "
                f"that are multiples of 32, and this one is {size}.",
                remedy="Use --backend llama.",
            )
        addend = recording.vector(bias, count, order) if recording.loader.has(bias) else 0
        layer_norm = norms.AddNorm(
            x=values.address,
            x_stride=values.stride,
            y=0,
            y_stride=0,
            weight=weight,
            bias=addend,
            size=count,
            epsilon=recording.plain_epsilon,
        )
        recording.add(norms.add_norm, layer_norm)

    def _sinks(self, prefix: str, heads: int) -> int:
        """Address of the attention sinks' scores in base 2, one per query head, or 0 if the file has none."""
        name = prefix + "attn_sinks.weight"
        if not self._recording.loader.has(name):
            return 0
        read = self._recording.loader.vector(name, heads)
        return self._recording.later((padded(heads),), lambda: read() * _LOG2E)

    def _output(self, prefix: str, rows: _HeadRows) -> None:
        recording, heads = self._recording, rows.heads
        name, width = prefix + "attn_output.weight", recording.config.embedding
        matrix = recording.loader.matrix(name, width, heads.queries * heads.size)
        among = recording.architecture.attention.gated  # the gates, among the queries
        if self._gates and among:
            kind, attended = activations.GATE_SIGMOID, rows.attended.address
            recording.gate_pack(kind, self._gates, attended, matrix, up_stride=4 * matrix.k)
        else:
            if self._gates:
                self._apply_softplus_gates(prefix, rows, self._gates)
            recording.pack(Place(rows.attended.address, 4 * matrix.k), matrix)
        bias = prefix + "attn_output.bias"
        if recording.architecture.parallel:
            recording.leave_aside(matrix, bias, private=not among)
        else:
            norms = recording.architecture.norms
            norm = norms.attention_sum if norms.sums else "post_attention_norm"
            recording.add_to_residual(matrix, bias, prefix + norm, private=not among)
            if norms.sums and recording.loader.has(f"{prefix}{_SECOND_NORM}.weight"):
                recording.add_and_norm(recording.aside.place, prefix + _SECOND_NORM)


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
