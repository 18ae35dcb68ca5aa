"""Building blocks for recording a decoder's layers: buffers, norms, products, additions to the residual stream."""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import activations, layer_inputs, lora, norms, sums
from cpu_kernels.activations import GatePack, NormAdd, NormPack
from cpu_kernels.arguments import Arguments
from cpu_kernels.formats.weight_format import Embed
from cpu_kernels.kernel import Kernel
from cpu_kernels.layer_inputs import ImageInputs, KeepWanted
from cpu_kernels.lora import LANES, SPAN, Expand, LookUp, Shrink
from cpu_kernels.matmul import Product
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.norms import AddNorm, LayerNormPack, NormRows
from cpu_kernels.program import ProgramBuilder
from cpu_kernels.records import TILE_WIDTHS, Act, Barrier, Form, Stage
from cpu_kernels.sums import AddRows, CopyRows, ScaleAndAdd, ScaleByExpert
from gguf_io.lora import TOKENS
from models.adapters import CONCURRENT, Adapters
from models.architecture import Architecture, root_of_width
from models.config import ModelConfig
from models.weights import Matrix, WeightLoader, padded

_TILE_ROOM = max(TILE_WIDTHS)
_LINE = 16
"""Floats of a cache line."""


class Place(NamedTuple):
    """Rows of floats: the address of the first, which may be set later, and the bytes from one to the next."""

    address: int
    stride: int


NOTHING = Place(0, 0)
"""Rows of which nothing is added."""


class Rows:
    """A float32 buffer of rows x width, rows and width padded for whole tiles and groups: `values`.

    spread: pad the stride so that rows start in different cache sets. Products write to many rows in turn; with a
    power-of-two stride those rows would evict each other's lines, and packed activations too. Only for kernels that
    take the stride as an argument.
    """

    def __init__(self, builder: ProgramBuilder, rows: int, width: int, *, spread: bool = False) -> None:
        self.width = padded(width)
        lines = self.width // _LINE
        memory = aligned_zeros((rows + _TILE_ROOM, (lines | 1 if spread else lines) * _LINE), np.float32)
        self.values = memory[:, : self.width]
        self.place = Place(builder.keep(memory), memory.strides[0])
        self.address, self.stride = self.place


def packed_activations(builder: ProgramBuilder, rows: int, longest: int, threads: int) -> int:
    """Allocate packed activations; return the address of their descriptors (cpu_kernels.records.Act).

    The first descriptor is for all threads and `rows` rows, then each thread has its own for a single row. longest:
    values of the longest row that is packed into them.
    """
    descriptors = aligned_zeros((threads + 1, int(Act.SIZE)), np.int64)
    for index in range(threads + 1):
        tokens = rows + _TILE_ROOM if index == 0 else 1
        values = tokens * padded(longest)
        blocks = values // 32 + _TILE_ROOM
        parts: dict[Act, tuple[int, type[np.generic]]] = {
            Act.Q32: (values, np.int8),
            Act.SCALE32: (blocks, np.float32),
            Act.SUM32: (blocks, np.int32),
            Act.Q256: (values, np.int8),
            Act.SCALE256: (blocks, np.float32),
            Act.PAIRS256: (blocks, np.int32),
            Act.SUM16: (2 * blocks, np.int32),
            Act.FLOATS: (values, np.float32),
            Act.WORDS: (values, np.int16),
            Act.WORD_UNITS: (blocks, np.float32),
        }
        for field, part in parts.items():
            descriptors[index, field] = builder.buffer(*part)
    return builder.keep(descriptors)


