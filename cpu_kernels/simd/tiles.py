"""Register tiles: one vector of sixteen output rows for each of `n` tokens, held in a tuple of n vectors.

The width n is part of a tile's type, so one function written over tiles compiles to fully unrolled code for each width.
The tokens' operands are consecutive: token t's 32-bit value is at p + 4 t.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from cpu_kernels.declarations import Intrinsic, TupleOf, int64, operation
from cpu_kernels.simd import bytes as products
from cpu_kernels.simd.arithmetic import exact_fma, fused_multiply_add
from cpu_kernels.simd.vectors import F32, I32, I64, Values, at, broadcast, constant, f32x16, i32x16, load, store, view

Tile = Sequence[NDArray[Any]]


def operands(where: int, count: int, dtype: Any = np.int32) -> NDArray[Any]:
    """The tokens' values, each in every lane, [token][lane], for use in Python."""
    return view(where, dtype, count)[:, None].repeat(16, axis=1)


def _zero(vector: Any, dtype: Any) -> Any:
    @operation(lambda width: (np.zeros(16, dtype),) * width, lambda width: TupleOf(vector, width), literals=[0])
    def zero_tile(builder: ir.IRBuilder, width: int) -> Values:
        """A tile of zeros for `width` (literal) tokens."""
        return [constant(vector.llvm, 0)] * width

    return zero_tile


zero_tile_i32, zero_tile_f32 = _zero(i32x16, np.int32), _zero(f32x16, np.float32)


def _each(
    name: str, arity: int, emit: Callable[..., ir.Value], meaning: Callable[..., Any], operand: ir.Type | None = None
) -> Any:
    """An intrinsic name(tile, *others) that maps emit(builder, member, *others) over the tile.

    If another argument is a tile, emit gets its member of the same token. If an operand type is given, the last
    argument is the address of the tokens' operands, and emit gets each token's operand in every lane.
    """

    def emit_all(builder: ir.IRBuilder, tile: Values, *others: Any) -> Values:
        columns = [tile, *(other if isinstance(other, list) else [other] * len(tile) for other in others)]
        if operand is not None:
            columns[-1] = [broadcast(builder, at(builder, others[-1], 4 * t), operand) for t in range(len(tile))]
        return [emit(builder, *row) for row in zip(*columns, strict=True)]

    def compute(tile: Tile, *others: Any) -> Any:
        if operand is not None:
            others = (*others[:-1], tuple(operands(others[-1], len(tile), np.float32 if operand is F32 else np.int32)))
        rows = ([other[t] if isinstance(other, tuple) else other for other in others] for t in range(len(tile)))
        return tuple(meaning(member, *row) for member, row in zip(tile, rows, strict=True))

    return Intrinsic(name, emit_all, compute, arity, None, 0)


# tile[t] + the products of a vector of bytes up to 127 and the token's four bytes.
tile_dot4 = _each("tile_dot4", 3, products.add_small, products.added_small_wide, I32)
# tile[t] + the products of a vector of words and the token's two words, added in pairs.
tile_dot2 = _each("tile_dot2", 3, products.multiply_words, products.added_words, I32)
# The tokens' 32-bit integers in every lane; the tile only sets the number of tokens.
tile_broadcast = _each("tile_broadcast", 2, lambda _b, _member, x: x, lambda _member, x: x, I32)
# Initial values of sums of products in offset binary, given the address of the tokens' -128 * sums of activations.
start_offset = _each(
    "start_offset",
    2,
    lambda _b, _zero, x: products.offset_start(x),
    lambda zero, x: x if products.BYTE_OFFSET else zero,
    I32,
)
# tile[t] - 128 * the token's sum if byte products use offset binary, given the address of the tokens' -32 * sums.
add_offset = _each(
    "add_offset",
    2,
    lambda b, total, x: b.add(total, b.shl(x, constant(i32x16.llvm, 2))) if products.BYTE_OFFSET else total,
    lambda total, x: total + (x << np.int32(2)) if products.BYTE_OFFSET else total,
    I32,
)
# The sum of two tiles of 32-bit integers, and a tile's 32-bit integers times a vector's.
add_tiles = _each("add_tiles", 2, lambda b, x, y: b.add(x, y), np.add)
multiplied = _each("multiplied", 2, lambda b, x, factor: b.mul(x, factor), np.multiply)
# tile[t] + partial[t] * factor, where partial_factor made the factor.
add_partial = _each(
    "add_partial",
    3,
    lambda b, total, partial, factor: b.add(total, products.widen_partial(b, partial, factor)),
    lambda total, partial, factor: total + products.widened(partial, factor),
)
# fma(vector, the token's f32, tile[t]).
tile_fma = _each(
    "tile_fma",
    3,
    lambda b, total, x, y: fused_multiply_add(b, x, y, total),
    lambda total, x, y: exact_fma(x, y, total),
    F32,
)
# A tile of floats times a vector.
tile_scaled = _each("tile_scaled", 2, lambda b, x, factor: b.fmul(x, factor), np.multiply)


