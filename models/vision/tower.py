"""The transformer of image encoders: all patches of a picture attend to each other, or to those of their window.

A picture's rows are computed a few hundred at a time. For each layer, keys and values of all rows are stored in pages
first; then attention and the feed-forward network follow. So buffers are small, and a request to stop is noticed soon.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import activations, attention, kv_store
from cpu_kernels.kv_types import PAGE_TOKENS, KVType
from cpu_kernels.records import Step
from gguf_io import ModelFile
from gguf_io.errors import ModelFileError
from models.errors import refusal
from models.kv_layout import layer_bytes_per_token
from models.page_arrays import PageArrays
from models.recording import NOTHING, Place
from models.recording import Rows as Buffer
from models.sizes.attention import Heads
from models.sizes.reading import whole_vectors
from models.vision.config import VisionConfig
from models.vision.family import Passes, Rows
from models.vision.recording import OperationRange, VisionRecording, rows_of_a_pass
from models.weights import ROW_MULTIPLE, Matrix, filled, padded, repeated, whole_words

_TYPES = (KVType.I16, KVType.I16)
_LOG2E = math.log2(math.e)
_TO_THE_END = 1 << 40
_ALONE = {"gelu": activations.GELU_ALONE, "quick": activations.QUICK_ALONE}
_GATED = {"gelu": activations.GATE_GELU, "quick": activations.GATE_QUICK, "silu": activations.GATE_SILU}


def _every_layer(layer: int) -> bool:
    return True


@dataclass(frozen=True)
class Style:
    """The properties in which the families' transformers differ; the others follow from a file's tensors."""

    rms: bool = False  # RMSNorm in place of LayerNorm
    swapped: bool = False  # old files of the family have the names of ffn_up and ffn_down swapped
    # The source of each value of a query's or key's head, with rotated pairs at i and i + half of the padded head;
    # None if heads are not rotated.
    order: NDArray[np.int64] | None = None
    value_norms: bool = False  # RMSNorm without weights of value heads
    scale: float | None = None  # of scores; None for 1 / sqrt(head size)
    sees_all: Callable[[int], bool] = _every_layer  # whether a layer's rows see the whole picture, or their window
    layers: int | None = None  # how many are computed; None for all


@dataclass(frozen=True)
class _Layer:
    """The parts of a layer's program: queries, stored keys and values; attention and all after it."""

    before: OperationRange
    after: OperationRange


