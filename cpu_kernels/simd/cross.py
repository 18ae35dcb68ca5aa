"""Several vectors with several broadcast values, every one with every other: the inner step of attention.

A tile of R * C vectors has R rows and C columns, entry r * C + c belonging to row r's vector and column c's value. Rows
are given as a tuple of R addresses, columns as one address and the literal distance from one to the next.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cpu_kernels.isa import Isa, emitted_isa
from cpu_kernels.simd.arithmetic import exact_fma, fused_multiply_add, prefetch
from cpu_kernels.simd.bytes import added_words, keep_order, multiply_words
from cpu_kernels.simd.declarations import address, int64, intrinsic, literal_value, none, tuple_of
from cpu_kernels.simd.tiles import members
from cpu_kernels.simd.vectors import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    at,
    broadcast,
    f32x16,
    i32x16,
    load,
    store,
    view,
    widen_half,
)

_WORDS = ir.VectorType(I16, 2 * LANES)


def _halves(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    return widen_half(builder, load(builder, where, ir.VectorType(F16, LANES), 2))


def _byte_pairs(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    """Thirty-two signed bytes as words, two to a lane."""
    return builder.bitcast(builder.sext(load(builder, where, ir.VectorType(I8, 2 * LANES), 1), _WORDS), i32x16.llvm)


def _smaller(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_signed("<", x, y), x, y)


@intrinsic(lambda count: (0,) * count, literals=True)
def no_rows(context: Any, count: Any) -> Any:
    """A tuple of `count` (literal) addresses, all 0: what says how many rows a function works on."""
    if literal_value(count) is None:
        return None
    rows = tuple_of(int64, count.literal_value)

    def codegen(context: Any, builder: Any, _sig: Any, _args: Any) -> Any:
        return context.make_tuple(builder, rows, [I64(0)] * rows.count)

    return rows(count), codegen


def _page_rows(like: Sequence[int], table: int, last: int, base: int, page_bytes: int) -> tuple[int, ...]:
    return tuple(base + int(view(table + 4 * min(i, last), np.int32, 1)[0]) * page_bytes for i in range(len(like)))


@intrinsic(_page_rows)
def page_rows(context: Any, like: Any, table: Any, last: Any, base: Any, page_bytes: Any) -> Any:
    """Addresses of the pages that table[0], table[1], ... name, those behind table[last] being table[last] again."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        rows = []
        for i in range(like.count):
            index = _smaller(builder, I64(i), args[2])
            page = load(builder, builder.add(args[1], builder.mul(index, I64(4))), I32, 4)
            rows.append(builder.add(args[3], builder.mul(builder.sext(page, I64), args[4])))
        return context.make_tuple(builder, like, rows)

    return like(like, address, int64, address, int64), codegen


