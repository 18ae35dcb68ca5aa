"""Records attention on latents (DeepSeek 2): one stored row per token, which all heads share.

The matrices that would make a head's keys and values from a latent are absorbed: queries are multiplied by the key
matrix before attention, and attention's output by the value matrix. So a token's keys and values are never computed,
and a row's result is the same whether it is part of a prompt or decoded.
"""

import math

import numpy as np

from cpu_kernels import attention, latents, lora
from cpu_kernels.records import TILE_WIDTHS, Barrier
from models.errors import UnsupportedModelError
from models.kv_pages import PageStore
from models.layers.rope import Ropes, pair_order
from models.recording import Recording, Rows, packed_activations
from models.weights import Matrix, filled, padded, repeated

_LOG2E = math.log2(math.e)


class LatentLayers:
    """Buffers that all attention layers of a model share, and the recording of one layer."""

    def __init__(self, recording: Recording, store: PageStore, ropes: Ropes) -> None:
        """Raises UnsupportedModelError for features that no known model combines with latents."""
        config, builder, stated = recording.config, recording.builder, recording.config.attention
        assert stated.latents is not None
        if config.rope.query_growth or stated.cap or config.factors.attention or stated.causal is False:
            raise UnsupportedModelError(
                f"The native engine does not support an attention scale, a soft cap, growing queries or rows that see "
                f"all of their text in models of the architecture {config.architecture}.",
                remedy="The llama.cpp backend may: use --backend llama.",
            )
        self._recording, self._store, self._ropes, self._sizes = recording, store, ropes, stated.latents
        sizes, heads = self._sizes, stated.usual.queries
        self._heads, self._head = heads, stated.layer_heads[0]  # the same in all layers
        turned = pair_order(sizes.turned, self._head.padded_turned, sizes.turned, recording.architecture.rotation.pairs)
        self._query_order, self._latent_order = (
            np.concatenate([filled(plain, padded(plain)), np.where(turned >= 0, turned + plain, -1)])
            for plain in (sizes.plain, sizes.rank)
        )
        self._query_ranks = recording.rows(sizes.query_rank) if sizes.query_rank else None
        self._queries = recording.rows(heads * len(self._query_order))
        self._latents = recording.rows(len(self._latent_order))
        self._attended = recording.rows(heads * sizes.rank)
        slots = heads * (recording.max_rows + max(TILE_WIDTHS))
        self._keyed, self._values = Rows(builder, slots, sizes.rank), Rows(builder, slots, sizes.value)
        self._packed = packed_activations(builder, slots, max(sizes.plain, sizes.rank), 0)
        self._segments = builder.buffer(3 * heads + 1, np.int64)
        recording.matrices_of_row[self._segments] = heads
        self._changes = 0
        if recording.adapters and recording.adapters.changes_heads:
            self._changes = recording.adapters.table_of_slots(recording.max_rows, heads, heads)
        self._scale = builder.scalar(recording.architecture.scales.attention(config) * _LOG2E)
        self._no_cap = builder.scalar(0.0)

    def record(self, layer: int) -> None:
        """Add attention(norm(x)) to x."""
        recording, sizes, prefix = self._recording, self._sizes, f"blk.{layer}."
        config = recording.config
        keys, values = self._head_matrices(prefix)
        self._products(prefix)
        turns = recording.architecture.rotation.turns(config, layer)
        query_rope, key_rope = self._ropes.of_layer(turns, windowed=False)
        pages = self._store.of_layer(layer)
        padded_head, turned, head_bytes = self._head.padded, self._head.padded_turned, 4 * len(self._query_order)
        recording.add(
            latents.STORE[self._store.types[0]],
            latents.StoreLatents(
                rows=self._latents.address,
                stride=self._latents.stride,
                norm=recording.vector(prefix + "attn_kv_a_norm.weight", sizes.rank),
                pages=pages.keys.first,
                rank=sizes.rank,
                padded=padded_head,
                turned=turned,
                rope=key_rope,
                epsilon=recording.plain_epsilon,
            ),
            barrier=Barrier.NEVER,
        )
        if self._changes:
            heads = lora.TileHeads(table=self._changes, heads=self._heads)
            recording.add(lora.tile_heads, heads, barrier=Barrier.NEVER)  # which packing slots does not touch
        self._multiply_heads(self._queries, self._queries.stride, head_bytes, keys, self._keyed)
        recording.add(
            attention.attention_kernel(self._store.types[0], None, self._heads),
            attention.Attention(
                queries=self._queries.address,
                out=self._attended.address,
                pages=pages,
                kv_heads=1,
                group=self._heads,
                padded=padded_head,
                size=sizes.rank,
                rope=query_rope,
                epsilon=recording.plain_epsilon,
                scale=self._scale,
                cap=self._no_cap,
                mask=attention.Mask(window=recording.architecture.attention.window(config, layer)),
                longest=config.longest_head,
                latents=attention.LatentQueries(
                    parts=self._keyed.address,
                    slot_stride=self._keyed.stride,
                    head_bytes=head_bytes,
                    turned_offset=4 * padded(sizes.plain),
                    turned=turned,
                ),
            ),
        )
        self._multiply_heads(self._attended, 4 * sizes.rank * self._heads, 4 * sizes.rank, values, self._values)
        self._output(prefix)

    def _products(self, prefix: str) -> None:
        """Record the products for queries, low-rank if the file has that, and for latents with the RoPE part."""
        recording, sizes, loader = self._recording, self._sizes, self._recording.loader
        config = recording.config
        width, rows = config.embedding, sizes.plain + sizes.turned
        order = repeated(self._query_order, np.arange(self._heads) * rows)
        stored = loader.matrix(prefix + "attn_kv_a_mqa.weight", sizes.stored, width, self._latent_order)
        if self._query_ranks is None:
            matrix, out = (
                loader.matrix(prefix + "attn_q.weight", self._heads * rows, width, order),
                self._queries,
            )
        else:
            matrix, out = loader.matrix(prefix + "attn_q_a.weight", sizes.query_rank, width), self._query_ranks
        recording.norm_pack(prefix + "attn_norm", stored, matrix)
        recording.product(stored, self._latents.place, last=False)
        recording.product(matrix, out.place, last=True)
        if self._query_ranks is None:
            return
        matrix = loader.matrix(prefix + "attn_q_b.weight", self._heads * rows, sizes.query_rank, order)
        recording.pack(out.place, matrix, weight=recording.vector(prefix + "attn_q_a_norm.weight", sizes.query_rank))
        recording.product(matrix, self._queries.place, last=True)

    def _head_matrices(self, prefix: str) -> tuple[Matrix, Matrix]:
        """For each head the matrix from its query to one for latents, and the matrix from a latent to its value."""
        loader, sizes, heads = self._recording.loader, self._sizes, self._heads
        if loader.has(prefix + "attn_k_b.weight"):
            return (
                loader.matrix(prefix + "attn_k_b.weight", sizes.rank, sizes.plain, experts=heads),
                loader.matrix(prefix + "attn_v_b.weight", sizes.value, sizes.rank, experts=heads),
            )
        name, rows = prefix + "attn_kv_b.weight", sizes.plain + sizes.value
        return (
            loader.transposed_heads_of(name, heads, rows, sizes.rank, sizes.plain),
            loader.heads_of(name, heads, rows, sizes.rank, np.arange(sizes.plain, rows)),
        )

    def _multiply_heads(self, rows: Rows, stride: int, head_bytes: int, matrix: Matrix, out: Rows) -> None:
        """Slots of `out` = each head's matrix times its part of the rows, with strides of `stride` and `head_bytes`."""
        recording, heads = self._recording, self._heads
        arguments = latents.SplitHeads(
            rows=rows.address,
            stride=stride,
            head_stride=head_bytes,
            k=matrix.k,
            forms=matrix.format.form,
            packed=self._packed,
            heads=heads,
            segments=self._segments,
        )
        recording.add(latents.split_heads, arguments)
        recording.products_of_slots(matrix, out, self._packed, self._segments, table=self._changes)

    def _output(self, prefix: str) -> None:
        recording, config, sizes = self._recording, self._recording.config, self._sizes
        matrix = recording.loader.matrix(prefix + "attn_output.weight", config.embedding, self._heads * sizes.value)
        arguments = latents.JoinHeads(
            slots=self._values.address,
            stride=self._values.stride,
            heads=self._heads,
            size=sizes.value,
            forms=matrix.format.form,
            packed=recording.packed,
        )
        recording.add(latents.join_heads, arguments, barrier=Barrier.MANY_ROWS)
        recording.add_to_residual(matrix, prefix + "attn_output.bias", prefix + "post_attention_norm", private=True)
