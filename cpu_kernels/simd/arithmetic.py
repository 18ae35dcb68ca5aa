"""Lane-wise arithmetic, reductions and the exponential."""

from typing import Any

from llvmlite import ir

from cpu_kernels.simd.declarations import address, float32, int64, intrinsic_of_literals, literal_value, none
from cpu_kernels.simd.vectors import I32, LANES, call, constant, define, f32x16, i32x16, splat

_VECTOR_I, _VECTOR_F = i32x16.llvm, f32x16.llvm


def fused_multiply_add(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once."""
    return call(builder, "llvm.fma.v16f32", _VECTOR_F, x, y, z)


def round_to_even(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The nearest whole number, still as float."""
    return call(builder, "llvm.rint.v16f32", _VECTOR_F, x)


add_i32 = define("add_i32", i32x16(i32x16, i32x16), lambda b, x, y: b.add(x, y))
mul_i32 = define("mul_i32", i32x16(i32x16, i32x16), lambda b, x, y: b.mul(x, y))
or_i32 = define("or_i32", i32x16(i32x16, i32x16), lambda b, x, y: b.or_(x, y))
xor_i32 = define("xor_i32", i32x16(i32x16, i32x16), lambda b, x, y: b.xor(x, y))

add_f32 = define("add_f32", f32x16(f32x16, f32x16), lambda b, x, y: b.fadd(x, y))
sub_f32 = define("sub_f32", f32x16(f32x16, f32x16), lambda b, x, y: b.fsub(x, y))
mul_f32 = define("mul_f32", f32x16(f32x16, f32x16), lambda b, x, y: b.fmul(x, y))
div_f32 = define("div_f32", f32x16(f32x16, f32x16), lambda b, x, y: b.fdiv(x, y))
neg_f32 = define("neg_f32", f32x16(f32x16), lambda b, x: b.fneg(x))
abs_f32 = define("abs_f32", f32x16(f32x16), lambda b, x: call(b, "llvm.fabs.v16f32", _VECTOR_F, x))
max_f32 = define("max_f32", f32x16(f32x16, f32x16), lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
min_f32 = define("min_f32", f32x16(f32x16, f32x16), lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
fma = define("fma", f32x16(f32x16, f32x16, f32x16), fused_multiply_add)

to_f32 = define("to_f32", f32x16(i32x16), lambda b, x: b.sitofp(x, _VECTOR_F))
round_i32 = define("round_i32", i32x16(f32x16), lambda b, x: b.fptosi(round_to_even(b, x), _VECTOR_I))


def _with_literal(name: str, operation: str) -> Any:
    """An integer operation whose second operand is a literal, the same in every lane."""

    def typer(context: Any, x: Any, literal: Any) -> Any:
        if literal_value(literal) is None:
            return None
        value = literal.literal_value

        def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> ir.Value:
            return getattr(builder, operation)(args[0], constant(_VECTOR_I, value))

        return i32x16(i32x16, literal), codegen

    typer.__name__ = typer.__qualname__ = name
    return intrinsic_of_literals(typer)


mask_bits = _with_literal("mask_bits", "and_")
shift_right = _with_literal("shift_right", "lshr")
shift_left = _with_literal("shift_left", "shl")
shift_right_signed = _with_literal("shift_right_signed", "ashr")


def _tree(builder: ir.IRBuilder, x: ir.Value, step: Any) -> ir.Value:
    """Reduce a vector by halves: lane i with lane i + n/2, so that the order of additions is the same everywhere."""
    lanes = x.type.count
    undefined = ir.Constant(x.type, ir.Undefined)
    while lanes > 1:
        lanes //= 2
        order = [(i + lanes) % LANES for i in range(LANES)]
        x = step(x, builder.shuffle_vector(x, undefined, ir.Constant(ir.VectorType(I32, LANES), order)))
    return builder.extract_element(x, I32(0))


sum_f32 = define("sum_f32", float32(f32x16), lambda b, x: _tree(b, x, b.fadd))
sum_i32 = define("sum_i32", int64(i32x16), lambda b, x: b.sext(_tree(b, x, b.add), ir.IntType(64)))


def _first_pairs(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    first = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [lane % 4 < 2 for lane in range(LANES)])
    some = builder.select(first, x, constant(_VECTOR_I, 0))
    return builder.sext(_tree(builder, some, builder.add), ir.IntType(64))


# The sum of the first two of every four lanes.
sum_first_pairs = define("sum_first_pairs", int64(i32x16), _first_pairs)
largest_f32 = define(
    "largest_f32",
    float32(f32x16),
    lambda b, x: _tree(b, x, lambda p, q: b.select(b.fcmp_ordered(">", p, q), p, q)),
)


def _select_first(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, count: ir.Value) -> ir.Value:
    lanes = ir.Constant(_VECTOR_I, list(range(LANES)))
    return builder.select(builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, I32))), x, y)


select_first = define("select_first", f32x16(f32x16, f32x16, int64), _select_first)

# 2**f on [-0.5, 0.5]: Taylor coefficients ln(2)**k / k!, highest first; relative error below 2e-8.
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
    whole = round_to_even(builder, x)
    fraction = builder.fsub(x, whole)
    result = constant(_VECTOR_F, _EXP2[0])
    for coefficient in _EXP2[1:]:
        result = fused_multiply_add(builder, result, fraction, constant(_VECTOR_F, coefficient))
    exponent = builder.add(builder.fptosi(whole, _VECTOR_I), constant(_VECTOR_I, 127))
    power = builder.bitcast(builder.shl(exponent, constant(_VECTOR_I, 23)), _VECTOR_F)
    return builder.fmul(result, power)


exp2_f32 = define("exp2_f32", f32x16(f32x16), _exp2)


def _prefetch_lines(context: Any, where: Any, count: Any) -> Any:
    """Ask for `count` (literal) cache lines of 64 bytes from an address; harmless past the end of an array."""
    if literal_value(count) is None:
        return None
    lines = count.literal_value

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> ir.Value:
        pointer = ir.IntType(8).as_pointer()
        for i in range(lines):
            line = builder.inttoptr(builder.add(args[0], ir.IntType(64)(64 * i)), pointer)
            call(builder, "llvm.prefetch.p0", ir.VoidType(), line, I32(0), I32(3), I32(1))
        return _context.get_dummy_value()

    return none(address, count), codegen


prefetch_lines = intrinsic_of_literals(_prefetch_lines)
