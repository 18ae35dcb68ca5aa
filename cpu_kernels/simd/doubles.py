"""Sixteen doubles, and what choosing tokens needs beside them: comparisons as lane masks, and compaction by a mask.

A mask is a vector of 32-bit integers, -1 in the lanes that it selects and 0 in the others.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from cpu_kernels.declarations import Vector, address, define, float64, int64, none
from cpu_kernels.isa import Isa, emitted_isa
from cpu_kernels.simd.arithmetic import sum_of_halves, tree
from cpu_kernels.simd.vectors import (
    I1,
    I8,
    I16,
    I32,
    I64,
    LANES,
    call,
    constant,
    f32x16,
    i32x16,
    load,
    splat,
    store,
    view,
)

F64 = ir.DoubleType()
f64x16 = Vector(F64, LANES)
_VECTOR, _LONG, _WORDS, _BITS = f64x16.llvm, ir.VectorType(I64, LANES), i32x16.llvm, ir.VectorType(I1, LANES)

get_f64 = define("get_f64", [address], float64, lambda b, p: load(b, p, F64), lambda p: view(p, np.float64, 1)[0])


def _put(where: int, value: float) -> None:
    view(where, np.float64, 1)[0] = value


put_f64 = define("put_f64", [address, float64], none, store, _put)


def _store(where: int, values: NDArray[Any]) -> None:
    view(where, np.float64)[:] = values


load_f64 = define("load_f64", [address], f64x16, lambda b, p: load(b, p, _VECTOR, 8), lambda p: view(p, np.float64))
store_f64 = define("store_f64", [address, f64x16], none, lambda b, p, v: store(b, p, v, 8), _store)
zero_f64 = define("zero_f64", [], f64x16, lambda b: constant(_VECTOR, 0.0), lambda: np.zeros(LANES))
add_f64 = define("add_f64", [f64x16, f64x16], f64x16, lambda b, x, y: b.fadd(x, y), np.add)
sum_f64 = define("sum_f64", [f64x16], float64, lambda b, x: tree(b, x, b.fadd), sum_of_halves)


def _mask(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    return builder.sext(bits, _WORDS)


def _as_mask(found: Any) -> NDArray[np.int32]:
    return -np.asarray(found, np.int32)


def _compared(name: str, vector: Vector, operator: str, meaning: Any) -> Any:
    return define(
        name,
        [vector, vector],
        i32x16,
        lambda b, x, y: _mask(b, b.fcmp_ordered(operator, x, y)),
        lambda x, y: _as_mask(meaning(x, y)),
    )


above_f32, above_f64 = _compared("above_f32", f32x16, ">", np.greater), _compared("above_f64", f64x16, ">", np.greater)
not_above_f32 = _compared("not_above_f32", f32x16, "<=", np.less_equal)
not_above_f64 = _compared("not_above_f64", f64x16, "<=", np.less_equal)
equal_f32 = _compared("equal_f32", f32x16, "==", np.equal)
above_i32 = define(
    "above_i32",
    [i32x16, i32x16],
    i32x16,
    lambda b, x, y: _mask(b, b.icmp_signed(">", x, y)),
    lambda x, y: _as_mask(np.greater(x, y)),
)
splat_f64 = define("splat_f64", [float64], f64x16, splat, lambda x: np.full(LANES, x))
without = define("without", [i32x16], i32x16, lambda b, x: b.not_(x), np.invert)
and_i32 = define("and_i32", [i32x16, i32x16], i32x16, lambda b, x, y: b.and_(x, y), np.bitwise_and)
# A mask of the lanes before the first `count`.
before = define(
    "before",
    [int64],
    i32x16,
    lambda b, count: _mask(b, b.icmp_signed("<", _lanes(), splat(b, b.trunc(count, I32)))),
    lambda count: _as_mask(np.arange(LANES) < count),
)
# first, first + 1, ...
count_up = define(
    "count_up",
    [int64],
    i32x16,
    lambda b, first: b.add(_lanes(), splat(b, b.trunc(first, I32))),
    lambda first: np.arange(first, first + LANES, dtype=np.int32),
)


def _lanes() -> ir.Constant:
    return ir.Constant(_WORDS, list(range(LANES)))


def _selected(builder: ir.IRBuilder, mask: ir.Value) -> ir.Value:
    return builder.icmp_signed("!=", mask, constant(_WORDS, 0))


def _count(builder: ir.IRBuilder, mask: ir.Value) -> ir.Value:
    bits = builder.bitcast(_selected(builder, mask), I16)
    return builder.zext(call(builder, "llvm.ctpop.i16", I16, bits), I64)


# The number of lanes that a mask selects.
count_lanes = define("count_lanes", [i32x16], int64, _count, lambda mask: int(np.count_nonzero(mask)))
# The vector where the mask selects it, else 0.
where_f64 = define(
    "where_f64",
    [i32x16, f64x16],
    f64x16,
    lambda b, mask, x: b.select(_selected(b, mask), x, constant(_VECTOR, 0.0)),
    lambda mask, x: np.where(mask != 0, x, 0.0),
)


def _first(builder: ir.IRBuilder, where: ir.Value, count: ir.Value, element: ir.Type, other: float) -> ir.Value:
    """A vector from memory of which only the first `count` lanes are read; `other` in the rest."""
    type_ = ir.VectorType(element, LANES)
    pointer = builder.inttoptr(where, type_.as_pointer())
    mask = builder.icmp_signed("<", _lanes(), splat(builder, builder.trunc(count, I32)))
    name = f"llvm.masked.load.v{LANES}{'f32' if element == ir.FloatType() else 'i8'}.p0"
    return call(builder, name, type_, pointer, mask, constant(type_, other))


def _first_f32(where: int, count: int) -> NDArray[np.float32]:
    found = np.full(LANES, -np.inf, np.float32)
    found[:count] = view(where, np.float32, min(count, LANES))
    return found


# Up to sixteen floats from memory; minus infinity in lanes from `count` on, which are not read.
load_first = define(
    "load_first",
    [address, int64],
    f32x16,
    lambda b, p, count: _first(b, p, count, ir.FloatType(), -math.inf),
    _first_f32,
)


def _first_bytes(where: int, count: int) -> NDArray[np.int32]:
    found = np.zeros(LANES, np.int32)
    found[:count] = _as_mask(view(where, np.uint8, min(count, LANES)) != 0)[: min(count, LANES)]
    return found


# x where the mask selects it, else minus infinity.
where_f32 = define(
    "where_f32",
    [i32x16, f32x16],
    f32x16,
    lambda b, mask, x: b.select(_selected(b, mask), x, constant(f32x16.llvm, -math.inf)),
    lambda mask, x: np.where(mask != 0, x, np.float32(-np.inf)),
)
# x where the mask selects it, else 0.
or_zero_f32 = define(
    "or_zero_f32",
    [i32x16, f32x16],
    f32x16,
    lambda b, mask, x: b.select(_selected(b, mask), x, constant(f32x16.llvm, 0.0)),
    lambda mask, x: np.where(mask != 0, x, np.float32(0)),
)
# A mask from up to sixteen bytes: those of the first `count` that are not 0.
load_mask = define(
    "load_mask",
    [address, int64],
    i32x16,
    lambda b, p, count: _mask(
        b, b.icmp_signed("!=", _first(b, p, count, I8, 0), constant(ir.VectorType(I8, LANES), 0))
    ),
    _first_bytes,
)


def _append(builder: ir.IRBuilder, where: ir.Value, values: ir.Value, mask: ir.Value) -> None:
    bits = _selected(builder, mask)
    if emitted_isa() in (Isa.AVX512_VNNI, Isa.AVX512):
        kind = "i32" if values.type == _WORDS else "f32"
        name = f"llvm.x86.avx512.mask.compress.v{LANES}{kind}"
        store(builder, where, call(builder, name, values.type, values, constant(values.type, 0), bits), 4)
        return
    for lane in range(LANES):
        store(builder, where, builder.extract_element(values, I32(lane)), 4)
        taken = builder.zext(builder.extract_element(bits, I32(lane)), I64)
        where = builder.add(where, builder.shl(taken, I64(2)))


def _appended(where: int, values: NDArray[Any], mask: NDArray[np.int32]) -> None:
    some = values[mask != 0]
    view(where, values.dtype, LANES)[: some.size] = some


# Store the selected lanes one after the other. Up to sixteen values are overwritten.
append_f32 = define("append_f32", [address, f32x16, i32x16], none, _append, _appended)
append_i32 = define("append_i32", [address, i32x16, i32x16], none, _append, _appended)

# 2**r for |r| <= 1/2: interpolated between Chebyshev's nodes, highest power first; relative error below 1e-15.
_EXP2 = (
    7.070977866508139e-09,
    1.0205905413765595e-07,
    1.3215451633221434e-06,
    1.5252672924850737e-05,
    1.5403530424776529e-04,
    1.3333558200794592e-03,
    9.618129107618665e-03,
    5.550410866465167e-02,
    2.4022650695910075e-01,
    6.931471805599462e-01,
    1.0,
)
# Adding it rounds to an integer, which is then in the lowest bits plus the bias of exponents.
_ROUNDER = 1.5 * 2.0**52 + 1023
# Powers of 2 below are 0.
_LEAST = -1022.0


def _multiply_add(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    if emitted_isa() is Isa.PORTABLE:  # has no instruction for it
        return builder.fadd(builder.fmul(x, y), z)
    return call(builder, "llvm.fma.v16f64", _VECTOR, x, y, z)


def _power(builder: ir.IRBuilder, x: ir.Value, top: ir.Value, factor: ir.Value) -> ir.Value:
    given = builder.fmul(builder.fsub(builder.fpext(x, _VECTOR), splat(builder, top)), splat(builder, factor))
    possible = builder.fcmp_ordered(">=", given, constant(_VECTOR, _LEAST))
    shifted = builder.fadd(given, constant(_VECTOR, _ROUNDER))
    rest = builder.fsub(given, builder.fsub(shifted, constant(_VECTOR, _ROUNDER)))
    result = constant(_VECTOR, _EXP2[0])
    for coefficient in _EXP2[1:]:
        result = _multiply_add(builder, result, rest, constant(_VECTOR, coefficient))
    power = builder.bitcast(builder.shl(builder.bitcast(shifted, _LONG), constant(_LONG, 52)), _VECTOR)
    return builder.select(possible, builder.fmul(result, power), constant(_VECTOR, 0.0))


def _power_meaning(x: NDArray[np.float32], top: float, factor: float) -> NDArray[np.float64]:
    given = (x.astype(np.float64) - top) * factor
    return np.where(given >= _LEAST, np.exp2(given), 0.0)


# 2 ** ((x - top) * factor), which is at most 1; 0 where it is below 2 ** -1022. Exactly 1 where x is top.
power_f64 = define("power_f64", [f32x16, float64, float64], f64x16, _power, _power_meaning)


def _squares(builder: ir.IRBuilder, x: ir.Value, middle: ir.Value) -> ir.Value:
    distance = builder.fsub(builder.fpext(x, _VECTOR), splat(builder, middle))
    return builder.fmul(distance, distance)


# (x - middle) ** 2.
squares_f64 = define(
    "squares_f64",
    [f32x16, float64],
    f64x16,
    _squares,
    lambda x, middle: (x.astype(np.float64) - middle) ** 2,
)


def _distances(builder: ir.IRBuilder, x: ir.Value, top: ir.Value) -> ir.Value:
    return builder.fsub(splat(builder, top), builder.fpext(x, _VECTOR))


# top - x.
distance_f64 = define("distance_f64", [f32x16, float64], f64x16, _distances, lambda x, top: top - x.astype(np.float64))
multiply_f64 = define("multiply_f64", [f64x16, f64x16], f64x16, lambda b, x, y: b.fmul(x, y), np.multiply)
# -|x - middle|, so that the nearest to the middle is the largest.
nearness_f64 = define(
    "nearness_f64",
    [f64x16, float64],
    f64x16,
    lambda b, x, middle: b.fneg(call(b, "llvm.fabs.v16f64", _VECTOR, b.fsub(x, splat(b, middle)))),
    lambda x, middle: -np.abs(x - middle),
)
widen_f64 = define("widen_f64", [f32x16], f64x16, lambda b, x: b.fpext(x, _VECTOR), lambda x: x.astype(np.float64))
narrow_f64 = define(
    "narrow_f64", [f64x16], f32x16, lambda b, x: b.fptrunc(x, f32x16.llvm), lambda x: x.astype(np.float32)
)
