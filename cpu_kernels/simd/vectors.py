"""Vector values for Numba: sixteen lanes of 32 bits, and the memory they come from.

A vector is an ordinary local variable of a jitted function; LLVM splits it where registers are narrower than 512 bits.
Addresses are plain integers (intp), so that one record of integers can describe a whole step. Nothing here checks
bounds: callers do, once a step.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from cpu_kernels.simd.declarations import (
    Signature,
    Vector,
    address,
    float32,
    int32,
    int64,
    intrinsic,
    none,
)

LANES = 16

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()

Emit = Callable[..., ir.Value | None]


i32x16 = Vector(I32, LANES)
f32x16 = Vector(F32, LANES)


def define(name: str, signature: Signature, emit: Emit) -> Any:
    """Return an intrinsic of one fixed signature whose body is emit(builder, *values)."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        result = emit(builder, *args)
        return context.get_dummy_value() if result is None else result

    typed = (signature, codegen)
    typers: dict[int, Callable[..., Any]] = {
        0: lambda context: typed,
        1: lambda context, a: typed,
        2: lambda context, a, b: typed,
        3: lambda context, a, b, c: typed,
        4: lambda context, a, b, c, d: typed,
        5: lambda context, a, b, c, d, e: typed,
    }
    typer = typers[len(signature.arguments)]
    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


def constant(type_: ir.Type, value: float) -> ir.Constant:
    """The value in every lane of a vector type."""
    return ir.Constant(type_, [value] * type_.count)


def call(
    builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value, fastmath: tuple[str, ...] = ()
) -> ir.Value:
    """Call an LLVM intrinsic or an external symbol, declaring it on first use."""
    module = builder.module
    function = module.globals.get(name)
    if function is None:
        function = ir.Function(module, ir.FunctionType(result, [arg.type for arg in args]), name)
    return builder.call(function, args, fastmath=fastmath)


def load(builder: ir.IRBuilder, where: ir.Value, type_: ir.Type, align: int = 1) -> ir.Value:
    """Load a value of any LLVM type from an integer address."""
    value = builder.load(builder.inttoptr(where, type_.as_pointer()), typ=type_)
    value.align = align
    return value


def store(builder: ir.IRBuilder, where: ir.Value, value: ir.Value, align: int = 1) -> None:
    """Store a value of any LLVM type at an integer address."""
    builder.store(value, builder.inttoptr(where, value.type.as_pointer())).align = align


def splat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int = LANES) -> ir.Value:
    """The scalar in every lane."""
    type_ = ir.VectorType(scalar.type, lanes)
    undefined = ir.Constant(type_, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def broadcast(builder: ir.IRBuilder, where: ir.Value, type_: ir.Type) -> ir.Value:
    """The 32-bit scalar at an address in every lane; LLVM folds it into a broadcasting memory operand."""
    return splat(builder, load(builder, where, type_, 4))


def _emit_load(element: ir.Type, align: int) -> Emit:
    return lambda builder, where: load(builder, where, ir.VectorType(element, LANES), align)


def _emit_store(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> None:
    store(builder, where, value)


def _bf16_to_f32(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    raw = load(builder, where, ir.VectorType(I16, LANES), 2)
    wide = builder.shl(builder.zext(raw, i32x16.llvm), constant(i32x16.llvm, 16))
    return builder.bitcast(wide, f32x16.llvm)


load_i32 = define("load_i32", i32x16(address), _emit_load(I32, 4))
load_f32 = define("load_f32", f32x16(address), _emit_load(F32, 4))
load_f16 = define("load_f16", f32x16(address), lambda b, p: b.fpext(_emit_load(F16, 2)(b, p), f32x16.llvm))
load_bf16 = define("load_bf16", f32x16(address), _bf16_to_f32)
store_i32 = define("store_i32", none(address, i32x16), _emit_store)
store_f32 = define("store_f32", none(address, f32x16), _emit_store)
store_f16 = define(
    "store_f16",
    none(address, f32x16),
    lambda b, p, v: store(b, p, b.fptrunc(v, ir.VectorType(F16, LANES)), 2),
)

broadcast_i32 = define("broadcast_i32", i32x16(address), lambda b, p: broadcast(b, p, I32))
broadcast_f32 = define("broadcast_f32", f32x16(address), lambda b, p: broadcast(b, p, F32))
splat_i32 = define("splat_i32", i32x16(int32), splat)
splat_f32 = define("splat_f32", f32x16(float32), splat)
zero_i32 = define("zero_i32", i32x16(), lambda b: constant(i32x16.llvm, 0))
zero_f32 = define("zero_f32", f32x16(), lambda b: constant(f32x16.llvm, 0.0))


def _store_scattered(element: ir.Type, narrow: str, group: int) -> Emit:
    """Narrow each lane and store runs of `group` lanes at p, p + stride, ..."""

    def emit(builder: ir.IRBuilder, where: ir.Value, stride: ir.Value, value: ir.Value) -> None:
        small = getattr(builder, narrow)(value, ir.VectorType(element, LANES))
        if group > 1:
            small = builder.bitcast(small, ir.VectorType(I32, LANES // group))
        for i in range(LANES // group):
            offset = builder.mul(stride, I64(i))
            store(builder, builder.add(where, offset), builder.extract_element(small, I32(i)), 2)

    return emit


scatter_i8x4 = define("scatter_i8x4", none(address, address, i32x16), _store_scattered(I8, "trunc", 4))
scatter_f16 = define("scatter_f16", none(address, address, f32x16), _store_scattered(F16, "fptrunc", 1))


def _scalar_load(type_: ir.Type, widen: str | None, to: ir.Type | None) -> Emit:
    def emit(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
        value = load(builder, where, type_)
        return value if widen is None else getattr(builder, widen)(value, to)

    return emit


def _scalar_store(narrow: str | None, to: ir.Type | None) -> Emit:
    def emit(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> None:
        store(builder, where, value if narrow is None else getattr(builder, narrow)(value, to))

    return emit


get_i64 = define("get_i64", int64(address), _scalar_load(I64, None, None))
get_i32 = define("get_i32", int64(address), _scalar_load(I32, "sext", I64))
get_i16 = define("get_i16", int64(address), _scalar_load(I16, "sext", I64))
get_i8 = define("get_i8", int64(address), _scalar_load(I8, "sext", I64))
get_u8 = define("get_u8", int64(address), _scalar_load(I8, "zext", I64))
get_f32 = define("get_f32", float32(address), _scalar_load(F32, None, None))
get_f16 = define("get_f16", float32(address), _scalar_load(F16, "fpext", F32))
put_i64 = define("put_i64", none(address, int64), _scalar_store(None, None))
put_i32 = define("put_i32", none(address, int64), _scalar_store("trunc", I32))
put_i16 = define("put_i16", none(address, int64), _scalar_store("trunc", I16))
put_u8 = define("put_u8", none(address, int64), _scalar_store("trunc", I8))
put_f32 = define("put_f32", none(address, float32), _scalar_store(None, None))
put_f16 = define("put_f16", none(address, float32), _scalar_store("fptrunc", F16))
