"""Records the forward pass of a decoder as a program: the one place where an architecture becomes operations."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import activations, attention, kv_store
from cpu_kernels.loader import release_linker
from cpu_kernels.program import ProgramBuilder
from cpu_kernels.records import Barrier, Form, Stage
from models.architecture import Architecture, Gate, RopePairs
from models.buffers import Rows, packed_activations
from models.config import ModelConfig
from models.expert_layer import ExpertLayer
from models.kv_pages import PageStore
from models.rope_tables import head_order
from models.weights import Matrix, WeightLoader

GLOBAL_ROPE, LOCAL_ROPE = 0, 1


@dataclass(frozen=True)
class LogitsOperations:
    """Where a program's logits go: operations to change when their buffer grows, and the padded length of a row."""

    product: int
    cap: int | None
    width: int


class DecoderRecorder:
    """Loads a decoder's weights layer by layer and records the operations that use them."""

    def __init__(
        self,
        builder: ProgramBuilder,
        loader: WeightLoader,
        config: ModelConfig,
        architecture: Architecture,
        store: PageStore,
        max_rows: int,
        threads: int,
    ) -> None:
        self._builder, self._loader, self._config, self._architecture = builder, loader, config, architecture
        self._store = store
        self._max_rows, self._threads = max_rows, threads
        heads = config.heads * config.head_size
        self._x = Rows(builder, max_rows, config.embedding)
        self._queries = Rows(builder, max_rows, config.heads * config.padded_head)
        self._keys = Rows(builder, max_rows, config.kv_heads * config.padded_head)
        self._values = Rows(builder, max_rows, config.kv_heads * config.padded_head)
        self._attended = Rows(builder, max_rows, heads)
        self._gate = Rows(builder, max_rows, config.feed_forward)
        self._up = Rows(builder, max_rows, config.feed_forward)
        self._sublayer = Rows(builder, max_rows, config.embedding)
        longest = max(config.embedding, heads, config.feed_forward)
        self._packed = packed_activations(builder, max_rows, longest, threads)
        self._epsilon = builder.scalar(config.epsilon)
        cap = config.attention_cap if config.attention_cap is not None else architecture.attention_cap
        scale = architecture.attention_scale(config)
        self._attention_cap = builder.scalar(cap)
        self._attention_scale = builder.scalar(scale if cap else scale * math.log2(math.e))
        self._turned = head_order(config, architecture.rope_pairs is RopePairs.NEIGHBOURS)
        self._plain = np.concatenate(
            [np.arange(config.head_size), np.full(config.padded_head - config.head_size, -1)]
        ).astype(np.int64)
        self._experts = (
            ExpertLayer(builder, loader, config, architecture, max_rows, threads) if config.experts else None
        )

    def record(self) -> LogitsOperations:
        """Record the whole pass, from tokens to logits of the wanted rows."""
        config = self._config
        table = self._loader.matrix("token_embd.weight", config.vocabulary, config.embedding)
        factor = math.sqrt(config.embedding) if self._architecture.scale_embeddings else 1.0
        self._builder.add(
            table.format.embed,
            table.address,
            table.group_bytes,
            table.format.group_rows,
            table.k,
            self._x.address,
            self._x.stride,
            self._builder.scalar(factor),
            barrier=Barrier.ALWAYS,
        )
        for layer in range(config.layers):
            self._attention(layer)
            self._feed_forward(layer)
            if layer == 0:  # what packs the other layers has been loaded
                release_linker()
        return self._logits()

    def _attention(self, layer: int) -> None:
        config, loader, prefix = self._config, self._loader, f"blk.{layer}."
        q, k, v = self._query_key_value(prefix)
        self._norm_pack(prefix + "attn_norm.weight", self._forms(q, k, v))
        for matrix, rows, bias, order, last in (
            (q, self._queries, "attn_q.bias", self._heads(config.heads, self._turned), False),
            (k, self._keys, "attn_k.bias", self._heads(config.kv_heads, self._turned), False),
            (v, self._values, "attn_v.bias", self._heads(config.kv_heads, self._plain), True),
        ):
            address = 0
            if loader.has(prefix + bias):
                size = config.head_size * (config.heads if bias.startswith("attn_q") else config.kv_heads)
                address = self._builder.array(loader.vector(prefix + bias, size, order))
            self._product(matrix, rows, addend=(address, 0), last=last)
        slides = config.window > 0 and self._architecture.slides(config, layer)
        table = LOCAL_ROPE if slides and self._architecture.local_rope_base else GLOBAL_ROPE
        pages = self._store.addresses(layer)
        shape = (config.kv_heads, config.padded_head, config.head_size, table, self._epsilon)
        self._builder.add(
            kv_store.KERNELS[self._store.types],
            self._keys.address,
            self._values.address,
            self._head_norm(prefix + "attn_k_norm.weight"),
            *pages,
            *shape,
            *self._store.head_bytes,
            barrier=Barrier.ALWAYS,
        )
        self._builder.add(
            attention.attention_kernel(*self._store.types, config.group),
            self._queries.address,
            self._attended.address,
            self._head_norm(prefix + "attn_q_norm.weight"),
            *pages,
            *shape,
            config.group,
            self._attention_scale,
            self._attention_cap,
            config.window if slides else 0,
            *self._store.head_bytes,
            barrier=Barrier.ALWAYS,
        )
        out = loader.matrix(prefix + "attn_output.weight", config.embedding, config.heads * config.head_size)
        self._pack(self._attended, out.k, out.format.form)
        self._add_to_residual(out, prefix + "post_attention_norm.weight", private=True)

    def _query_key_value(self, prefix: str) -> tuple[Matrix, Matrix, Matrix]:
        config, loader = self._config, self._loader
        sizes = (config.heads, config.kv_heads, config.kv_heads)
        orders = [self._heads(n, o) for n, o in zip(sizes, (self._turned, self._turned, self._plain), strict=True)]
        if self._architecture.fused:
            rows = sum(sizes) * config.head_size
            firsts = (0, config.heads * config.head_size, (config.heads + config.kv_heads) * config.head_size)
            q, k, v = (
                loader.part(prefix + "attn_qkv.weight", rows, config.embedding, np.where(order >= 0, order + first, -1))
                for order, first in zip(orders, firsts, strict=True)
            )
            return q, k, v
        q, k, v = (
            loader.matrix(prefix + f"attn_{letter}.weight", n * config.head_size, config.embedding, order)
            for letter, n, order in zip("qkv", sizes, orders, strict=True)
        )
        return q, k, v

    def _feed_forward(self, layer: int) -> None:
        config, loader, prefix = self._config, self._loader, f"blk.{layer}."
        if self._experts is not None:
            self._experts.record(prefix, self._x, self._packed)
            return
        width, embedding = config.feed_forward, config.embedding
        if self._architecture.fused:
            rows = np.arange(width)
            gate, up = (
                loader.part(prefix + "ffn_up.weight", 2 * width, embedding, rows + first) for first in (0, width)
            )
        else:
            gate, up = (loader.matrix(prefix + f"ffn_{name}.weight", width, embedding) for name in ("gate", "up"))
        down = loader.matrix(prefix + "ffn_down.weight", embedding, width)
        self._norm_pack(prefix + "ffn_norm.weight", self._forms(gate, up))
        self._product(gate, self._gate, last=False)
        self._product(up, self._up, last=True)
        gelu = self._architecture.gate is Gate.GELU
        self._builder.add(
            activations.gate_pack,
            self._gate.address,
            self._up.address,
            self._gate.stride,
            width,
            int(down.format.form),
            self._packed,
            activations.GATE_GELU if gelu else activations.GATE_SILU,
            barrier=Barrier.ALWAYS,
        )
        self._add_to_residual(down, prefix + "post_ffw_norm.weight", private=False)

    def _logits(self) -> LogitsOperations:
        config, loader = self._config, self._loader
        name = "output.weight" if loader.has("output.weight") else "token_embd.weight"
        output = loader.matrix(name, config.vocabulary, config.embedding)
        self._norm_pack("output_norm.weight", output.format.form, wanted=True)
        product = self._product(output, Rows(self._builder, 1, output.rows), last=True, stage=Stage.WANTED)
        cap = config.logit_cap if config.logit_cap is not None else self._architecture.logit_cap
        capped = None
        if cap:
            arguments = (0, 4 * output.rows, output.rows, self._builder.scalar(cap))
            capped = self._builder.add(activations.soft_cap, *arguments, barrier=Barrier.ALWAYS, stage=Stage.WANTED)
        return LogitsOperations(product, capped, output.rows)

    def _add_to_residual(self, matrix: Matrix, norm: str, *, private: bool) -> None:
        """x += matrix * packed, normalised first where the file has a norm after the sub-layer."""
        if not self._loader.has(norm):
            residual = (self._x.address, self._x.stride)
            self._product(matrix, self._x, addend=residual, last=True, private=private)
            return
        self._product(matrix, self._sublayer, last=True, private=private)
        self._builder.add(
            activations.norm_add,
            self._x.address,
            self._x.stride,
            self._sublayer.address,
            self._sublayer.stride,
            self._vector(norm, self._config.embedding),
            self._config.embedding,
            self._epsilon,
            barrier=Barrier.ALWAYS,
        )

    def _norm_pack(self, norm: str, form: Form, *, wanted: bool = False) -> None:
        self._builder.add(
            activations.norm_pack,
            self._x.address,
            self._x.stride,
            self._vector(norm, self._config.embedding),
            self._config.embedding,
            int(form),
            self._packed,
            self._epsilon,
            int(wanted),
            barrier=Barrier.MANY_ROWS,
            stage=Stage.WANTED if wanted else Stage.ALL,
        )

    def _pack(self, rows: Rows, k: int, form: Form) -> None:
        arguments = (rows.address, 4 * k, 0, k, int(form), self._packed, self._epsilon, 0)
        self._builder.add(activations.norm_pack, *arguments, barrier=Barrier.MANY_ROWS)

    def _product(
        self,
        matrix: Matrix,
        out: Rows,
        *,
        last: bool,
        addend: tuple[int, int] = (0, 0),
        private: bool = True,
        stage: Stage = Stage.ALL,
    ) -> int:
        """out = matrix * packed + addend (address, stride); the last of several side by side ends with a barrier."""
        return self._builder.add(
            matrix.format.matmul,
            *matrix.arguments,
            out.address,
            out.stride,
            *addend,
            self._packed,
            int(private),
            barrier=Barrier.ALWAYS if last else Barrier.NEVER,
            stage=stage,
        )

    def _head_norm(self, name: str) -> int:
        if not self._loader.has(name):
            return 0
        return self._builder.array(self._loader.vector(name, self._config.head_size, self._turned))

    def _vector(self, name: str, size: int) -> int:
        return self._builder.array(self._loader.vector(name, size))

    def _heads(self, heads: int, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """The order of a head's rows repeated for all heads."""
        return np.where(order >= 0, order + np.arange(heads)[:, None] * self._config.head_size, -1).reshape(-1)

    @staticmethod
    def _forms(*matrices: Matrix) -> Form:
        forms = Form(0)
        for matrix in matrices:
            forms |= matrix.format.form
        return forms
