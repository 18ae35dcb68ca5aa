"""Outer products of vectors and broadcast values, the inner step of attention.

A tile of R * C vectors has R rows and C columns; entry r * C + c belongs to row r's vector and column c's value. Rows
are given as a tuple of R addresses, columns as one address and a literal stride.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cpu_kernels.declarations import Intrinsic, TupleOf, int64, operation
from cpu_kernels.isa import Isa, emitted_isa
from cpu_kernels.simd import vectors
from cpu_kernels.simd.arithmetic import exact_fma, fused_multiply_add, prefetch
from cpu_kernels.simd.bytes import added_words, keep_order, look_up, multiply_words
from cpu_kernels.simd.tiles import Tile
from cpu_kernels.simd.vectors import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Values,
    at,
    broadcast,
    f32x16,
    i32x16,
    store,
    view,
)

_WORDS = ir.VectorType(I16, 2 * LANES)


def _halves(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    return vectors.widen_half(builder, vectors.load(builder, where, ir.VectorType(F16, LANES), 2))


def _byte_pairs(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    """32 signed bytes as words, two per lane."""
    given = vectors.load(builder, where, ir.VectorType(I8, 2 * LANES), 1)
    return builder.bitcast(builder.sext(given, _WORDS), i32x16.llvm)


def _smaller(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_signed("<", x, y), x, y)


@operation(lambda count: (0,) * count, lambda count: TupleOf(int64, count), literals=[0])
def no_rows(builder: ir.IRBuilder, count: int) -> Values:
    """A tuple of `count` (literal) addresses, all 0: it only sets the number of rows of a function."""
    return [I64(0)] * count


def _page_rows(like: Sequence[int], table: int, last: int, base: int, page_bytes: int) -> tuple[int, ...]:
    return tuple(base + int(view(table + 4 * min(i, last), np.int32, 1)[0]) * page_bytes for i in range(len(like)))


@operation(_page_rows, 0)
def page_rows(builder: Any, like: Values, table: Any, last: Any, base: Any, page_bytes: Any) -> Values:
    """Addresses of the pages at place numbers table[0], table[1], ...; entries after table[last] repeat it."""
    rows = []
    for i in range(len(like)):
        index = _smaller(builder, I64(i), last)
        page = vectors.load(builder, builder.add(table, builder.mul(index, I64(4))), I32, 4)
        rows.append(builder.add(base, builder.mul(builder.sext(page, I64), page_bytes)))
    return rows


@operation(lambda like, base, step, last: tuple(base + min(i, last) * step for i in range(len(like))), 0)
def spaced_rows(builder: Any, like: Values, base: Any, step: Any, last: Any) -> Values:
    """Addresses base, base + step, ...; those after index `last` repeat it."""
    offsets = [builder.mul(_smaller(builder, I64(i), last), step) for i in range(len(like))]
    return [builder.add(base, offset) for offset in offsets]


def cross(
    name: str, load_row: Callable[..., Any], element: ir.Type, combine: Callable[..., Any], meaning: Callable[..., Any]
) -> Any:
    """An intrinsic name(tile, rows, offset, where, stride) that maps combine(builder, entry, vector, value) over tile.

    The vector is at row + offset, the column's value at where + stride * c. meaning(entry, address of the row's vector,
    address of the column's value): the same in Python.
    """

    def emit(builder: Any, tile: Values, rows: Values, offset: Any, where: Any, stride: int) -> Values:
        columns, new = len(tile) // len(rows), []
        values = [broadcast(builder, at(builder, where, stride * c), element) for c in range(columns)]
        for r, base in enumerate(rows):
            vector = load_row(builder, builder.add(base, offset))
            new += [combine(builder, tile[r * columns + c], vector, value) for c, value in enumerate(values)]
        return new

    def compute(tile: Tile, rows: Sequence[int], offset: int, where: int, stride: int) -> Any:
        columns = len(tile) // len(rows)
        places = [(row + offset, where + stride * c) for row in rows for c in range(columns)]
        return tuple(meaning(total, *place) for total, place in zip(tile, places, strict=True))

    return Intrinsic(name, emit, compute, 5, None, 0, literals=[4])


def _in_single(where: int) -> Any:
    return view(where, np.float16).astype(np.float32)


# tile += sixteen half-precision numbers at row + offset times the column's f32.
cross_fma_f16 = cross(
    "cross_fma_f16",
    _halves,
    F32,
    lambda b, total, x, y: fused_multiply_add(b, x, y, total),
    lambda total, row, value: exact_fma(_in_single(row), view(value, np.float32, 1), total),
)


def _add_products(builder: ir.IRBuilder, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """multiply_words that LLVM must not reassociate with other steps, which would need too many registers."""
    total = multiply_words(builder, total, x, y)
    return total if emitted_isa() is Isa.AVX512_VNNI else keep_order(builder, [total], most=1)[0]


def _add_pairs(total: Any, row: int, value: int) -> Any:
    pairs = view(row, np.int8, 2 * LANES).astype(np.int16).view(np.int32)
    return added_words(total, pairs, view(value, np.int32, 1).repeat(LANES))


# tile += sixteen pairs of bytes at row + offset times the column's pair of words, added in pairs, exactly.
cross_dot2_i8 = cross("cross_dot2_i8", _byte_pairs, I32, _add_products, _add_pairs)
# The same for sixteen pairs of words.
cross_dot2_i16 = cross(
    "cross_dot2_i16",
    lambda b, where: vectors.load(b, where, i32x16.llvm, 4),
    I32,
    _add_products,
    lambda total, row, value: added_words(total, view(row, np.int32), view(value, np.int32, 1).repeat(LANES)),
)


def cross_dot2_levels(levels: Sequence[int]) -> Any:
    """cross_dot2_i8 for nibbles that index a table of 16 numbers in 0..255. Raises ValueError if the first is not 0.

    An intrinsic add(tile, rows, offset, shift, apart, where, stride), which takes four bits of each half of a lane,
    starting at bit `shift` + apart * row.
    """
    table = tuple(levels)
    if table[0] != 0:
        raise ValueError(f"a table of levels begins with 0, not {table[0]}: upper bytes are looked up too")

    def compute(
        tile: Tile, rows: Sequence[int], offset: int, shift: int, apart: int, where: int, stride: int
    ) -> tuple[Any, ...]:
        columns, new = len(tile) // len(rows), []
        for i, total in enumerate(tile):
            lanes = view(rows[i // columns] + offset, np.uint32) >> np.uint32(shift + apart * (i // columns))
            value = view(where + stride * (i % columns), np.int32, 1)
            words = np.array(table, np.int16)[(lanes & 0x000F000F).view(np.int16)].view(np.int32)
            new.append(added_words(total, words, value.repeat(LANES)))
        return tuple(new)

    @operation(compute, 0, literals=[4, 6])
    def cross_dot2_levels(
        builder: Any, tile: Values, rows: Values, offset: Any, shift: Any, apart: int, where: Any, stride: int
    ) -> Values:
        columns, new = len(tile) // len(rows), []
        mask = vectors.constant(i32x16.llvm, 0x000F000F)
        values = [broadcast(builder, at(builder, where, stride * c), I32) for c in range(columns)]
        for r, base in enumerate(rows):
            given = vectors.load(builder, builder.add(base, offset), i32x16.llvm, 4)
            bits = builder.trunc(builder.add(shift, I64(apart * r)), I32)
            words = look_up(builder, table, builder.and_(builder.lshr(given, vectors.splat(builder, bits)), mask))
            new += [_add_products(builder, tile[r * columns + c], words, value) for c, value in enumerate(values)]
        return new

    return cross_dot2_levels


@operation(
    lambda tile, rows, where: tuple(
        view(where + 4 * (i % (len(tile) // len(rows))), np.int32, 1).repeat(LANES) for i in range(len(tile))
    ),
    0,
)
def cross_splat_i32(builder: Any, tile: Values, rows: Values, where: Any) -> Values:
    """A tile with column c's 32-bit integer, at where + 4 c, in every lane."""
    columns = len(tile) // len(rows)
    values = [broadcast(builder, at(builder, where, 4 * c), I32) for c in range(columns)]
    return values * len(rows)


