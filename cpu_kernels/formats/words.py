"""F16 and BF16 weights as 16-bit words, multiplied with words and summed as integers (cpu_kernels.words).

Packed block of 32 rows: for each pair of BLOCK values the pairs of the first sixteen rows, then those of the others;
then the rows' units. Sums of a block's products are exact. Blocks are added as floats in order of k.

Rounding changes a weight by at most 1.3e-4 of its block's root mean square, unless the largest is more than eight times
that, and activations alike. llama.cpp rounds activations to half precision, which changes each by up to 5e-4 of itself.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from cpu_kernels.declarations import TupleOf, inner, operation
from cpu_kernels.formats import floats
from cpu_kernels.formats.weight_format import WeightFormat
from cpu_kernels.records import Act, Form, field
from cpu_kernels.simd import vectors
from cpu_kernels.simd.arithmetic import exact_fma, fused_multiply_add, mul_f32, prefetch_lines, round_i32
from cpu_kernels.simd.bytes import added_words, keep_order, multiply_words
from cpu_kernels.simd.tiles import Tile, operands, tile_width
from cpu_kernels.simd.vectors import (
    F32,
    I32,
    Values,
    at,
    broadcast,
    constant,
    f32x16,
    get_f32,
    get_i16,
    i32x16,
    load_f32,
    load_i32,
    put_f32,
    scatter_i16x2,
    splat_f32,
    view,
)
from cpu_kernels.words import BLOCK, reciprocal, unit_getter

_PAIR_BYTES = 32 * 4
_UNITS = BLOCK // 2 * _PAIR_BYTES
_BLOCK_BYTES = _UNITS + 32 * 4


@operation(
    lambda like: (np.zeros(16, np.int32),) * (2 * len(like)),
    lambda like: TupleOf(i32x16, 2 * like),
)
def zero_halves(builder: ir.IRBuilder, like: Values) -> Values:
    """Zeros for both halves of a group, one after the other, for a tile as wide as `like`."""
    return [constant(i32x16.llvm, 0)] * (2 * len(like))


def _added(total: Tile, low: Any, high: Any, where: int) -> Any:
    x = operands(where, len(total) // 2)
    weights = [low] * len(x) + [high] * len(x)
    return tuple(added_words(*row) for row in zip(total, weights, [*x, *x], strict=True))


@operation(_added, 0)
def dot2_halves(builder: ir.IRBuilder, total: Values, low: ir.Value, high: ir.Value, where: ir.Value) -> Values:
    """total += products of pairs of words, token by token, so that few of the tokens' pairs occupy registers."""
    width = len(total) // 2
    new = list(total)
    for t in range(width):
        x = broadcast(builder, at(builder, where, 4 * t), I32)
        pair = [multiply_words(builder, total[t + i * width], w, x) for i, w in enumerate((low, high))]
        new[t], new[t + width] = keep_order(builder, pair, most=2)
    return new


def _add_in_memory(integers: Tile, low: Any, high: Any, units: int, sums: int) -> None:
    width = len(integers) // 2
    x = operands(units, width, np.float32)
    factors = np.concatenate([low * x, high * x])
    totals = view(sums, np.float32, 16 * len(integers)).reshape(-1, 16)
    totals[:] = exact_fma(np.stack(list(integers)).astype(np.float32), factors, totals)


@operation(_add_in_memory)
def add_halves_in_memory(builder: Any, integers: Values, low: Any, high: Any, units: Any, sums: Any) -> None:
    """sums = fma(float(integers), the half's units * the token's unit, sums), 64 bytes per token and half."""
    width = len(integers) // 2
    for t in range(width):
        x = broadcast(builder, at(builder, units, 4 * t), F32)
        for half, unit in enumerate((low, high)):
            index = t + half * width
            slot, whole = at(builder, sums, 64 * index), builder.sitofp(integers[index], f32x16.llvm)
            total = vectors.load(builder, slot, f32x16.llvm, 64)
            vectors.store(builder, slot, fused_multiply_add(builder, whole, builder.fmul(unit, x), total), 64)


@inner
def _unpack_row(group: int, lane: int, k: int, out: int, memory: int) -> None:
    """Write a lane's rounded values to out as f32."""
    for i in range(k):
        block = group + i // BLOCK * _BLOCK_BYTES
        word = get_i16(block + i % BLOCK // 2 * _PAIR_BYTES + lane * 4 + i % 2 * 2)
        put_f32(out + i * 4, np.float32(word) * get_f32(block + _UNITS + lane * 4))


@inner
def _tile(zero: Any, group: int, k: int, act: int, index: int, sums: int, start: int, end: int, ahead: int) -> None:
    """The function that cpu_kernels.matmul calls for a register tile."""
    width = tile_width(zero)
    x = field(act, Act.WORDS) + index * width * k * 2
    units = field(act, Act.WORD_UNITS) + index * width * (k // BLOCK) * 4
    for b in range(start // BLOCK, end // BLOCK):
        block, total = group + b * _BLOCK_BYTES, zero_halves(zero)
        for pair in range(BLOCK // 2):
            weights = block + pair * _PAIR_BYTES
            if ahead > 0:
                prefetch_lines(weights + ahead, 2)
            where = x + (b * (BLOCK // 2) + pair) * 4 * width
            total = dot2_halves(total, load_i32(weights), load_i32(weights + 64), where)
        low, high = load_f32(block + _UNITS), load_f32(block + _UNITS + 64)
        add_halves_in_memory(total, low, high, units + b * 4 * width, sums)


@dataclass(kw_only=True, eq=False)
class Words(WeightFormat):
    """A format that rounds floats to words. load(p): sixteen values of the file as a vector of f32."""

    form, group_rows, block, nbytes = Form.WORDS, 32, BLOCK, _BLOCK_BYTES
    load: Any

    def row_packer(self) -> Any:
        """See WeightFormat."""
        load, size, unit_of = self.load, self.source.nbytes, unit_getter(self.load, self.source.nbytes)

        @inner
        def pack_row(source: int, group: int, lane: int, k: int) -> None:
            for b in range(k // BLOCK):
                x, block = source + b * BLOCK * size, group + b * _BLOCK_BYTES
                unit = unit_of(x, BLOCK)
                put_f32(block + _UNITS + lane * 4, unit)
                inverse = splat_f32(reciprocal(unit))
                for i in range(0, BLOCK, 16):
                    rounded = round_i32(mul_f32(load(x + i * size), inverse))
                    scatter_i16x2(block + i // 2 * _PAIR_BYTES + lane * 4, _PAIR_BYTES, rounded)

        return pack_row

    def row_unpacker(self) -> Any:
        """See WeightFormat."""
        return _unpack_row

    def tile_adder(self) -> Any:
        """See WeightFormat."""
        return _tile


FORMATS = {
    each.name: Words(name=f"{each.name}_WORDS", source=each.source, load=each.load)
    for each in floats.FORMATS.values()
    if each.source.nbytes == 2
}
"""By the name of the GGUF type that they are packed from."""