class Recording:
    """Buffers that all layers share, and methods that record the operations of layers.

    x holds the residual stream, divided by the architecture's factor of sub-layer outputs, so that applying the factor
    costs nothing. epsilon, plain_epsilon: addresses of the epsilons of norms of x, and of other rows. packed:
    descriptors of the input of the next products. matrices_of_row: how many of a product's matrices each row uses, by
    the address of its segments (see products_of_slots).
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        loader: WeightLoader,
        config: ModelConfig,
        architecture: Architecture,
        max_rows: int,
        threads: int,
        adapters: Adapters | None = None,
    ) -> None:
        """adapters: LoRA adapters, whose operations are recorded too."""
        self.adapters = adapters
        self.builder, self.loader, self.config, self.architecture = builder, loader, config, architecture
        self.add = builder.add
        self.max_rows, self.threads = max_rows, threads
        self.x = self.rows(config.embedding, spread=True)
        self.packed = packed_activations(builder, max_rows, config.longest, threads)
        residual = architecture.scales.residual(config)
        self.epsilon = builder.scalar(config.epsilon / residual**2)
        self.embedding_factor = architecture.scales.embedding(config) / residual
        self.activation = architecture.stated_activations.get(config.feed_forward.activation, architecture.activation)
        self.plain_epsilon = builder.scalar(config.epsilon)
        self.matrices_of_row: dict[int, int] = {}
        self._unscaled: list[tuple[Kernel, Arguments, Stage | None]] = []
        self._expansions: list[tuple[Expand, Stage | None]] = []
        self.last_change: int | None = None
        """The latest operation that adds what adapters change."""

    @cached_property
    def sublayer(self) -> Rows:
        """Buffer for a sub-layer's output that is not added to x at once."""
        return self.rows(self.config.embedding, spread=True)

    @cached_property
    def aside(self) -> Rows:
        """Buffer for rows that are set aside and added to x later."""
        return self.rows(self.config.embedding, spread=True)

    def rows(self, width: int, *, spread: bool = False) -> Rows:
        """A buffer of rows of this width. spread: see Rows."""
        return Rows(self.builder, self.max_rows, width, spread=spread)

    def planes(self, count: int, width: int) -> NDArray[np.generic]:
        """A float32 buffer [plane][row][value], with rows padded for whole tiles."""
        memory = aligned_zeros((count, self.max_rows + _TILE_ROOM, width), np.float32)
        self.builder.keep(memory)
        return memory

    def later(self, shape: tuple[int, ...], make: Callable[[], NDArray[np.generic]]) -> int:
        """Address of a float32 array that is filled with what `make` returns when weights are loaded."""
        return self.loader.later(shape, make).ctypes.data

    def vector(self, name: str, size: int, order: NDArray[np.int64] | None = None) -> int:
        """Load a vector into the program, reordered if an order is given; return its address."""
        return self.later((padded(size if order is None else len(order)),), self.loader.vector(name, size, order))

    def bias(self, name: str, size: int) -> Place:
        """A bias, the same for all rows, as the addend of a product; NOTHING if the file has none."""
        return Place(self.vector(name, size), 0) if self.loader.has(name) else NOTHING

    def norm_pack(
        self, name: str | None, *matrices: Matrix, wanted: bool = False, factor: float = 1.0, scale: str = ""
    ) -> None:
        """Pack x for these matrices, normalised unless name (without .weight) is None.

        wanted: only rows with requested logits. factor: scales the normalised result. scale: the tensor of another
        factor, empty for none.
        """
        kernel, kind, weight, bias = activations.norm_pack, NormPack, 0, {}
        if name is not None:
            # Falcon-H1's files have a norm whose name lacks .weight.
            weight = self._scaled(name if self.loader.has(name) else f"{name}.weight", factor, scale)
            if self.architecture.norms.layer_norm:
                kernel, kind = norms.layer_norm_pack, LayerNormPack
                if self.loader.has(f"{name}.bias"):
                    bias = {"bias": self._scaled(f"{name}.bias", factor, scale)}
        arguments = kind(
            x=self.x.address,
            stride=self.x.stride,
            weight=weight,
            k=self.config.embedding,
            forms=forms(*matrices),
            packed=self.packed,
            epsilon=self.epsilon,
            wanted=wanted,
            **bias,
        )
        self.add(kernel, arguments, barrier=Barrier.MANY_ROWS, stage=Stage.WANTED if wanted else None)

    def pack(self, rows: Place, *matrices: Matrix, weight: int = 0) -> None:
        """Pack rows for these matrices, normalised by RMSNorm with the weights at an address unless it is 0."""
        arguments = pack_arguments(rows, weight, self._epsilon_of(rows), self.packed, *matrices)
        self.add(activations.norm_pack, arguments, barrier=Barrier.MANY_ROWS)

    def _epsilon_of(self, rows: Place) -> int:
        return self.epsilon if rows == self.x.place else self.plain_epsilon

    def gate_pack(self, kind: int, gate: Rows, up: int, matrix: Matrix, *, up_stride: int = 0) -> None:
        """Pack activation(gate) * up for a matrix, for all threads: its product is not private.

        kind: an activation of cpu_kernels.activations. up: address of rows, or of xIELU's factors. up_stride: bytes
        from row to row, 0 for the gate's.
        """
        arguments = GatePack(
            gate=gate.address,
            up=up,
            stride=gate.stride,
            k=matrix.k,
            forms=matrix.format.form,
            packed=self.packed,
            kind=kind,
            up_stride=up_stride,
        )
        self.add(activations.gate_pack, arguments)

    def embed(self, table: Matrix, out: Place, factor: int) -> None:
        """Write the rows of the step's tokens in a matrix, times the factor at an address."""
        arguments = Embed(
            weights=table.address,
            group_bytes=table.group_bytes,
            group_rows=table.format.group_rows,
            k=table.k,
            x=out.address,
            stride=out.stride,
            factor=factor,
        )
        self.add(table.format.embed, arguments)

    def change_embeddings(self, out: Place, factor: float) -> None:
        """Add the adapters' changes to the embeddings of the step's tokens. factor: as the embeddings were scaled."""
        if self.adapters and self.adapters.changed(TOKENS):
            factors = self.adapters.factors_of_tokens(self.config.embedding, factor)
            self.add(lora.look_up, LookUp(factors=factors, index=0), barrier=Barrier.ADAPTERS)
            self._expand_later(factors, 1, padded(self.config.embedding), out, 0, None)
            self._finish_products()

    def product(
        self,
        matrix: Matrix,
        out: Place,
        *,
        last: bool,
        addend: Place = NOTHING,
        private: bool = True,
        stage: Stage | None = None,
    ) -> int:
        """out = matrix * packed + addend, changed by adapters. Returns the operation's index.

        last: end with a barrier; False for all but the last of several products that may run concurrently. private: a
        single row is packed once per thread.
        """
        scaled = bool(matrix.scale)
        # The factor does not apply to the addend, which may be in `out`.
        room = self.sublayer.place if scaled and addend.address == out.address else out
        arguments = product_arguments(matrix, room, self.packed, NOTHING if scaled else addend, private=private)
        barrier = Barrier.ALWAYS if last else Barrier.NEVER
        self._change(matrix, out, self.packed, private=private, stage=stage)
        operation = self.add(matrix.format.matmul, arguments, barrier=barrier, stage=stage)
        if scaled:
            factor = self.vector(matrix.scale, 1)
            self._unscaled.append((sums.scale_and_add, _scaling(out, room, matrix.rows, factor, addend), stage))
        if last:
            self._finish_products()
        return operation

    def products_of_slots(
        self,
        matrix: Matrix,
        out: Rows,
        packed: int,
        segments: int,
        *,
        last: bool = True,
        stage: Stage | None = None,
        table: int = 0,
    ) -> None:
        """out = matrix * packed for each slot, with the matrix (expert or head) that `segments` assigns to the slot.

        table: of the slots that adapters change, see cpu_kernels.lora.
        """
        if table:
            self._change(matrix, out.place, packed, private=False, stage=stage, table=table)
        arguments = product_arguments(matrix, out.place, packed, NOTHING, private=False, segments=segments)
        barrier = Barrier.ALWAYS if last else Barrier.NEVER
        self.add(matrix.format.matmul, arguments, barrier=barrier, stage=stage)
        if matrix.scale:
            count = self.loader.rows(matrix.scale)
            read = self.loader.vector(matrix.scale, count)
            factors = self.later((matrix.experts,), lambda: read()[:count])
            scaling = ScaleByExpert(y=out.address, stride=out.stride, factors=factors, segments=segments)
            self._unscaled.append((sums.scale_by_expert, scaling, stage))
        if last:
            self._finish_products()

    def _change(
        self, matrix: Matrix, out: Place, packed: int, *, private: bool, stage: Stage | None, table: int = 0
    ) -> None:
        """Record what adapters change in a product: A x now, concurrently with the product, and B (A x) after it."""
        if self.adapters and self.adapters.changed(matrix.name):
            if self.loader.has(f"{matrix.name.removesuffix('weight')}scale"):
                return  # its factor may be applied elsewhere
            factors, index = self.adapters.factors_of(matrix), len(self._expansions)
            arguments = Shrink(
                factors=factors,
                k=matrix.k,
                form=matrix.format.form,
                packed=packed,
                private=private,
                index=index,
                table=table,
            )
            self.add(lora.shrink, arguments, barrier=Barrier.NEVER, stage=stage)
            self._expand_later(factors, -(-matrix.k // SPAN), matrix.rows, out, table, stage)

    def _expand_later(
        self, factors: int, spans: int, outputs: int, out: Place, table: int, stage: Stage | None
    ) -> None:
        index = len(self._expansions)
        assert index < CONCURRENT
        arguments = Expand(
            factors=factors,
            spans=spans,
            vectors=outputs // LANES,
            y=out.address,
            y_stride=out.stride,
            index=index,
            table=table,
        )
        self._expansions.append((arguments, stage))

    def _finish_products(self) -> None:
        """Multiply the finished concurrent products by the factors of their matrices, and add what adapters change."""
        while self._unscaled:
            kernel, scaling, stage = self._unscaled.pop(0)
            barrier = Barrier.NEVER if self._unscaled else Barrier.ALWAYS
            self.add(kernel, scaling, barrier=barrier, stage=stage)
        while self._expansions:
            arguments, stage = self._expansions.pop(0)
            barrier = Barrier.NEVER if self._expansions else Barrier.ADAPTERS
            self.last_change = self.add(lora.expand, arguments, barrier=barrier, stage=stage)

    def add_to_residual(self, matrix: Matrix, bias: str, norm: str, *, private: bool) -> None:
        """x += matrix * packed + bias, with a norm of the addend or of the sum if the architecture has one.

        norm: the tensor of that norm, without .weight. private: as for `product`.
        """
        after, sums = self.architecture.norms.after, self.architecture.norms.sums
        if not after and not sums and not self.loader.has(bias):
            self.product(matrix, self.x.place, addend=self.x.place, last=True, private=private)
            return
        addend = self.bias(bias, self.config.embedding)
        self.product(matrix, self.sublayer.place, addend=addend, last=True, private=private)
        if sums:
            self.add_and_norm(self.sublayer.place, norm)
        elif after:
            self.norm_add(self.x, self.sublayer, norm)
        else:
            self._add(self.sublayer)

    def norm_add(self, to: Rows, rows: Rows, norm: str) -> None:
        """to += rows, normalised by the tensor `norm`, without .weight."""
        weight, size = self.vector(f"{norm}.weight", self.config.embedding), self.config.embedding
        arguments = NormAdd(
            x=to.address,
            x_stride=to.stride,
            y=rows.address,
            y_stride=rows.stride,
            weight=weight,
            k=size,
            epsilon=self.plain_epsilon,
        )
        self.add(activations.norm_add, arguments)

    def add_and_norm(self, rows: Place, norm: str, *, by_position: bool = False) -> None:
        """x = LayerNorm(x + rows), by the tensor `norm`, without .weight. rows: NOTHING only to normalise.

        by_position: rows are indexed by position, not by row of the step.
        """
        size, bias = self.config.embedding, self.bias(f"{norm}.bias", self.config.embedding).address
        arguments = AddNorm(
            x=self.x.address,
            x_stride=self.x.stride,
            y=rows.address,
            y_stride=rows.stride,
            by_position=by_position,
            weight=self.vector(f"{norm}.weight", size),
            bias=bias,
            size=size,
            epsilon=self.epsilon,
        )
        self.add(norms.add_norm, arguments)

    def norm(self, norm: str) -> None:
        """Normalise x in place by the tensor `norm`, without .weight."""
        if self.architecture.norms.layer_norm:
            self.add_and_norm(NOTHING, norm)
        else:
            self.normalise(self.x.place, norm, self.config.embedding)

    def normalise(self, rows: Place, norm: str, size: int) -> None:
        """Normalise rows of `size` values in place by RMSNorm, with the tensor `norm`, without .weight."""
        weight, padded_size = self.vector(f"{norm}.weight", size), -(-size // 16) * 16
        arguments = NormRows(
            x=rows.address,
            stride=rows.stride,
            weight=weight,
            size=size,
            padded=padded_size,
            epsilon=self._epsilon_of(rows),
        )
        self.add(norms.norm_rows, arguments)

    def keep_wanted(self, planes: NDArray[np.generic], into: NDArray[np.generic]) -> None:
        """Copy the rows with requested logits of [plane][row][values] to the front of `into`, which may be `planes`."""
        arguments = KeepWanted(
            rows=planes.ctypes.data,
            row_bytes=planes.strides[-2],
            planes=len(planes),
            plane_bytes=planes.strides[0],
            out=into.ctypes.data,
            out_plane_bytes=into.strides[0],
        )
        self.add(layer_inputs.keep_wanted, arguments, stage=Stage.WANTED)

    def copy_x(self, to: Place) -> None:
        """Copy x."""
        x, count = self.x, self.config.embedding
        arguments = CopyRows(x=to.address, x_stride=to.stride, y=x.address, y_stride=x.stride, count=count)
        self.add(sums.copy_rows, arguments)

    def image_inputs(self, part: int) -> None:
        """In steps that are an image: x = its rows' first part, or x += a later part.

        Factors of Gemma, and of models with later parts, belong to tokens alone, others to what the first layer reads.
        """
        width, scales = self.config.embedding, self.architecture.scales
        alone = self.config.images.layers > 0 or scales.embedding is root_of_width
        arguments = ImageInputs(
            x=self.x.address,
            stride=self.x.stride,
            count=width,
            offset=4 * part * padded(width),
            factor=self.builder.scalar(1 / scales.residual(self.config) if alone else self.embedding_factor),
            adds=int(part > 0),
        )
        self.add(layer_inputs.image_inputs, arguments)

    def scale(self, factor: int) -> None:
        """x *= the factor at an address."""
        x = self.x.place
        self.add(sums.scale_and_add, _scaling(x, x, self.config.embedding, factor, NOTHING))

    def leave_aside(self, matrix: Matrix, bias: str, *, private: bool) -> None:
        """Compute matrix * packed + bias into `aside`, to be added to x by add_aside after x was read again."""
        addend = self.bias(bias, self.config.embedding)
        self.product(matrix, self.aside.place, addend=addend, last=True, private=private)

    def add_aside(self, gates: Rows | None = None) -> None:
        """x += aside, times the sigmoid of each row's gate if gates are given: the first value of its row there."""
        self._add(self.aside, gates)

    def _add(self, rows: Rows, gates: Rows | None = None) -> None:
        of_gates = gates.place if gates else NOTHING
        arguments = AddRows(
            x=self.x.address,
            x_stride=self.x.stride,
            y=rows.address,
            y_stride=rows.stride,
            count=self.config.embedding,
            gates=of_gates.address,
            gates_stride=of_gates.stride,
        )
        self.add(sums.add_rows, arguments)

    def _scaled(self, name: str, factor: float, scale: str) -> int:
        read, more = self.loader.vector(name, self.config.embedding), self.loader.vector(scale, 1) if scale else None

        def make() -> NDArray[np.float32]:
            whole = factor * float(more()[0]) if more else factor
            with np.errstate(invalid="ignore", over="ignore"):  # values that are not finite show in the logits
                return read() * whole

        return self.later((padded(self.config.embedding),), make)


def forms(*matrices: Matrix) -> Form:
    """The packed forms of activations that these matrices multiply."""
    together = Form(0)
    for matrix in matrices:
        together |= matrix.format.form
    return together


def pack_arguments(rows: Place, weight: int, epsilon: int, packed: int, *matrices: Matrix, limits: int = 0) -> NormPack:
    """The arguments of Recording.pack."""
    return NormPack(
        x=rows.address,
        stride=rows.stride,
        weight=weight,
        k=matrices[0].k,
        forms=forms(*matrices),
        packed=packed,
        epsilon=epsilon,
        limits=limits,
    )


def product_arguments(
    matrix: Matrix, out: Place, packed: int, addend: Place, *, private: bool, segments: int = 0
) -> Product:
    """The arguments of Recording.product, or with segments of products_of_slots."""
    return Product(
        weights=matrix.address,
        groups=matrix.groups,
        group_bytes=matrix.group_bytes,
        group_rows=matrix.format.group_rows,
        k=matrix.k,
        y=out.address,
        y_stride=out.stride,
        addend=addend.address,
        addend_stride=addend.stride,
        packed=packed,
        private=private,
        segments=segments,
        expert_bytes=matrix.expert_bytes if segments else 0,
    )


def _scaling(out: Place, rows: Place, count: int, factor: int, addend: Place) -> ScaleAndAdd:
    return ScaleAndAdd(
        y=out.address,
        y_stride=out.stride,
        x=rows.address,
        x_stride=rows.stride,
        count=count,
        factor=factor,
        addend=addend.address,
        addend_stride=addend.stride,
    )
