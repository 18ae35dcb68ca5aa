"""Register tiles: one vector of sixteen output rows for each of `n` tokens, held in a tuple of n vectors.

The width n is part of a tile's type, so one function written over tiles compiles to fully unrolled code for each width.
Operands of the tokens lie side by side: token t's 32-bit value at p + 4 t.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from cpu_kernels.simd.arithmetic import fused_multiply_add
from cpu_kernels.simd.declarations import (
    address,
    int64,
    intrinsic,
    intrinsic_of_literals,
    is_tuple,
    literal_value,
    none,
    tuple_of,
)
from cpu_kernels.simd.dot import (
    SHORT_LIMIT,
    biased_start,
    factor_of_short,
    has_short_sums,
    in_order,
    multiply_biased,
    multiply_pairs,
    multiply_short,
    widen_short,
)
from cpu_kernels.simd.vectors import F32, I32, I64, broadcast, constant, define, f32x16, i32x16, load, store

Values = list[ir.Value]


def _zero(name: str, vector: Any) -> Any:
    def typer(context: Any, width: Any) -> Any:
        if literal_value(width) is None:
            return None
        tile = tuple_of(vector, width.literal_value)

        def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, _args: Any) -> ir.Value:
            return context.make_tuple(builder, tile, [constant(vector.llvm, 0)] * tile.count)

        return tile(width), codegen

    typer.__name__ = typer.__qualname__ = name
    return intrinsic_of_literals(typer)


zero_tile_i32 = _zero("zero_tile_i32", i32x16)
zero_tile_f32 = _zero("zero_tile_f32", f32x16)


def _unpack(builder: ir.IRBuilder, tile: ir.Value, width: int) -> Values:
    return [builder.extract_value(tile, t) for t in range(width)]


def _at(builder: ir.IRBuilder, where: ir.Value, offset: int) -> ir.Value:
    return builder.add(where, I64(offset))


def _map(builder_step: Callable[..., ir.Value], context: Any, builder: Any, sig: Any, args: Any) -> ir.Value:
    """Apply builder_step(builder, t, tile[t], *rest) to every token and pack the results."""
    tile, *rest = args
    kind = sig.args[0]
    new = [builder_step(builder, t, v, *rest) for t, v in enumerate(_unpack(builder, tile, kind.count))]
    return context.make_tuple(builder, kind, new)


def _members(builder: ir.IRBuilder, kind: Any, value: ir.Value) -> Values:
    """A tile's vectors, or the one of a single token."""
    return _unpack(builder, value, kind.count) if is_tuple(kind) else [value]


def _of_kind(context: Any, builder: ir.IRBuilder, kind: Any, values: Values) -> ir.Value:
    return context.make_tuple(builder, kind, values) if is_tuple(kind) else values[0]


def _add_steps(
    builder: ir.IRBuilder, multiply: Callable[..., ir.Value], totals: Values, steps: Values, p: Any
) -> Values:
    """totals[t] = multiply(totals[t], step, token t's four bytes of that step), step by step."""
    for i, u in enumerate(steps):
        for t, total in enumerate(totals):
            operand = broadcast(builder, _at(builder, p, 4 * (i * len(totals) + t)), I32)
            totals[t] = multiply(builder, total, u, operand)
        totals = in_order(builder, totals)
    return totals


def _steps(name: str, multiply: Callable[..., ir.Value]) -> Any:
    """An intrinsic, since a function over so many vectors would be called, and its tile pass through memory."""

    def typer(context: Any, acc: Any, weights: Any, where: Any) -> Any:
        def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            totals, steps = _members(builder, acc, args[0]), _unpack(builder, args[1], weights.count)
            return _of_kind(context, builder, acc, _add_steps(builder, multiply, totals, steps, args[2]))

        return acc(acc, weights, where), codegen

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


# Each adds to an accumulator (of one token, or a tile of them) the products of every vector in a tuple, one a k step,
# and the token's four bytes of that step. K step i's operands lie side by side, 4 bytes a token, at an address plus
# 4 i times the tile's width.
short_dot4_steps = _steps("short_dot4_steps", multiply_short)
biased_dot4_steps = _steps("biased_dot4_steps", multiply_biased)


@intrinsic_of_literals
def dot4_steps(context: Any, acc: Any, weights: Any, where: Any, largest: Any) -> Any:
    """As short_dot4_steps, but adding to 32-bit sums. largest: a literal, the largest byte of the weights."""
    if literal_value(largest) is None:
        return None
    together = SHORT_LIMIT // largest.literal_value if has_short_sums() else weights.count

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        totals, steps = _members(builder, acc, args[0]), _unpack(builder, args[1], weights.count)
        zero = constant(i32x16.llvm, 0)
        for first in range(0, len(steps), together):
            p = _at(builder, args[2], 4 * first * len(totals))
            some = steps[first : first + together]
            if has_short_sums():
                short = _add_steps(builder, multiply_short, [zero] * len(totals), some, p)
                totals = [builder.add(total, widen_short(builder, x)) for total, x in zip(totals, short, strict=True)]
            else:
                totals = _add_steps(builder, multiply_short, totals, some, p)
        return _of_kind(context, builder, acc, totals)

    return acc(acc, weights, where, largest), codegen


