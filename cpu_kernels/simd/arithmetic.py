"""Lane-wise arithmetic, reductions and the exponential."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from cpu_kernels.declarations import Intrinsic, define, float32, int64, operation
from cpu_kernels.isa import Isa, emitted_isa
from cpu_kernels.simd.vectors import I32, I64, LANES, Lanes, call, constant, f32x16, i32x16, in_parts, splat

_VECTOR_I, _VECTOR_F = i32x16.llvm, f32x16.llvm


def fused_multiply_add(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once."""
    return call(builder, "llvm.fma.v16f32", _VECTOR_F, x, y, z)


def exact_fma(x: Any, y: Any, z: Any) -> NDArray[np.float32]:
    """fused_multiply_add in Python.

    In double precision the product is exact and the sum is rounded to odd (Boldo and Melquiond, 2008), so that the
    final rounding gives the same result as a single one.
    """
    product = np.multiply(x, y, dtype=np.float64)
    total = np.asarray(product + z)
    other = total - product
    error = (product - (total - other)) + (z - other)
    bits = total.view(np.int64)
    even = np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(even, bits + step, bits).view(np.float64).astype(np.float32)


def _round_to_even(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return call(builder, "llvm.rint.v16f32", _VECTOR_F, x)


def _round_to_integer(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Round to the nearest integer, ties to even. NaN and values out of range give an unspecified integer."""
    if emitted_isa() in (Isa.AVX512_VNNI, Isa.AVX512):
        zero, all_lanes, current_rounding = constant(_VECTOR_I, 0), ir.IntType(16)(-1), I32(4)
        return call(builder, "llvm.x86.avx512.mask.cvtps2dq.512", _VECTOR_I, x, zero, all_lanes, current_rounding)
    if emitted_isa() in (Isa.AVX_VNNI, Isa.AVX2):
        return in_parts(builder, "llvm.x86.avx.cvt.ps2dq.256", 2, x, result=ir.VectorType(I32, 8))
    return call(builder, "llvm.fptosi.sat.v16i32.v16f32", _VECTOR_I, _round_to_even(builder, x))


def _nearest(x: NDArray[np.float32]) -> Lanes:
    return np.rint(np.clip(np.nan_to_num(x.astype(np.float64)), -(2.0**31), 2.0**31 - 1)).astype(np.int32)


def _binary(name: str, vector: Any, operation: str, meaning: Any) -> Any:
    return define(name, [vector, vector], vector, lambda b, x, y: getattr(b, operation)(x, y), meaning)


add_i32 = _binary("add_i32", i32x16, "add", np.add)
mul_i32 = _binary("mul_i32", i32x16, "mul", np.multiply)
or_i32 = _binary("or_i32", i32x16, "or_", np.bitwise_or)
xor_i32 = _binary("xor_i32", i32x16, "xor", np.bitwise_xor)
add_f32 = _binary("add_f32", f32x16, "fadd", np.add)
sub_f32 = _binary("sub_f32", f32x16, "fsub", np.subtract)
mul_f32 = _binary("mul_f32", f32x16, "fmul", np.multiply)
div_f32 = _binary("div_f32", f32x16, "fdiv", np.divide)
neg_f32 = define("neg_f32", [f32x16], f32x16, lambda b, x: b.fneg(x), np.negative)
fma = define("fma", [f32x16] * 3, f32x16, fused_multiply_add, exact_fma)
round_i32 = define("round_i32", [f32x16], i32x16, _round_to_integer, _nearest)


def _choice(name: str, operator: str, compare: Any) -> Any:
    """x where the comparison with y holds, else y: so a NaN is kept only if it is the second operand."""
    return define(
        name,
        [f32x16, f32x16],
        f32x16,
        lambda b, x, y: b.select(b.fcmp_ordered(operator, x, y), x, y),
        lambda x, y: np.where(compare(x, y), x, y),
    )


max_f32 = _choice("max_f32", ">", np.greater)
min_f32 = _choice("min_f32", "<", np.less)
# y where x > 0, else z.
where_positive = define(
    "where_positive",
    [f32x16] * 3,
    f32x16,
    lambda b, x, y, z: b.select(b.fcmp_ordered(">", x, constant(_VECTOR_F, 0.0)), y, z),
    lambda x, y, z: np.where(x > 0, y, z),
)


# Bits of the magnitudes as integers, ordered like the numbers with NaN on top, so that a maximum reveals a NaN.
magnitude = define(
    "magnitude",
    [f32x16],
    i32x16,
    lambda b, x: b.and_(b.bitcast(x, _VECTOR_I), constant(_VECTOR_I, 0x7FFFFFFF)),
    lambda x: x.view(np.int32) & 0x7FFFFFFF,
)


def _larger(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_signed(">", x, y), x, y)


max_i32 = define("max_i32", [i32x16, i32x16], i32x16, _larger, np.maximum)


def _with_literal(name: str, instruction: str, meaning: Callable[[Lanes, int], Lanes]) -> Any:
    """An integer operation with a literal as second operand, the same in every lane."""

    def emit(builder: ir.IRBuilder, x: ir.Value, literal: int) -> ir.Value:
        return getattr(builder, instruction)(x, constant(_VECTOR_I, literal))

    return Intrinsic(name, emit, meaning, 2, None, 0, literals=[1])


mask_bits = _with_literal("mask_bits", "and_", lambda x, mask: x & np.array(mask, np.int64).astype(np.int32))
shift_right = _with_literal(
    "shift_right", "lshr", lambda x, bits: (x.view(np.uint32) >> np.uint32(bits)).view(np.int32)
)
shift_left = _with_literal("shift_left", "shl", lambda x, bits: x << np.int32(bits))
shift_right_signed = _with_literal("shift_right_signed", "ashr", lambda x, bits: x >> np.int32(bits))


def tree(builder: ir.IRBuilder, x: ir.Value, step: Any) -> ir.Value:
    """Reduce a vector by halves: lane i with lane i + n/2, so that the order of additions is the same everywhere."""
    lanes = x.type.count
    undefined = ir.Constant(x.type, ir.Undefined)
    while lanes > 1:
        lanes //= 2
        order = [(i + lanes) % LANES for i in range(LANES)]
        x = step(x, builder.shuffle_vector(x, undefined, ir.Constant(ir.VectorType(I32, LANES), order)))
    return builder.extract_element(x, I32(0))


def sum_of_halves(x: NDArray[Any]) -> Any:
    """The sum that `tree` computes, in Python."""
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def _first_pairs(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    first = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [lane % 4 < 2 for lane in range(LANES)])
    some = builder.select(first, x, constant(_VECTOR_I, 0))
    return builder.sext(tree(builder, some, builder.add), I64)


sum_f32 = define("sum_f32", [f32x16], float32, lambda b, x: tree(b, x, b.fadd), sum_of_halves)
sum_i32 = define(
    "sum_i32", [i32x16], int64, lambda b, x: b.sext(tree(b, x, b.add), I64), lambda x: int(sum_of_halves(x))
)
# The sum of the first two of every four lanes.
sum_first_pairs = define(
    "sum_first_pairs", [i32x16], int64, _first_pairs, lambda x: int(x.reshape(-1, 4)[:, :2].sum(dtype=np.int32))
)
largest_f32 = define(
    "largest_f32",
    [f32x16],
    float32,
    lambda b, x: tree(b, x, lambda p, q: b.select(b.fcmp_ordered(">", p, q), p, q)),
    lambda x: np.float32(max(x.tolist())),
)
# The largest lane of a result of `magnitude`, as a float.
largest_magnitude = define(
    "largest_magnitude",
    [i32x16],
    float32,
    lambda b, x: b.bitcast(tree(b, x, lambda p, q: _larger(b, p, q)), ir.FloatType()),
    lambda x: x.max().view(np.float32),
)


def _select_first(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, count: ir.Value) -> ir.Value:
    lanes = ir.Constant(_VECTOR_I, list(range(LANES)))
    return builder.select(builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, I32))), x, y)


# x in the first `count` lanes, y in the others.
select_first = define(
    "select_first",
    [f32x16, f32x16, int64],
    f32x16,
    _select_first,
    lambda x, y, count: np.where(np.arange(LANES) < count, x, y),
)


def _butterflies(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    for step in (1, 2, 4, 8):
        order = ir.Constant(ir.VectorType(I32, LANES), [lane ^ step for lane in range(LANES)])
        others = builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), order)
        signs = ir.Constant(_VECTOR_I, [-(2**31) if lane & step else 0 for lane in range(LANES)])
        x = builder.fadd(others, builder.bitcast(builder.xor(builder.bitcast(x, _VECTOR_I), signs), _VECTOR_F))
    return x


def _hadamard(x: NDArray[np.float32]) -> NDArray[np.float32]:
    for step in (1, 2, 4, 8):
        lanes = np.arange(LANES)
        x = x[lanes ^ step] + np.where(lanes & step, -x, x)
    return x


# The unnormalized Walsh-Hadamard transform of sixteen lanes, which multiplies their norm by four.
hadamard_f32 = define("hadamard_f32", [f32x16], f32x16, _butterflies, _hadamard)

# 2**f on [-0.5, 0.5]: Taylor coefficients ln(2)**k / k!, highest first. The relative error is below 1.7e-7 in exact
# arithmetic, and below 2.3e-7 in single precision.
_EXP2 = (
    0.00015403530393381608,
    0.0013333558146428443,
    0.009618129107628477,
    0.05550410866482158,
    0.2402265069591007,
    0.6931471805599453,
    1.0,
)
_EXP2_LIMIT = 126.0


def _exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    for operator, limit in (("<", -_EXP2_LIMIT), (">", _EXP2_LIMIT)):
        bound = constant(_VECTOR_F, limit)
        x = builder.select(builder.fcmp_ordered(operator, x, bound), bound, x)
    whole = _round_to_even(builder, x)
    fraction = builder.fsub(x, whole)
    result = constant(_VECTOR_F, _EXP2[0])
    for coefficient in _EXP2[1:]:
        result = fused_multiply_add(builder, result, fraction, constant(_VECTOR_F, coefficient))
    exponent = builder.add(_round_to_integer(builder, x), constant(_VECTOR_I, 127))
    power = builder.bitcast(builder.shl(exponent, constant(_VECTOR_I, 23)), _VECTOR_F)
    return builder.fmul(result, power)


def _exp2_meaning(x: NDArray[np.float32]) -> NDArray[np.float32]:
    x = np.where(np.isnan(x), x, np.clip(x, -_EXP2_LIMIT, _EXP2_LIMIT)).astype(np.float32)
    whole = np.rint(x)
    result = np.full(LANES, _EXP2[0], np.float32)
    for coefficient in _EXP2[1:]:
        result = exact_fma(result, x - whole, np.float32(coefficient))
    return result * ((_nearest(x) + 127) << 23).view(np.float32)


exp2_f32 = define("exp2_f32", [f32x16], f32x16, _exp2, _exp2_meaning)

# 2**f on [-0.5, 0.5] as above, but nearest to it in relative error, which is below 4e-9.
_POWER = (
    0.00015323929255828261,
    0.0013391155516728759,
    0.009618520736694336,
    0.055503591895103455,
    0.24022647738456726,
    0.6931471824645996,
    1.0,
)
# Added to a number of less than half its size, it rounds to an integer, which is then in the lowest bits.
ROUNDER = 1.5 * 2.0**23


def _power(builder: ir.IRBuilder, x: ir.Value, factor: ir.Value, rest: ir.Value, rounder: ir.Value) -> ir.Value:
    factor, rest, rounder = (splat(builder, value) for value in (factor, rest, rounder))
    shifted = fused_multiply_add(builder, x, factor, rounder)
    whole = builder.fsub(rounder, shifted)
    fraction = fused_multiply_add(builder, x, rest, fused_multiply_add(builder, x, factor, whole))
    result = constant(_VECTOR_F, _POWER[0])
    for coefficient in _POWER[1:]:
        result = fused_multiply_add(builder, result, fraction, constant(_VECTOR_F, coefficient))
    exponent = builder.shl(builder.bitcast(shifted, _VECTOR_I), constant(_VECTOR_I, 23))
    return builder.bitcast(builder.add(builder.bitcast(result, _VECTOR_I), exponent), _VECTOR_F)


def _power_meaning(
    x: NDArray[np.float32], factor: np.float32, rest: np.float32, rounder: np.float32
) -> NDArray[np.float32]:
    given = x.astype(np.float64) * (float(factor) + float(rest))
    return np.exp2(given - (ROUNDER - float(rounder))).astype(np.float32)


# 2 ** (x * (factor + rest) - shift), where rounder is ROUNDER minus the shift, an integer. rest is what rounding the
# factor to single precision left. The relative error is below 1.1e-7 if x * factor is between -2**13 and 2**13, and the
# result between 2**-125 and 2**126.
power_f32 = define("power_f32", [f32x16, float32, float32, float32], f32x16, _power, _power_meaning)


def prefetch(builder: ir.IRBuilder, where: ir.Value, level: int) -> None:
    """Prefetch the cache line at an address into the cache of a level."""
    pointer = builder.inttoptr(where, ir.IntType(8).as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(4 - level), I32(1))


@operation(lambda where, count: None, literals=[1])
def prefetch_lines(builder: ir.IRBuilder, where: ir.Value, count: int) -> None:
    """Prefetch `count` (literal) cache lines of 64 bytes from an address; harmless past the end of an array."""
    for i in range(count):
        prefetch(builder, builder.add(where, I64(64 * i)), 1)