def _scaled(tile: Tile, integers: Tile, rows: Sequence[int], offset: int) -> Any:
    scales = [_in_single(row + offset) for row in rows for _ in range(len(tile) // len(rows))]
    together = zip(integers, scales, tile, strict=True)
    return tuple(exact_fma(whole.astype(np.float32), scale, total) for whole, scale, total in together)


@operation(_scaled, 0)
def cross_scale_f16(builder: Any, tile: Values, integers: Values, rows: Values, offset: Any) -> Values:
    """tile = fma(float(integers), sixteen half-precision scales at row + offset, tile)."""
    columns, new = len(tile) // len(rows), []
    for r, base in enumerate(rows):
        scales = _halves(builder, builder.add(base, offset))
        for i in range(r * columns, (r + 1) * columns):
            whole = builder.sitofp(integers[i], f32x16.llvm)
            new.append(fused_multiply_add(builder, whole, scales, tile[i]))
    return new


def _times_factors(integers: Tile, rows: Sequence[int], offset: int) -> Any:
    factors = [view(row + offset, np.float32) for row in rows for _ in range(len(integers) // len(rows))]
    return tuple(whole.astype(np.float32) * factor for whole, factor in zip(integers, factors, strict=True))


@operation(_times_factors, lambda width, _rows, _offset: TupleOf(f32x16, width))
def cross_scaled_f32(builder: Any, integers: Values, rows: Values, offset: Any) -> Values:
    """float(integers) times the sixteen floats at row + offset."""
    columns = len(integers) // len(rows)
    factors = [vectors.load(builder, builder.add(base, offset), f32x16.llvm, 4) for base in rows]
    return [builder.fmul(builder.sitofp(value, f32x16.llvm), factors[i // columns]) for i, value in enumerate(integers)]


@operation(lambda integers: tuple(each.astype(np.float32) for each in integers), lambda width: TupleOf(f32x16, width))
def tile_to_f32(builder: ir.IRBuilder, integers: Values) -> Values:
    """The tile's integers as floats."""
    return [builder.sitofp(value, f32x16.llvm) for value in integers]


def _stored(tile: Tile, rows: Sequence[int], stride: int, factors: int = 0) -> None:
    columns = len(tile) // len(rows)
    for i, value in enumerate(tile):
        scale = view(factors + 4 * (i % columns), np.float32, 1) if factors else np.float32(1)
        view(rows[i // columns] + i % columns * stride, np.float32)[:] = value * scale


@operation(_stored)
def cross_store(builder: Any, tile: Values, rows: Values, stride: Any) -> None:
    """Store row r's vector of column c at row r + c * stride."""
    columns = len(tile) // len(rows)
    for i, value in enumerate(tile):
        store(builder, builder.add(rows[i // columns], builder.mul(stride, I64(i % columns))), value, 4)


@operation(_stored)
def cross_store_scaled(builder: Any, tile: Values, rows: Values, stride: Any, factors: Any) -> None:
    """cross_store of the vectors times column c's f32 at factors + 4 c."""
    columns = len(tile) // len(rows)
    scales = [broadcast(builder, at(builder, factors, 4 * c), F32) for c in range(columns)]
    scaled = [builder.fmul(value, scales[i % columns]) for i, value in enumerate(tile)]
    cross_store.emit(builder, scaled, rows, stride)


def _added_to_memory(tile: Tile, rows: Sequence[int], stride: int, factors: int) -> None:
    columns = len(tile) // len(rows)
    places = [view(rows[i // columns] + i % columns * stride, np.float32) for i in range(len(tile))]
    scales = [view(factors + 4 * (i % columns), np.float32, 1) for i in range(len(tile))]
    sums = [exact_fma(value, scale, place) for value, scale, place in zip(tile, scales, places, strict=True)]
    for place, total in zip(places, sums, strict=True):
        place[:] = total


@operation(_added_to_memory)
def cross_add_scaled(builder: Any, tile: Values, rows: Values, stride: Any, factors: Any) -> None:
    """cross_store_scaled that adds to the stored vectors. A row that is given twice is added once."""
    columns = len(tile) // len(rows)
    for c in range(columns):
        scale = broadcast(builder, at(builder, factors, 4 * c), F32)
        places = [builder.add(row, builder.mul(stride, I64(c))) for row in rows]
        sums = [
            fused_multiply_add(builder, value, scale, vectors.load(builder, place, f32x16.llvm, 4))
            for value, place in zip(tile[c::columns], places, strict=True)
        ]
        for place, total in zip(places, sums, strict=True):
            store(builder, place, total, 4)


@operation(lambda rows, offset, lines, level: None, literals=[2, 3])
def prefetch_rows(builder: Any, rows: Values, offset: Any, lines: int, level: int) -> None:
    """Prefetch `lines` (literal) cache lines at row + offset, for every row, into the cache of a level (literal)."""
    for base in rows:
        for i in range(lines):
            prefetch(builder, builder.add(builder.add(base, offset), I64(64 * i)), level)
