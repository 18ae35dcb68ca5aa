"""Lane-wise products of row vectors and column vectors, whose lanes are summed at the end.

A tile of R * C vectors has R rows and C columns as in cpu_kernels.simd.cross, but a column has a vector instead of one
value for all lanes. So one page layout, in which a vector is sixteen tokens, serves both scores and sums over tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cpu_kernels.declarations import operation
from cpu_kernels.simd import vectors
from cpu_kernels.simd.arithmetic import exact_fma, fused_multiply_add, sum_of_halves
from cpu_kernels.simd.tiles import Tile
from cpu_kernels.simd.vectors import F16, I8, I16, I32, I64, LANES, Values, constant, f32x16, i32x16, store, view


def _add_products(builder: ir.IRBuilder, tile: Values, rows: Values, where: Any, stride: Any) -> Values:
    """tile + the rows' vectors times the columns' vectors at where + stride * c."""
    columns = len(tile) // len(rows)
    factors = [
        vectors.load(builder, builder.add(where, builder.mul(stride, I64(c))), f32x16.llvm, 4) for c in range(columns)
    ]
    return [fused_multiply_add(builder, rows[i // columns], factors[i % columns], x) for i, x in enumerate(tile)]


def _added_products(tile: Tile, rows: Sequence[Any], where: int, stride: int) -> Any:
    columns = len(tile) // len(rows)
    factors = [view(where + stride * c, np.float32) for c in range(columns)]
    return tuple(exact_fma(rows[i // columns], factors[i % columns], x) for i, x in enumerate(tile))


def _add_halves(tile: Tile, rows: Sequence[int], offset: int, where: int, stride: int) -> Any:
    halves = [view(row + offset, np.float16).astype(np.float32) for row in rows]
    return _added_products(tile, halves, where, stride)


@operation(_add_halves, 0)
def lanes_fma_f16(builder: Any, tile: Values, rows: Values, offset: Any, where: Any, stride: Any) -> Values:
    """tile += sixteen half-precision numbers at row + offset times the column's floats at where + stride * c."""
    halves = [
        vectors.widen_half(builder, vectors.load(builder, builder.add(row, offset), ir.VectorType(F16, LANES), 2))
        for row in rows
    ]
    return _add_products(builder, tile, halves, where, stride)


def _add_bytes(tile: Tile, rows: Sequence[int], offset: int, where: int, stride: int) -> Any:
    pairs = [view(row + offset, np.int8, 2 * LANES).reshape(LANES, 2).astype(np.float32) for row in rows]
    return _added_products(tile, [pair[:, i] for pair in pairs for i in range(2)], where, stride)


@operation(_add_bytes, 0)
def lanes_fma_i8(builder: Any, tile: Values, rows: Values, offset: Any, where: Any, stride: Any) -> Values:
    """lanes_fma_f16 for signed bytes in pairs: each address, of sixteen pairs, is for two rows of the tile."""
    singles = []
    byte, rest = (constant(i32x16.llvm, bits) for bits in (8, 24))
    for row in rows:
        given = vectors.load(builder, builder.add(row, offset), ir.VectorType(I8, 2 * LANES), 1)
        pair = builder.sext(builder.bitcast(given, ir.VectorType(I16, LANES)), i32x16.llvm)
        first, second = builder.ashr(builder.shl(pair, rest), rest), builder.ashr(pair, byte)
        singles += [builder.sitofp(each, f32x16.llvm) for each in (first, second)]
    return _add_products(builder, tile, singles, where, stride)


def _store_sums(tile: Tile, columns: int, where: int, stride: int) -> None:
    for i, vector in enumerate(tile):
        view(where + i % columns * stride + i // columns * 4, np.float32, 1)[:] = sum_of_halves(vector)


@operation(_store_sums, literals=[1])
def store_sums(builder: Any, tile: Values, columns: int, where: Any, stride: Any) -> None:
    """Store the sums of the vectors' lanes; those of column c's rows are consecutive at where + c * stride.

    columns: their number, a literal. Lanes are added by halves: the upper eight to the lower eight, and so on.
    """
    rows = len(tile) // columns
    ordered = [tile[row * columns + column] for column in range(columns) for row in range(rows)]
    lanes = LANES
    while lanes > 1:
        # Each vector now holds LANES / lanes partial sums of `lanes` numbers each.
        parts, half = LANES // lanes, lanes // 2
        firsts = [part * lanes + lane for part in range(2 * parts) for lane in range(half)]
        pairs = list(zip(ordered[::2], ordered[1::2], strict=True)) if len(ordered) > 1 else [(ordered[0], ordered[0])]
        ordered = []
        for pair in pairs:
            lower, upper = (
                builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(I32, LANES), [i + more for i in firsts]))
                for more in (0, half)
            )
            ordered.append(builder.fadd(lower, upper))
        lanes = half
    for column in range(columns):
        order = ir.Constant(ir.VectorType(I32, rows), list(range(column * rows, (column + 1) * rows)))
        sums = builder.shuffle_vector(ordered[0], ordered[0], order)
        store(builder, builder.add(where, builder.mul(stride, I64(column))), sums, 4)
