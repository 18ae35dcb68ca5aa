"""Several vectors with several broadcast values, every one with every other: the inner step of attention.

A tile of R * C vectors has R rows and C columns, entry r * C + c belonging to row r's vector and column c's value. Rows
are given as a tuple of R addresses, columns as one address and the literal distance from one to the next.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from cpu_kernels.isa import ISA, Isa
from cpu_kernels.simd.arithmetic import fused_multiply_add
from cpu_kernels.simd.declarations import (
    address,
    int64,
    intrinsic,
    intrinsic_of_literals,
    literal_value,
    none,
    tuple_of,
)
from cpu_kernels.simd.dot import multiply_pairs
from cpu_kernels.simd.vectors import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    broadcast,
    call,
    define,
    f32x16,
    i32x16,
    load,
    store,
)

Values = list[ir.Value]
_WORDS = ir.VectorType(I16, 2 * LANES)
# Registers that a vector takes where products are added by an instruction of their own.
_REGISTERS = {Isa.AVX2: 2, Isa.AVX_VNNI: 2, Isa.AVX512: 1}


def _unpack(builder: ir.IRBuilder, packed: ir.Value, count: int) -> Values:
    return [builder.extract_value(packed, i) for i in range(count)]


def _at(builder: ir.IRBuilder, where: ir.Value, offset: int) -> ir.Value:
    return builder.add(where, I64(offset))


def _halves(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    return builder.fpext(load(builder, where, ir.VectorType(F16, LANES), 2), f32x16.llvm)


def _byte_pairs(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    """Thirty-two signed bytes as words, two to a lane."""
    return builder.bitcast(builder.sext(load(builder, where, ir.VectorType(I8, 2 * LANES), 1), _WORDS), i32x16.llvm)


def _smaller(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_signed("<", x, y), x, y)


@intrinsic_of_literals
def no_rows(context: Any, count: Any) -> Any:
    """A tuple of `count` (literal) addresses, all 0: what says how many rows a function works on."""
    if literal_value(count) is None:
        return None
    rows = tuple_of(int64, count.literal_value)

    def codegen(context: Any, builder: Any, _sig: Any, _args: Any) -> Any:
        return context.make_tuple(builder, rows, [I64(0)] * rows.count)

    return rows(count), codegen


@intrinsic
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


@intrinsic
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
) -> Any:
    def typer(context: Any, acc: Any, rows: Any, offset: Any, where: Any, stride: Any) -> Any:
        if literal_value(stride) is None:
            return None
        columns = acc.count // rows.count

        def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
            totals = _unpack(builder, args[0], acc.count)
            values = [
                broadcast(builder, _at(builder, args[3], stride.literal_value * c), element) for c in range(columns)
            ]
            for r, base in enumerate(_unpack(builder, args[1], rows.count)):
                vector = load_row(builder, builder.add(base, args[2]))
                for c, value in enumerate(values):
                    totals[r * columns + c] = combine(builder, totals[r * columns + c], vector, value)
            return context.make_tuple(builder, acc, totals)

        return acc(acc, rows, address, address, stride), codegen

    typer.__name__ = typer.__qualname__ = name
    return intrinsic_of_literals(typer)


cross_fma_f16 = _cross("cross_fma_f16", _halves, F32, lambda b, total, x, y: fused_multiply_add(b, x, y, total))
"""acc += sixteen half-precision numbers at row + offset times the column's f32."""