class Tower:
    """The layers "v.blk.0" and so on of one file.

    most_rows: of the largest picture. longest, longest_head, pass_rows: see Family. row_bytes: of a row of a picture,
    kept while it is encoded.
    """

    def __init__(self, file: ModelFile, config: VisionConfig, most_rows: int, style: Style) -> None:
        """Check the sizes. Raises ModelFileError or UnsupportedModelError."""
        self.config, self.style = config, style
        if not config.layers or not config.heads or config.heads * config.head_size % 16:
            raise ModelFileError(
                f"{file.path}: an image encoder with {config.layers} layers, {config.heads} heads of "
                f"{config.head_size} values is not one of the type {config.kind!r}. Use another version of it."
            )
        self._count = config.layers if style.layers is None else style.layers
        self._heads = heads_of(config)
        self._most_rows = most_rows
        self._swapped = style.swapped and _columns(file, "v.blk.0.ffn_down.weight") == config.width
        # Old files state 0.
        self._hidden = config.hidden or _columns(file, f"v.blk.0.ffn_{'up' if self._swapped else 'down'}.weight")
        gated = "v.blk.0.ffn_gate.weight" in file.tensors
        self._kind = (_GATED if gated else _ALONE).get(config.activation, -1)
        if self._kind < 0:
            raise refusal(file, "its image encoder has SiLU without v.blk.0.ffn_gate.weight")
        self._attended = config.heads * config.head_size
        self.longest = max(config.width, whole_words(self._hidden), self._attended)
        self.longest_head = self._heads.padded
        self._work_before = 6.0 * config.width * self._attended
        self._work_after = 2.0 * config.width * (self._attended + (3 if gated else 2) * self._hidden)
        self.pass_rows = rows_of_a_pass(self._work_before + self._work_after)
        of_heads = 4 * config.heads * self._heads.padded
        self.row_bytes = layer_bytes_per_token(self._heads, _TYPES) + 4 * config.width + of_heads

    def record(self, recording: VisionRecording) -> None:
        """Load the layers and record them."""
        config, of_head = self.config, self._heads.padded
        self._x, self._sum = recording.rows(config.width), recording.rows(config.width)
        self._queries, self._keys, self._values = (
            Buffer(recording.builder, recording.max_rows, config.heads * of_head) for _ in range(3)
        )
        self._attention = Buffer(recording.builder, recording.max_rows, self._attended)
        room = whole_words(self._hidden)
        self._gate, self._up = recording.rows(room), recording.rows(room)
        # Windows may leave their last pages partly empty.
        self._pages = PageArrays({0: self._heads}, _TYPES, 2 * -(-self._most_rows // PAGE_TOKENS) + 1)
        self._scale = recording.builder.scalar((self.style.scale or config.head_size**-0.5) * _LOG2E)
        self._epsilon = recording.builder.scalar(config.epsilon)
        self._no_cap = recording.builder.scalar(0.0)
        self._layers = [self._layer(recording, f"v.blk.{number}.") for number in range(self._count)]

    def work(self, rows: int) -> float:
        """The sum of shares that `run` gives to its passes."""
        return self._count * rows * self._work_of_row(rows)

    def run(
        self,
        x: Rows,
        passes: Passes,
        *,
        table: Rows | None = None,
        windows: Sequence[int] = (),
        after_layer: Callable[[int], None] | None = None,
    ) -> None:
        """Compute all layers, from x to x: float32[rows, width].

        table: of `rotation`, None if heads are not rotated. windows: the rows of each window, in order, for layers that
        do not see all. after_layer: called after each layer.
        """
        table = rotation(np.zeros((1, 0)), self._heads) if table is None else table
        places = self._pages.places(np.arange(2 * -(-self._most_rows // PAGE_TOKENS) + 1)).astype(np.int32)
        whole, parts = _Spans([len(x)], places, table), _Spans(windows, places, table)
        queries = np.empty((len(x), self._queries.width), np.float32)
        share = self._work_of_row(len(x)) / (self._work_before + self._work_after)
        for number, layer in enumerate(self._layers):
            spans = whole if self.style.sees_all(number) else parts
            for first in range(0, len(x), passes.most):
                rows = slice(first, min(first + passes.most, len(x)))
                count = rows.stop - first
                self._x.values[:count, : self.config.width] = x[rows]
                spans.place(passes, first, count)
                passes.run(layer.before, count, self._work_before * share * count)
                queries[rows] = self._queries.values[:count]
            for first in range(0, len(x), passes.most):
                rows = slice(first, min(first + passes.most, len(x)))
                count = rows.stop - first
                self._x.values[:count, : self.config.width] = x[rows]
                self._queries.values[:count] = queries[rows]
                spans.place(passes, first, count)
                passes.run(layer.after, count, self._work_after * share * count)
                x[rows] = self._x.values[:count, : self.config.width]
            if after_layer is not None:
                after_layer(number)

    def _work_of_row(self, rows: int) -> float:
        return self._work_before + self._work_after + 4.0 * rows * self._attended

    def _layer(self, recording: VisionRecording, prefix: str) -> _Layer:
        with recording.part() as before:
            self._project(recording, prefix)
            self._store(recording, prefix)
        with recording.part() as after:
            self._attend(recording, prefix)
            self._feed_forward(recording, prefix)
        return _Layer(before, after)

    def _norm_pack(self, recording: VisionRecording, norm: str) -> Callable[..., None]:
        """What packs x for matrices, normalised; for VisionRecording.multiply."""
        x, config = self._x.place, self.config
        if not self.style.rms:
            return partial(recording.layer_norm_pack, x, norm, config.epsilon)
        weight = recording.vector(f"{norm}.weight", config.width)
        return partial(recording.pack, x, weight=weight, epsilon=config.epsilon)

    def _project(self, recording: VisionRecording, prefix: str) -> None:
        """Compute queries, keys and values, from one fused tensor or from three."""
        config, loader, size = self.config, recording.loader, self._heads.size
        plain = filled(size, self._heads.padded)
        turned = plain if self.style.order is None else self.style.order
        firsts = np.arange(config.heads) * size
        fused = loader.has(f"{prefix}attn_qkv.weight")
        products = []
        for number, (letter, out, order) in enumerate(
            (("q", self._queries, turned), ("k", self._keys, turned), ("v", self._values, plain))
        ):
            name = f"{prefix}attn_{'qkv' if fused else letter}"
            rows = (3 if fused else 1) * self._attended
            sources = repeated(order, firsts + number * self._attended * fused)
            matrix = loader.matrix(f"{name}.weight", rows, config.width, sources)
            products.append((name, matrix, out, recording.bias(f"{name}.bias", rows, sources)))
        recording.multiply(self._norm_pack(recording, f"{prefix}ln1"), *products)
        if self.style.value_norms:
            recording.norm_heads(self._values, self._heads, config.epsilon)

    def _store(self, recording: VisionRecording, prefix: str) -> None:
        heads = self._heads
        arguments = kv_store.StoreKV(
            keys=self._keys.address,
            values=self._values.address,
            norm=self._head_norm(recording, f"{prefix}attn_k_norm.weight"),
            pages=self._pages.of_layer(0),
            kv_heads=heads.keys,
            padded=heads.padded,
            size=heads.size,
            rope=0,
            epsilon=self._epsilon,
        )
        recording.builder.add(kv_store.KERNELS[_TYPES], arguments)

    def _attend(self, recording: VisionRecording, prefix: str) -> None:
        """x += out(attention), with a norm or factors of the addend if the file has them."""
        heads = self._heads
        arguments = attention.Attention(
            queries=self._queries.address,
            out=self._attention.address,
            query_norm=self._head_norm(recording, f"{prefix}attn_q_norm.weight"),
            pages=self._pages.of_layer(0),
            kv_heads=heads.keys,
            padded=heads.padded,
            size=heads.size,
            rope=0,
            epsilon=self._epsilon,
            group=1,
            scale=self._scale,
            cap=self._no_cap,
            mask=attention.Mask(behind=_TO_THE_END),
            longest=heads.padded,
        )
        recording.builder.add(attention.attention_kernel(*_TYPES, 1), arguments)
        name, factors = f"{prefix}attn_out", f"{prefix}ls1.weight"
        matrix, bias = self._last_matrix(recording, name, self._attended, factors)
        place = self._attention.place._replace(stride=4 * self._attended)
        recording.multiply(partial(recording.pack, place), (name, matrix, self._sum, bias))
        self._add(recording, f"{prefix}attn_post_norm")

    def _feed_forward(self, recording: VisionRecording, prefix: str) -> None:
        """x += feed_forward(norm(x)), likewise."""
        config, loader, hidden = self.config, recording.loader, self._hidden
        name_up, name_down = (f"{prefix}ffn_{name}" for name in ("down", "up")[:: 1 if self._swapped else -1])
        down, down_bias = self._last_matrix(recording, name_down, hidden, f"{prefix}ls2.weight", widen=True)
        inner = [(name_up, self._up)]
        if self._kind in _GATED.values():
            inner.insert(0, (f"{prefix}ffn_gate", self._gate))
        products = [
            (name, loader.matrix(f"{name}.weight", hidden, config.width), out, recording.bias(f"{name}.bias", hidden))
            for name, out in inner
        ]
        recording.multiply(self._norm_pack(recording, f"{prefix}ln2"), *products)
        pack = partial(recording.gate_pack, self._kind, inner[0][1], self._up)
        recording.multiply(pack, (name_down, down, self._sum, down_bias))
        self._add(recording, f"{prefix}ffn_post_norm")

    def _last_matrix(
        self, recording: VisionRecording, name: str, k: int, factors: str, *, widen: bool = False
    ) -> tuple[Matrix, Place]:
        """The matrix and bias of a sub-layer's output, times a factor for each value if the file has them."""
        loader, width = recording.loader, self.config.width
        if not loader.has(factors):
            matrix = loader.matrix(f"{name}.weight", width, k, widen=widen)
            return matrix, recording.bias(f"{name}.bias", width)
        scale, read = loader.values(factors, width), loader.values(f"{name}.weight", width, k)
        matrix = loader.matrix_of(f"{name}.weight", width, k, lambda: read() * scale()[:, None], half=True)
        if not loader.has(f"{name}.bias"):
            return matrix, NOTHING
        addend, more = loader.values(f"{name}.bias", width), padded(width) - width
        bias = loader.later((padded(width),), lambda: np.pad(addend() * scale(), (0, more)))
        return matrix, Place(bias.ctypes.data, 0)

    def _add(self, recording: VisionRecording, norm: str) -> None:
        """x += a sub-layer's output, normalised if the file has a norm of that name."""
        if recording.loader.has(f"{norm}.weight"):
            recording.rms_norm(self._sum, norm, self.config.width, self.config.epsilon)
        recording.add_rows(self._x, self._sum, self.config.width)

    def _head_norm(self, recording: VisionRecording, name: str) -> int:
        """Address of the norm of queries or keys, head by head, or 0 if the file has none."""
        if not recording.loader.has(name):
            return 0
        return recording.vector(name, self._heads.size, self.style.order)


def heads_of(config: VisionConfig) -> Heads:
    """An encoder's heads: without padding to 32 values if they fill a row of buffers."""
    multiple = 32 if config.heads * whole_vectors(config.head_size) % ROW_MULTIPLE else 16
    return Heads(config.heads, config.heads, config.head_size, config.head_size, multiple=multiple)


def halves_order(parts: int, heads: Heads) -> NDArray[np.int64]:
    """The order of a head's values for a Style, if each of `parts` equal parts has pairs of i and half of it + i."""
    part, half = heads.size // parts, heads.size // parts // 2
    low = (np.arange(parts)[:, None] * part + np.arange(half)).reshape(-1)
    return _paired(low, low + half, heads)


def neighbours_order(heads: Heads) -> NDArray[np.int64]:
    """The same if value 2i is paired with 2i + 1."""
    low = np.arange(0, heads.size, 2)
    return _paired(low, low + 1, heads)


def _paired(low: NDArray[np.int64], high: NDArray[np.int64], heads: Heads) -> NDArray[np.int64]:
    order = np.full(heads.padded, -1, np.int64)
    order[: len(low)], order[heads.padded // 2 :][: len(high)] = low, high
    return order


def rotation(angles: NDArray[np.float64], heads: Heads) -> Rows:
    """A rope table (cpu_kernels.rope) with a row for each row of angles, float64[rows, rotated pairs]."""
    # A row more, since the last vectors of heads that are no multiple of 32 reach beyond their rows.
    table = np.zeros((len(angles) + 1, 2, heads.padded // 2), np.float32)[:-1]
    table[:, 0] = 1
    table[:, 0, : angles.shape[1]], table[:, 1, : angles.shape[1]] = np.cos(angles), np.sin(angles)
    return table.reshape(len(angles), -1)


class _Spans:
    """Runs of rows that attend to each other, each in pages of its own.

    Rows of a run that see all of it may be computed in any order and number: attention takes them for its last ones.
    """

    def __init__(self, counts: Sequence[int], places: NDArray[np.int32], table: Rows) -> None:
        """counts: rows of each run, in order. places: of pages, in order. table: of `rotation`, or a row for all."""
        self._counts = np.asarray(counts, np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._counts)])
        pages = -(-self._counts // PAGE_TOKENS)
        self._tables = places.ctypes.data + 4 * (np.cumsum(pages) - pages)
        self._places, self._table = places, table

    def place(self, passes: Passes, first: int, count: int) -> None:
        """Write rows first..first+count-1 into the step record."""
        step, rows = passes.step, np.arange(first, first + count)
        of_row = np.searchsorted(self._starts, rows, side="right") - 1
        passes.field(Step.POSITIONS)[:count] = rows - self._starts[of_row]
        passes.field(Step.ROPE_ROWS)[:count] = np.minimum(rows, len(self._table) - 1)
        passes.field(Step.ROW_TABLES)[:count] = self._tables[of_row]
        runs, begins, lengths = np.unique(of_row, return_index=True, return_counts=True)
        ends = self._counts[runs]
        segments = np.stack([begins, lengths, ends - lengths, self._tables[runs]], axis=1)
        passes.field(Step.SEGMENTS)[: segments.size] = segments.reshape(-1)
        step[Step.SEGMENT_COUNT] = len(segments)
        step[Step.ROPE_TABLES] = self._table.ctypes.data


def _columns(file: ModelFile, name: str) -> int:
    """Columns of a matrix. Raises ModelFileError if it is missing."""
    shape = file.tensors[name].shape if name in file.tensors else ()
    if len(shape) != 2:
        raise ModelFileError(f"{file.path}: the matrix {name} is missing. Use another version of the model.")
    return shape[1]