@intrinsic(lambda like, base, step, last: tuple(base + min(i, last) * step for i in range(len(like))))
def spaced_rows(context: Any, like: Any, base: Any, step: Any, last: Any) -> Any:
    """Addresses base, base + step, ..., those behind number `last` being that one again."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        offsets = [builder.mul(_smaller(builder, I64(i), args[3]), args[2]) for i in range(like.count)]
        return context.make_tuple(builder, like, [builder.add(args[1], offset) for offset in offsets])

    return like(like, address, int64, int64), codegen


def _cross(
    name: str,
    load_row: Callable[[ir.IRBuilder, ir.Value], ir.Value],
    element: ir.Type,
    combine: Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value],
    meaning: Callable[[Any, int, int], Any],
) -> Any:
    """meaning(total, address of the row's vector, address of the column's value)."""

    def compute(acc: Sequence[Any], rows: Sequence[int], offset: int, where: int, stride: int) -> Any:
        columns = len(acc) // len(rows)
        places = [(row + offset, where + stride * c) for row in rows for c in range(columns)]
        return tuple(meaning(total, *place) for total, place in zip(acc, places, strict=True))

    def typer(context: Any, acc: Any, rows: Any, offset: Any, where: Any, stride: Any) -> Any:
        if literal_value(stride) is None:
            return None
        columns = acc.count // rows.count

        def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
            totals = members(builder, acc, args[0])
            places = [at(builder, args[3], stride.literal_value * c) for c in range(columns)]
            values = [broadcast(builder, place, element) for place in places]
            for r, base in enumerate(members(builder, rows, args[1])):
                vector = load_row(builder, builder.add(base, args[2]))
                for c, value in enumerate(values):
                    totals[r * columns + c] = combine(builder, totals[r * columns + c], vector, value)
            return context.make_tuple(builder, acc, totals)

        return acc(acc, rows, address, address, stride), codegen

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(compute, literals=True)(typer)


def _in_single(where: int) -> Any:
    return view(where, np.float16).astype(np.float32)


# acc += sixteen half-precision numbers at row + offset times the column's f32.
cross_fma_f16 = _cross(
    "cross_fma_f16",
    _halves,
    F32,
    lambda b, total, x, y: fused_multiply_add(b, x, y, total),
    lambda total, row, value: exact_fma(_in_single(row), view(value, np.float32, 1), total),
)


def _add_products(builder: ir.IRBuilder, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """multiply_words whose sum LLVM may not regroup with those of other steps: too few registers are left for that."""
    total = multiply_words(builder, total, x, y)
    return total if emitted_isa() is Isa.AVX512_VNNI else keep_order(builder, [total], most=1)[0]


def _add_pairs(total: Any, row: int, value: int) -> Any:
    pairs = view(row, np.int8, 2 * LANES).astype(np.int16).view(np.int32)
    return added_words(total, pairs, view(value, np.int32, 1).repeat(LANES))


# acc += sixteen pairs of bytes at row + offset times the column's pair of words, added in pairs, exactly.
cross_dot2_i8 = _cross("cross_dot2_i8", _byte_pairs, I32, _add_products, _add_pairs)


def _scaled(acc: Sequence[Any], integers: Sequence[Any], rows: Sequence[int], offset: int) -> Any:
    scales = [_in_single(row + offset) for row in rows for _ in range(len(acc) // len(rows))]
    together = zip(integers, scales, acc, strict=True)
    return tuple(exact_fma(whole.astype(np.float32), scale, total) for whole, scale, total in together)


@intrinsic(_scaled)
def cross_scale_f16(context: Any, acc: Any, integers: Any, rows: Any, offset: Any) -> Any:
    """acc = fma(float(integers), sixteen half-precision scales at row + offset, acc)."""
    columns = acc.count // rows.count

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        totals, whole = members(builder, acc, args[0]), members(builder, acc, args[1])
        for r, base in enumerate(members(builder, rows, args[2])):
            scales = _halves(builder, builder.add(base, args[3]))
            for i in range(r * columns, (r + 1) * columns):
                totals[i] = fused_multiply_add(builder, builder.sitofp(whole[i], f32x16.llvm), scales, totals[i])
        return context.make_tuple(builder, acc, totals)

    return acc(acc, integers, rows, address), codegen


@intrinsic(lambda integers: tuple(each.astype(np.float32) for each in integers))
def tile_to_f32(context: Any, integers: Any) -> Any:
    """The tile's integers as floats."""
    floats = tuple_of(f32x16, integers.count)

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        whole = members(builder, integers, args[0])
        return context.make_tuple(builder, floats, [builder.sitofp(v, f32x16.llvm) for v in whole])

    return floats(integers), codegen


def _stored(tile: Sequence[Any], rows: Sequence[int], stride: int, factors: int = 0) -> None:
    columns = len(tile) // len(rows)
    for i, value in enumerate(tile):
        scale = view(factors + 4 * (i % columns), np.float32, 1) if factors else np.float32(1)
        view(rows[i // columns] + i % columns * stride, np.float32)[:] = value * scale


@intrinsic(_stored)
def cross_store(context: Any, tile: Any, rows: Any, stride: Any) -> Any:
    """Store row r's vector of column c at row r + c * stride."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _emit_stores(builder, (tile, rows), args[:3], None)
        return context.get_dummy_value()

    return none(tile, rows, int64), codegen


@intrinsic(_stored)
def cross_store_scaled(context: Any, tile: Any, rows: Any, stride: Any, factors: Any) -> Any:
    """cross_store of the vectors times column c's f32 at factors + 4 c."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        _emit_stores(builder, (tile, rows), args[:3], args[3])
        return context.get_dummy_value()

    return none(tile, rows, int64, address), codegen


def _emit_stores(builder: ir.IRBuilder, kinds: Any, args: Any, factors: ir.Value | None) -> None:
    tile, rows = kinds
    columns = tile.count // rows.count
    values = members(builder, tile, args[0])
    if factors is not None:
        scales = [broadcast(builder, at(builder, factors, 4 * c), F32) for c in range(columns)]
        values = [builder.fmul(value, scales[i % columns]) for i, value in enumerate(values)]
    for r, base in enumerate(members(builder, rows, args[1])):
        for c in range(columns):
            store(builder, builder.add(base, builder.mul(args[2], I64(c))), values[r * columns + c], 4)


@intrinsic(lambda rows, offset, lines, level: None, literals=True)
def prefetch_rows(context: Any, rows: Any, offset: Any, lines: Any, level: Any) -> Any:
    """Ask for `lines` (literal) cache lines from row + offset on, of every row, in the cache of a level (literal)."""
    if literal_value(lines) is None or literal_value(level) is None:
        return None

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        for base in members(builder, rows, args[0]):
            for i in range(lines.literal_value):
                prefetch(builder, builder.add(builder.add(base, args[1]), I64(64 * i)), level.literal_value)
        return context.get_dummy_value()

    return none(rows, address, lines, level), codegen
