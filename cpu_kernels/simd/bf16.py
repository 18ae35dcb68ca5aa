"""Products of pairs of bfloat16 numbers, each rounded into a sum in single precision: the second's, then the first's.

That is what one instruction does where a processor has it. Elsewhere two multiply-adds give the same bits, but for sums
of less than 2**-126, which the instruction takes for zero.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from cpu_kernels.declarations import address, define, none, operation
from cpu_kernels.isa import Isa, emitted_isa
from cpu_kernels.simd.arithmetic import exact_fma, fused_multiply_add
from cpu_kernels.simd.cross import cross
from cpu_kernels.simd.tiles import Values
from cpu_kernels.simd.vectors import (
    F16,
    I16,
    I32,
    I64,
    LANES,
    at,
    call,
    constant,
    f32x16,
    i32x16,
    load,
    store,
    view,
    widen_half,
)


class _BFloat(ir.types._BaseFloatType):  # llvmlite has no such type of its own
    """bfloat16, the upper half of single precision."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def _rounded(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Floats rounded to even to bfloat16, as 16-bit words."""
    if emitted_isa() is Isa.AVX512_BF16:
        return builder.bitcast(builder.fptrunc(x, ir.VectorType(_BFloat(), LANES)), ir.VectorType(I16, LANES))
    bits, sixteen = builder.bitcast(x, i32x16.llvm), constant(i32x16.llvm, 16)
    odd = builder.and_(builder.lshr(bits, sixteen), constant(i32x16.llvm, 1))
    rounded = builder.add(bits, builder.add(odd, constant(i32x16.llvm, 0x7FFF)))
    return builder.trunc(builder.lshr(rounded, sixteen), ir.VectorType(I16, LANES))


def _round(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = x.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _store(where: int, value: NDArray[np.float32]) -> None:
    view(where, np.uint16)[:] = _round(value)


# Sixteen floats rounded to bfloat16.
store_bf16 = define("store_bf16", [address, f32x16], none, lambda b, p, x: store(b, p, _rounded(b, x), 2), _store)


def _pairs(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    """Sixteen halves at an address and the sixteen behind them as lanes of two bfloat16 numbers, one of each."""
    first, second = (
        widen_half(builder, load(builder, at(builder, where, 2 * LANES * i), ir.VectorType(F16, LANES), 2))
        for i in range(2)
    )
    if emitted_isa() is Isa.AVX512_BF16:
        both = call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _PAIRS, second, first)
        words = builder.bitcast(both, ir.VectorType(I16, 2 * LANES))
        order = [lane + LANES * i for lane in range(LANES) for i in range(2)]
        mixed = builder.shuffle_vector(words, words, ir.Constant(ir.VectorType(I32, 2 * LANES), order))
        return builder.bitcast(mixed, i32x16.llvm)
    low, high = (builder.zext(_rounded(builder, x), i32x16.llvm) for x in (first, second))
    return builder.or_(low, builder.shl(high, constant(i32x16.llvm, 16)))


def _dot(builder: ir.IRBuilder, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """total + the products of lanes of two bfloat16 numbers."""
    if emitted_isa() is Isa.AVX512_BF16:
        x, y = builder.bitcast(x, _PAIRS), builder.bitcast(y, _PAIRS)
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", f32x16.llvm, total, x, y)
    upper, sixteen = constant(i32x16.llvm, -(1 << 16)), constant(i32x16.llvm, 16)
    x1, y1 = (builder.bitcast(builder.and_(pair, upper), f32x16.llvm) for pair in (x, y))
    x0, y0 = (builder.bitcast(builder.shl(pair, sixteen), f32x16.llvm) for pair in (x, y))
    return fused_multiply_add(builder, x0, y0, fused_multiply_add(builder, x1, y1, total))


def _stored_pairs(rows: Sequence[int], offset: int, to: int, stride: int) -> None:
    for r, row in enumerate(rows):
        view(to + r * stride, np.uint16, 2 * LANES)[:] = _paired(row + offset)


@operation(_stored_pairs)
def store_pairs_bf16(builder: ir.IRBuilder, rows: Values, offset: ir.Value, to: ir.Value, stride: ir.Value) -> None:
    """Round two vectors of sixteen halves at row + offset, one behind the other, to pairs of one of each.

    Row r's pairs go to to + r * stride, a multiple of 64.
    """
    for r, row in enumerate(rows):
        place = builder.add(to, builder.mul(stride, I64(r)))
        store(builder, place, _pairs(builder, builder.add(row, offset)), 64)


def _paired(where: int) -> NDArray[np.uint16]:
    return _round(view(where, np.float16, 2 * LANES).astype(np.float32)).reshape(2, LANES).T.reshape(-1)


def _dot2(total: Any, pairs: NDArray[np.uint16], value: int) -> Any:
    x0, x1 = ((pairs[i::2].astype(np.uint32) << 16).view(np.float32) for i in range(2))
    y0, y1 = (view(value, np.uint16, 2).astype(np.uint32) << 16).view(np.float32)
    return exact_fma(x0, y0, exact_fma(x1, y1, total))


# tile += sixteen pairs of bfloat16 at row + offset times the column's pair.
cross_dot2_bf16 = cross(
    "cross_dot2_bf16",
    lambda b, where: load(b, where, i32x16.llvm, 64),
    I32,
    _dot,
    lambda total, row, value: _dot2(total, view(row, np.uint16, 2 * LANES), value),
)
# The same of what store_pairs_bf16 would make of the halves there.
cross_dot2_f16 = cross("cross_dot2_f16", _pairs, I32, _dot, lambda total, row, value: _dot2(total, _paired(row), value))