def _add_products(builder: ir.IRBuilder, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """multiply_pairs whose sum LLVM may not regroup with those of other steps: too few registers are left for that."""
    total = multiply_pairs(builder, total, x, y)
    parts = _REGISTERS.get(ISA, 0)
    if parts == 0:
        return total
    kind = ir.VectorType(I32, LANES // parts)
    undefined = ir.Constant(i32x16.llvm, ir.Undefined)
    kept = []
    for part in range(parts):
        lanes = ir.Constant(ir.VectorType(I32, kind.count), [part * kind.count + i for i in range(kind.count)])
        piece = builder.shuffle_vector(total, undefined, lanes)
        kept.append(builder.asm(ir.FunctionType(kind, [kind]), "", "=v,0", [piece], False))
    order = ir.Constant(i32x16.llvm, list(range(LANES)))
    return kept[0] if parts == 1 else builder.shuffle_vector(kept[0], kept[1], order)


cross_dot2_i8 = _cross("cross_dot2_i8", _byte_pairs, I32, _add_products)
"""acc += sixteen pairs of bytes at row + offset times the column's pair of words, added in twos, exactly."""


@intrinsic
def cross_scale_f16(context: Any, acc: Any, integers: Any, rows: Any, offset: Any) -> Any:
    """acc = fma(float(integers), sixteen half-precision scales at row + offset, acc)."""
    columns = acc.count // rows.count

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        totals = _unpack(builder, args[0], acc.count)
        whole = _unpack(builder, args[1], acc.count)
        for r, base in enumerate(_unpack(builder, args[2], rows.count)):
            scales = _halves(builder, builder.add(base, args[3]))
            for i in range(r * columns, (r + 1) * columns):
                totals[i] = fused_multiply_add(builder, builder.sitofp(whole[i], f32x16.llvm), scales, totals[i])
        return context.make_tuple(builder, acc, totals)

    return acc(acc, integers, rows, address), codegen


@intrinsic
def tile_to_f32(context: Any, integers: Any) -> Any:
    """The tile's integers as floats."""
    floats = tuple_of(f32x16, integers.count)

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        whole = _unpack(builder, args[0], integers.count)
        return context.make_tuple(builder, floats, [builder.sitofp(v, f32x16.llvm) for v in whole])

    return floats(integers), codegen


@intrinsic
def cross_store(context: Any, tile: Any, rows: Any, stride: Any) -> Any:
    """Store row r's vector of column c at row r + c * stride."""
    columns = tile.count // rows.count

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        values = _unpack(builder, args[0], tile.count)
        for r, base in enumerate(_unpack(builder, args[1], rows.count)):
            for c in range(columns):
                store(builder, builder.add(base, builder.mul(args[2], I64(c))), values[r * columns + c], 4)
        return context.get_dummy_value()

    return none(tile, rows, int64), codegen


@intrinsic
def cross_store_scaled(context: Any, tile: Any, rows: Any, stride: Any, factors: Any) -> Any:
    """cross_store of the vectors times column c's f32 at factors + 4 c."""
    columns = tile.count // rows.count

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        values = _unpack(builder, args[0], tile.count)
        scales = [broadcast(builder, _at(builder, args[3], 4 * c), F32) for c in range(columns)]
        for r, base in enumerate(_unpack(builder, args[1], rows.count)):
            for c, scale in enumerate(scales):
                value = builder.fmul(values[r * columns + c], scale)
                store(builder, builder.add(base, builder.mul(args[2], I64(c))), value, 4)
        return context.get_dummy_value()

    return none(tile, rows, int64, address), codegen


@intrinsic_of_literals
def prefetch_rows(context: Any, rows: Any, offset: Any, lines: Any, level: Any) -> Any:
    """Ask for `lines` (literal) cache lines from row + offset on, of every row, in the cache of a level (literal)."""
    if literal_value(lines) is None or literal_value(level) is None:
        return None
    locality = I32(4 - level.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> ir.Value:
        pointer = I8.as_pointer()
        for base in _unpack(builder, args[0], rows.count):
            for i in range(lines.literal_value):
                line = builder.add(builder.add(base, args[1]), I64(64 * i))
                where = builder.inttoptr(line, pointer)
                call(builder, "llvm.prefetch.p0", ir.VoidType(), where, I32(0), locality, I32(1))
        return context.get_dummy_value()

    return none(rows, address, lines, level), codegen


def _store_words(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> None:
    store(builder, where, builder.trunc(value, ir.VectorType(I16, LANES)), 2)


store_i16 = define("store_i16", none(address, i32x16), _store_words)
