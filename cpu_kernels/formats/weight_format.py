"""The common interface of packed weight formats, and the kernels that pack and unpack rows.

Arguments of a repack: 0 source, 1 bytes of a source row, 2 packed weights, 3 bytes of a group, 4 rows of a group, 5 k,
6 row map (int32 per packed row: the source row, or -1 for a row of zeros), 7 groups.
Arguments of an embedding: 0 packed weights, 1 bytes of a group, 2 rows of a group, 3 k, 4 x, 5 x stride,
6 address of a factor of all rows, 7 address of the matrix row (int32) of each row, or 0 to use the step's tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.activations import pack_row
from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.formats.source import Source
from cpu_kernels.isa import POLICY
from cpu_kernels.kernel import Function, Kernel
from cpu_kernels.matmul import Product, Tiles, plain_tiles, product
from cpu_kernels.records import TILE_WIDTHS, Ahead, Form, Step, argument, field, scratch, stage_rows
from cpu_kernels.self_check import Sample
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.vectors import get_f32, get_i32, put_f32, put_u8


class Repack(Arguments):
    """Arguments of the kernels that pack rows of a file."""

    source: int  # rows of bytes, as in a file
    row_bytes: int  # bytes of a row
    packed: int  # groups of rows, the result
    group_bytes: int  # bytes of a group
    group_rows: int  # rows of a group
    k: int  # values of a row
    rows: int  # int32: the row of the source for each packed row, -1 for zeros
    groups: int  # of rows


_REPACK = indices_of(Repack)


class Embed(Arguments):
    """Arguments of the kernels that unpack the rows of tokens."""

    weights: int  # packed groups of rows
    group_bytes: int  # bytes of a group
    group_rows: int  # rows of a group
    k: int  # values of a row
    x: int  # rows of floats, written
    stride: int  # bytes from row to row
    factor: int  # address of a float
    tokens: int = 0  # int32: a row of weights for each row; 0 for the step's tokens


_EMBED = indices_of(Embed)


@dataclass(kw_only=True, eq=False)
class WeightFormat(ABC):
    """A packed layout of a matrix in which a vector lane is an output row, and the kernels that read it.

    name: the GGUF block type it is packed from. form: the packed activations that it multiplies. Rows are stored in
    groups of group_rows. The kernels' functions are made only if they must be compiled.
    """

    name: str
    source: Source
    form: ClassVar[Form]
    group_rows: ClassVar[int]

    def __post_init__(self) -> None:
        """Declare the kernels."""
        module = type(self).__module__
        self.repack = Kernel(f"{self.name}.repack", module, self._repack, self._repack_samples, Repack)
        self.embed = Kernel(f"{self.name}.embed", module, self._embed, self._embed_samples, Embed)
        self.matmul: dict[int, Kernel] = {}
        for width in TILE_WIDTHS:
            make, samples = partial(self._matmul, width), partial(self._matmul_samples, width)
            self.matmul[width] = Kernel(f"{self.name}.matmul_{width}", module, make, samples, Product)

    @property
    @abstractmethod
    def block(self) -> int:
        """Values of a row that are packed together; its length must be a multiple."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that `block` values of each of a group's rows take."""

    @abstractmethod
    def row_packer(self) -> Any:
        """Function pack_row(source, group, lane, k), which packs a row of the file into its lane of a group."""

    @abstractmethod
    def row_unpacker(self) -> Any:
        """Function unpack_row(group, lane, k, out, memory), which writes a lane's values as floats."""

    def tile_adder(self) -> Any:
        """The function `tile` for a register tile, see cpu_kernels.matmul; not used by formats with other tiles."""
        raise NotImplementedError

    def tiles(self, width: int) -> Tiles:
        """How groups of rows are multiplied with tiles of `width` tokens."""
        return plain_tiles(self.tile_adder(), width, self.group_rows // 16)

    def group_bytes(self, k: int) -> int:
        """Bytes of a group of rows of k values."""
        return k // self.block * self.nbytes

    def _raw(self, s: Sample, rows: int, k: int) -> NDArray[np.uint8]:
        """Random rows in the file's layout: uint8[rows, bytes of a row]."""
        return self.source.random(s.random, rows * k // self.source.values).reshape(rows, -1)

    def _packed(self, s: Sample, rows: int, k: int) -> int:
        """Random packed weights."""
        raw, size = self._raw(s, rows, k), self.group_bytes(k)
        packed, pack = s.zeros(rows // self.group_rows * size, np.uint8), self.row_packer()
        for row in range(rows):
            group = packed + row // self.group_rows * size
            pack(raw[row].ctypes.data, group, row % self.group_rows, k)
        return packed

    def _repack_samples(self) -> Iterator[Sample]:
        s, k = Sample(), 512
        raw, groups = self._raw(s, 3, k), 2
        rows = np.full(groups * self.group_rows, -1)
        rows[:6] = (2, 0, -1, 1, 1, 0)
        packed = s.zeros(groups * self.group_bytes(k), np.uint8)
        size, order = self.group_bytes(k), s.array(rows[::-1], np.int32)
        yield s.arguments(s.array(raw, np.uint8), raw.shape[1], packed, size, self.group_rows, k, order, groups)

    def _embed_samples(self) -> Iterator[Sample]:
        for factor in (1.0, 3.0):
            s, k = Sample(rows=2), 256
            s.step({Step.TOKENS: s.array([1, 33], np.int32)})
            packed, size = self._packed(s, 64, k), self.group_bytes(k)
            yield s.arguments(packed, size, self.group_rows, k, s.zeros(2 * k), 4 * k, s.array([factor]))

    def _matmul_samples(self, width: int) -> Iterator[Sample]:
        """A few tiles, plain and with two experts; also enough tiles to use panels, if the format has them."""
        k, out, few = max(64, 2 * self.source.values, 2 * self.block), 64, 1 if width == 1 else width + 1
        many = [width * POLICY.panel_tiles + 1] if POLICY.panel_tiles and width > 1 and self.block == 256 else []
        for rows, experts in ((few, False), *((rows, False) for rows in many), (2 * width, True)):
            s = Sample(rows=rows, width=width)
            act = s.activations(k)
            for row in range(rows):
                values = s.random.standard_normal(k).astype(np.float32)
                pack_row(values.ctypes.data, 0, k, k, int(self.form), width, row, act)
            weights, size, groups = self._packed(s, out, k), self.group_bytes(k), out // self.group_rows
            y, addend = s.zeros((rows + width) * out), s.normal(rows + width, out)
            matrix, segments, half = (groups, size, self.group_rows, k, y, 4 * out), 0, 0
            if experts:
                # Two experts with half of the rows of the matrix each.
                matrix, half, addend = (groups // 2, *matrix[1:5], 2 * out), groups // 2 * size, 0
                segments = s.array([2, 1, 0, 1, 0, 1, 1], np.int64)
            yield s.arguments(weights, *matrix, addend, 4 * out, act, 0 if experts else 1, segments, half)

    def _repack(self) -> Function:
        """Packs rows; threads divide the groups."""
        pack_row = self.row_packer()

        def repack(op: int, step: int, thread: int, threads: int) -> None:
            group_bytes, group_rows = argument(op, _REPACK.group_bytes), argument(op, _REPACK.group_rows)
            k, rows = argument(op, _REPACK.k), argument(op, _REPACK.rows)
            groups = argument(op, _REPACK.groups)
            first, last = first_share(op, step, groups, thread, threads)
            while first >= 0:
                for g in range(first, last):
                    group = argument(op, _REPACK.packed) + g * group_bytes
                    for i in range(group_bytes):
                        put_u8(group + i, 0)
                    for lane in range(group_rows):
                        row = get_i32(rows + 4 * (g * group_rows + lane))
                        if row >= 0:
                            pack_row(
                                argument(op, _REPACK.source) + row * argument(op, _REPACK.row_bytes), group, lane, k
                            )
                first, last = next_share(op, step, groups, thread, threads)

        return repack

    def _embed(self) -> Function:
        """x[row] = factor * the packed row of the row's token."""
        unpack_row = self.row_unpacker()

        def embed(op: int, step: int, thread: int, threads: int) -> None:
            group_bytes, group_rows = argument(op, _EMBED.group_bytes), argument(op, _EMBED.group_rows)
            k = argument(op, _EMBED.k)
            factor = get_f32(argument(op, _EMBED.factor))
            rows = stage_rows(op, step)
            tokens = argument(op, _EMBED.tokens) if argument(op, _EMBED.tokens) != 0 else field(step, Step.TOKENS)
            first, last = first_share(op, step, rows, thread, threads)
            while first >= 0:
                for row in range(first, last):
                    token = get_i32(tokens + 4 * row)
                    x = argument(op, _EMBED.x) + row * argument(op, _EMBED.stride)
                    group = argument(op, _EMBED.weights) + token // group_rows * group_bytes
                    unpack_row(group, token % group_rows, k, x, scratch(step, thread))
                    if factor != np.float32(1.0):
                        for i in range(k):
                            put_f32(x + 4 * i, get_f32(x + 4 * i) * factor)
                first, last = next_share(op, step, rows, thread, threads)

        return embed

    def _matmul(self, width: int) -> Function:
        if width > 1:
            return product(self.tiles(width), Ahead.TILES)
        return product(self.tiles(1), Ahead.BLOCKS_256 if self.form is Form.BLOCKS_256 else Ahead.BLOCKS_32)