@intrinsic
def start_short(context: Any, like: Any) -> Any:
    """What short_dot4_steps adds to: zeros. `like`, an accumulator of zeros, shows the kind of accumulator."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        zeros = [constant(i32x16.llvm, 0) for _ in _members(builder, like, args[0])]
        return _of_kind(context, builder, like, zeros) if has_short_sums() else args[0]

    return like(like), codegen


short_factor = define("short_factor", i32x16(i32x16), factor_of_short)


@intrinsic
def add_short(context: Any, acc: Any, short: Any, factor: Any) -> Any:
    """acc[t] += short[t] * factor, a vector that short_factor has made."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        pairs = zip(_members(builder, acc, args[0]), _members(builder, acc, args[1]), strict=True)
        new = [builder.add(total, widen_short(builder, x, args[2])) for total, x in pairs]
        return _of_kind(context, builder, acc, new)

    return acc(acc, short, factor), codegen


@intrinsic
def start_biased(context: Any, like: Any, where: Any) -> Any:
    """What biased_dot4_steps adds to: token t's -128 * sum of its activations lies at where + 4 t."""

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        places = [_at(builder, args[1], 4 * t) for t in range(len(_members(builder, like, args[0])))]
        return _of_kind(context, builder, like, [biased_start(builder, broadcast(builder, p, I32)) for p in places])

    return like(like, where), codegen


@intrinsic
def tile_dot2(context: Any, acc: Any, weights: Any, where: Any) -> Any:
    """acc[t] += dot2(weights, broadcast of the token's two words at where + 4 t)."""

    def step(builder: Any, t: int, value: Any, x: Any, p: Any) -> Any:
        return multiply_pairs(builder, value, x, broadcast(builder, _at(builder, p, 4 * t), I32))

    return acc(acc, weights, where), lambda *a: _map(step, *a)


@intrinsic
def tile_multiply_add_i32(context: Any, acc: Any, other: Any, factor: Any) -> Any:
    """acc[t] += other[t] * factor."""
    width = acc.count

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        pairs = zip(_unpack(builder, args[0], width), _unpack(builder, args[1], width), strict=True)
        return context.make_tuple(builder, acc, [builder.add(a, builder.mul(b, args[2])) for a, b in pairs])

    return acc(acc, other, factor), codegen


@intrinsic_of_literals
def broadcast_like(context: Any, like: Any, where: Any, shift: Any) -> Any:
    """Like an accumulator: the 32-bit integer at where + 4 t, shifted right by a literal, in every lane of token t."""
    if literal_value(shift) is None:
        return None
    bits = constant(i32x16.llvm, shift.literal_value)

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        places = [_at(builder, args[1], 4 * t) for t in range(len(_members(builder, like, args[0])))]
        return _of_kind(context, builder, like, [builder.ashr(broadcast(builder, p, I32), bits) for p in places])

    return like(like, where, shift), codegen


@intrinsic
def tile_scale_add(context: Any, acc: Any, integers: Any, scale: Any, where: Any) -> Any:
    """acc[t] = fma(float(integers[t]), scale * f32 at where + 4 t, acc[t])."""
    width = acc.count

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        new = []
        pairs = zip(_unpack(builder, args[0], width), _unpack(builder, args[1], width), strict=True)
        for t, (total, integer) in enumerate(pairs):
            factor = builder.fmul(args[2], broadcast(builder, _at(builder, args[3], 4 * t), F32))
            new.append(fused_multiply_add(builder, builder.sitofp(integer, f32x16.llvm), factor, total))
        return context.make_tuple(builder, acc, new)

    return acc(acc, integers, scale, where), codegen


@intrinsic
def tile_scale_add_to_memory(context: Any, integers: Any, scale: Any, where: Any, sums: Any) -> Any:
    """tile_scale_add with the accumulators in memory (64 bytes a token at sums): registers stay free for the dots."""
    width = integers.count

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        for t, integer in enumerate(_unpack(builder, args[0], width)):
            factor = builder.fmul(args[1], broadcast(builder, _at(builder, args[2], 4 * t), F32))
            slot = _at(builder, args[3], 64 * t)
            total = load(builder, slot, f32x16.llvm, 64)
            new = fused_multiply_add(builder, builder.sitofp(integer, f32x16.llvm), factor, total)
            store(builder, slot, new, 64)
        return context.get_dummy_value()

    return none(integers, scale, where, sums), codegen


@intrinsic_of_literals
def tile_fma_broadcast(context: Any, acc: Any, vector: Any, where: Any, stride: Any) -> Any:
    """acc[t] = fma(vector, f32 at where + t * stride, acc[t]); stride is a literal number of bytes, or a variable."""
    literal = literal_value(stride)

    def step(builder: Any, t: int, value: Any, v: Any, p: Any, s: Any) -> Any:
        offset = I64(literal * t) if literal is not None else builder.mul(s, I64(t))
        return fused_multiply_add(builder, v, broadcast(builder, builder.add(p, offset), F32), value)

    return acc(acc, vector, where, stride), lambda *a: _map(step, *a)


@intrinsic
def tile_load_f32(context: Any, like: Any, where: Any) -> Any:
    """Floats for as many tokens as `like` has, token t's vector at where + 64 t."""
    tile = tuple_of(f32x16, like.count)

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        found = [load(builder, _at(builder, args[1], 64 * t), f32x16.llvm, 64) for t in range(tile.count)]
        return context.make_tuple(builder, tile, found)

    return tile(like, address), codegen


@intrinsic
def tile_store(context: Any, tile: Any, where: Any, stride: Any) -> Any:
    """Store token t's vector at where + t * stride."""
    width = tile.count

    def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        for t, value in enumerate(_unpack(builder, args[0], width)):
            store(builder, builder.add(args[1], builder.mul(args[2], I64(t))), value, 4)
        return context.get_dummy_value()

    return none(tile, address, stride), codegen


@intrinsic
def tile_width(context: Any, tile: Any) -> Any:
    """The number of tokens in a tile, a constant of its type."""
    width = tile.count
    return int64(tile), lambda context, builder, sig, args: I64(width)