def _add_scaled(builder: ir.IRBuilder, total: ir.Value, integer: ir.Value, scale: ir.Value, x: ir.Value) -> ir.Value:
    return fused_multiply_add(builder, builder.sitofp(integer, f32x16.llvm), builder.fmul(scale, x), total)


# fma(float(integers[t]), scale * the token's f32, tile[t]).
tile_add_scaled = _each(
    "tile_add_scaled",
    4,
    _add_scaled,
    lambda total, integer, scale, x: exact_fma(integer.astype(np.float32), scale * x, total),
    F32,
)


def start_biased(bias: int) -> Any:
    """An intrinsic start(zero, sums): -bias * the tokens' sums, where -128 * sums is stored. bias: a power of two."""
    bits = (128 // bias).bit_length() - 1
    down = constant(i32x16.llvm, bits)
    return _each("start_biased", 2, lambda b, _, x: b.ashr(x, down), lambda _, x: x >> np.int32(bits), I32)


def _add_in_memory(integers: Tile, scale: Any, where: int, sums: int) -> None:
    scales = scale * operands(where, len(integers), np.float32)
    totals = view(sums, np.float32, 16 * len(integers)).reshape(-1, 16)
    totals[:] = exact_fma(np.stack(list(integers)).astype(np.float32), scales, totals)


@operation(_add_in_memory)
def tile_add_scaled_in_memory(builder: ir.IRBuilder, integers: Values, scale: ir.Value, where: Any, sums: Any) -> None:
    """tile_add_scaled to sums in memory, 64 bytes per token, which leaves registers free for products."""
    for t, integer in enumerate(integers):
        slot, x = at(builder, sums, 64 * t), broadcast(builder, at(builder, where, 4 * t), F32)
        store(builder, slot, _add_scaled(builder, load(builder, slot, f32x16.llvm, 64), integer, scale, x), 64)


@operation(
    lambda like, where: tuple(view(where, np.float32, 16 * len(like)).reshape(-1, 16).copy()),
    lambda like, where: TupleOf(f32x16, like),
)
def tile_load_f32(builder: ir.IRBuilder, like: Values, where: ir.Value) -> Values:
    """Load a tile of floats as wide as `like`; token t's vector is at where + 64 t."""
    return [load(builder, at(builder, where, 64 * t), f32x16.llvm, 64) for t in range(len(like))]


def _store_tile(tile: Tile, where: int) -> None:
    view(where, np.float32, 16 * len(tile)).reshape(-1, 16)[:] = tile


@operation(_store_tile)
def tile_store(builder: ir.IRBuilder, tile: Values, where: ir.Value) -> None:
    """Store token t's vector of floats at where + 64 t."""
    for t, value in enumerate(tile):
        store(builder, at(builder, where, 64 * t), value, 64)


@operation(len, int64)
def tile_width(builder: ir.IRBuilder, tile: Values) -> ir.Value:
    """The number of tokens in a tile, a compile-time constant."""
    return I64(len(tile))
