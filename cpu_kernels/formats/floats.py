"""F32, F16 and BF16: plain values times plain activations.

Packed group of 32 rows: k vectors of 16 values of the first 16 rows, then those of the others, in the file's own type.
Products are added in order of k. If the registers hold the sums of both halves, both are computed together: that hides
the latency of dependent additions, and loads a token's value once for two products.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from cpu_kernels.declarations import TupleOf, inner, operation
from cpu_kernels.formats.source import Source
from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.isa import POLICY
from cpu_kernels.records import Act, Form, field
from cpu_kernels.simd import vectors
from cpu_kernels.simd.arithmetic import exact_fma, fused_multiply_add, prefetch_lines
from cpu_kernels.simd.bytes import keep_order
from cpu_kernels.simd.tiles import Tile, operands, tile_fma, tile_load_f32, tile_store, tile_width
from cpu_kernels.simd.vectors import (
    F32,
    Values,
    at,
    broadcast,
    f32x16,
    get_f16,
    get_f32,
    get_i16,
    get_i32,
    load_bf16,
    load_f16,
    load_f32,
    put_f32,
    put_i16,
    put_i32,
    view,
)

_WIDEST = 12 if POLICY.vector_parts == 1 else 4 // POLICY.vector_parts
"""Tokens whose sums of both halves fit into the registers."""


@operation(
    lambda like, where: tuple(view(where, np.float32, 32 * len(like)).reshape(-1, 16).copy()),
    lambda like, where: TupleOf(f32x16, 2 * like),
)
def load_halves(builder: ir.IRBuilder, like: Values, where: ir.Value) -> Values:
    """tile_load_f32 of both halves of a group, one after the other, for a tile as wide as `like`."""
    return [vectors.load(builder, at(builder, where, 64 * t), f32x16.llvm, 64) for t in range(2 * len(like))]


def _added(total: Tile, low: Any, high: Any, where: int) -> Any:
    x = operands(where, len(total) // 2, np.float32)
    weights = [low] * len(x) + [high] * len(x)
    return tuple(exact_fma(*row) for row in zip(weights, [*x, *x], total, strict=True))


@operation(_added, 0)
def fma_halves(builder: ir.IRBuilder, total: Values, low: ir.Value, high: ir.Value, where: ir.Value) -> Values:
    """tile_fma of both halves, token by token, so that few of the tokens' values occupy registers."""
    width = len(total) // 2
    new = list(total)
    for t in range(width):
        x = broadcast(builder, at(builder, where, 4 * t), F32)
        pair = [fused_multiply_add(builder, w, x, total[t + i * width]) for i, w in enumerate((low, high))]
        new[t], new[t + width] = keep_order(builder, pair, most=2)
    return new


@dataclass(kw_only=True, eq=False)
class Floats(WeightFormat):
    """A format of floats.

    load(p): sixteen values as a vector of f32. unpack(source, to): one value to f32.
    """

    form, group_rows, block = Form.FLOATS, 32, 1
    load: Any
    unpack: Any

    @property
    def nbytes(self) -> int:
        """Bytes of a value of 32 rows."""
        return 32 * self.source.nbytes

    def row_packer(self) -> Any:
        """See WeightFormat."""
        size = self.source.nbytes
        get, put = (get_i16, put_i16) if size == 2 else (get_i32, put_i32)

        @inner
        def pack_row(source: int, group: int, lane: int, k: int) -> None:
            for i in range(k):
                value = get(source + i * size)
                put(group + (lane // 16 * k * 16 + i * 16 + lane % 16) * size, value)

        return pack_row

    def row_unpacker(self) -> Any:
        """See WeightFormat."""
        unpack, size = self.unpack, self.source.nbytes

        @inner
        def unpack_row(group: int, lane: int, k: int, out: int, memory: int) -> None:
            for i in range(k):
                unpack(group + (lane // 16 * k * 16 + i * 16 + lane % 16) * size, out + i * 4)

        return unpack_row

    def tile_adder(self) -> Any:
        """See WeightFormat."""
        load, step_bytes = self.load, 16 * self.source.nbytes
        steps_of_line = 64 // step_bytes

        @inner
        def tile(
            zero: Any, group: int, k: int, act: int, index: int, sums: int, start: int, end: int, ahead: int
        ) -> None:
            width = tile_width(zero)
            x = field(act, Act.FLOATS) + index * width * k * 4
            if width <= _WIDEST:
                total = load_halves(zero, sums)
                for i in range(start, end):
                    p, q = group + i * step_bytes, group + (k + i) * step_bytes
                    if ahead > 0 and i % steps_of_line == 0:
                        prefetch_lines(p + ahead, 1)
                        prefetch_lines(q + ahead, 1)
                    total = fma_halves(total, load(p), load(q), x + i * 4 * width)
                tile_store(total, sums)
            else:
                for half in range(2):
                    total = tile_load_f32(zero, sums + half * 64 * width)
                    for i in range(start, end):
                        p = group + (half * k + i) * step_bytes
                        if ahead > 0:
                            prefetch_lines(p + ahead, 1)
                        total = tile_fma(total, load(p), x + i * 4 * width)
                    tile_store(total, sums + half * 64 * width)

        return tile


@inner
def _unpack_f16(source: int, to: int) -> None:
    put_f32(to, get_f16(source))


@inner
def _unpack_bf16(source: int, to: int) -> None:
    put_i32(to, (get_i16(source) & 0xFFFF) << 16)


@inner
def _unpack_f32(source: int, to: int) -> None:
    put_f32(to, get_f32(source))


FORMATS = {
    each.name: each
    for each in (
        Floats(name="F32", source=Source(nbytes=4, values=1), load=load_f32, unpack=_unpack_f32),
        Floats(name="F16", source=Source(nbytes=2, values=1), load=load_f16, unpack=_unpack_f16),
        Floats(name="BF16", source=Source(nbytes=2, values=1), load=load_bf16, unpack=_unpack_bf16),
    )
}
