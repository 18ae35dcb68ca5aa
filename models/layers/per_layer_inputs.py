"""Gemma 3n's and 4's second embedding of each token, of which every layer gets its own part.

Its table is the larger half of such a file, and a token needs only one row of it. So it stays in the file: each step
reads the rows it needs, and the system's page cache keeps frequent ones.
"""

import math
from collections.abc import Sequence

import numpy as np

from cpu_kernels import layer_inputs
from cpu_kernels.arguments import indices_of
from cpu_kernels.formats.weight_format import Embed, Repack
from cpu_kernels.program import Program
from cpu_kernels.records import Barrier
from gguf_io.model_file import LOOKED_UP, SLACK_BYTES
from models.layers.feed_forward import KINDS
from models.recording import Recording, Rows
from models.weights import filled, padded, repeated

_HALF = math.sqrt(0.5)


class PerLayerInputs:
    """Computes each layer's inputs and adds them. Call `fetch` before each step, `close` after the last."""

    def __init__(self, recording: Recording) -> None:
        self._recording, config, builder = recording, recording.config, recording.builder
        self._width, self._layers = config.per_layer.width, config.layers
        self._padded, self._values = padded(self._width), self._layers * self._width
        self._rows, self._format = recording.loader.rows_in_file(LOOKED_UP, config.vocabulary, self._values)
        rows, group_rows = recording.max_rows, self._format.group_rows
        groups = -(-rows // group_rows)
        row_bytes = self._rows.row_bytes
        self._source = np.zeros((rows + -(-SLACK_BYTES // row_bytes), row_bytes), np.uint8)
        self._places = np.full(groups * group_rows, -1, np.int32)
        self._packed = builder.buffer(groups * self._format.group_bytes(self._values), np.uint8)
        self._inputs = recording.planes(self._layers, self._padded)
        for array in (self._source, self._places):
            builder.keep(array)
        self._table, self._projected = recording.rows(self._values), recording.rows(self._layers * self._padded)
        self._kept = recording.rows(config.embedding, spread=True)
        self._gate = recording.rows(self._width)
        self._repack = self._fetched = 0

    def fetch(self, tokens: Sequence[int], program: Program) -> None:
        """Read the rows of a step's tokens. Raises ModelFileError if the file was changed or cannot be read."""
        count = len(tokens)
        self._source[:count] = self._rows.read(tokens)
        if count != self._fetched:
            self._places[:count] = np.arange(count)
            self._places[count:] = -1
            program.set_argument(self._repack, indices_of(Repack).groups, -(-count // self._format.group_rows))
            self._fetched = count

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._rows.close()

    def record(self, narrows: bool) -> None:
        """Compute layers' inputs from the rows of the table and from x, which holds the tokens' embeddings.

        narrows: `narrow` computes those of the last layers.
        """
        recording, builder, packing = self._recording, self._recording.builder, self._format
        group_bytes = packing.group_bytes(self._values)
        self._repack = recording.add(
            packing.repack,
            Repack(
                source=self._source.ctypes.data,
                row_bytes=self._source.shape[1],
                packed=self._packed,
                group_bytes=group_bytes,
                group_rows=packing.group_rows,
                k=self._values,
                rows=self._places.ctypes.data,
                groups=0,
            ),
        )
        recording.add(
            packing.embed,
            Embed(
                weights=self._packed,
                group_bytes=group_bytes,
                group_rows=packing.group_rows,
                k=self._values,
                x=self._table.address,
                stride=self._table.stride,
                factor=builder.scalar(math.sqrt(self._width) * _HALF),
                tokens=builder.array(np.arange(recording.max_rows, dtype=np.int32)),
            ),
            barrier=Barrier.NEVER,
        )
        if narrows:
            recording.keep_wanted(recording.x.values[None], self._kept.values[None])
        self._compute(0, recording.config.last_stored + 1 if narrows else self._layers, recording.x)

    def narrow(self, layer: int) -> None:
        """Compute the inputs of this layer and later ones, only for rows with requested logits."""
        self._recording.keep_wanted(self._table.values[None], self._table.values[None])
        self._compute(layer, self._layers, self._kept)

    def _compute(self, first: int, last: int, rows: Rows) -> None:
        """Compute the inputs of layers first..last-1. rows: the tokens' embeddings.

        input = (norm(projection(embedding) / sqrt(its width)) + row of the table * sqrt(a layer's width)) / sqrt(2).
        """
        recording, builder, config = self._recording, self._recording.builder, self._recording.config
        order = repeated(filled(self._width, self._padded), np.arange(first, last) * self._width)
        matrix = recording.loader.matrix("per_layer_model_proj.weight", self._values, config.embedding, order)
        recording.pack(rows.place, matrix)
        recording.product(matrix, self._projected.place, last=True)
        # Dividing the norm's input by sqrt(width) is equivalent to a larger epsilon.
        scale = config.embedding / recording.architecture.scales.residual(config) ** 2
        read = recording.loader.vector("per_layer_proj_norm.weight", self._width)
        recording.add(
            layer_inputs.layer_inputs,
            layer_inputs.LayerInputs(
                projected=self._projected.address,
                projected_stride=self._projected.stride,
                table=self._table.address + first * self._width * 4,
                table_stride=self._table.stride,
                out=self._inputs[first].ctypes.data,
                layer_bytes=self._inputs.strides[0],
                layers=last - first,
                width=self._width,
                padded=self._padded,
                weight=recording.later((self._padded,), lambda: read() * np.float32(_HALF)),
                epsilon=builder.scalar(config.epsilon * scale),
            ),
        )

    def add(self, layer: int) -> None:
        """x += norm(projection(activation(gate(x)) * the layer's input))."""
        recording, prefix = self._recording, f"blk.{layer}."
        loader, embedding = recording.loader, recording.config.embedding
        self.gate(layer, recording.x)
        projection = loader.matrix(prefix + "proj.weight", embedding, self._width)
        recording.add_to_residual(projection, "", prefix + "post_norm", private=False)

    def gate(self, layer: int, rows: Rows) -> None:
        """Pack activation(gate(rows)) * the layer's input for the product with its projection."""
        recording, prefix = self._recording, f"blk.{layer}."
        loader, embedding = recording.loader, recording.config.embedding
        gate = loader.matrix(prefix + "inp_gate.weight", self._width, embedding)
        projection = loader.matrix(prefix + "proj.weight", embedding, self._width)
        recording.pack(rows.place, gate)
        recording.product(gate, self._gate.place, last=True)
        recording.gate_pack(KINDS[recording.activation], self._gate, self._inputs[layer].ctypes.data, projection)
