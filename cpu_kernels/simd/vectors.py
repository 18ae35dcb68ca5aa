"""Vector values: sixteen lanes of 32 bits, and their loads and stores.

A vector is an ordinary local variable of a compiled function; LLVM splits it where registers are narrower than 512
bits. Addresses are plain integers (intp), so that one record of integers can describe a whole step. Nothing here checks
bounds: callers do, once per step.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from cpu_kernels.declarations import Vector, address, define, float32, int64, none
from cpu_kernels.isa import POLICIES, emitted_isa

LANES = 16

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
i32x16, f32x16 = Vector(I32, LANES), Vector(F32, LANES)

Lanes = NDArray[np.int32]  # a vector of integers, in Python
Values = list[ir.Value]


def view(where: int, dtype: Any, count: int = LANES) -> NDArray[Any]:
    """The numbers at an address as an array that shares their memory."""
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(where), dtype)


def constant(type_: ir.Type, value: float) -> ir.Constant:
    """A value of a scalar type, or in every lane of a vector type."""
    return ir.Constant(type_, [value] * type_.count if isinstance(type_, ir.VectorType) else value)


def like(type_: ir.Type, element: ir.Type) -> ir.Type:
    """The type with another element type: a vector of as many lanes, or the element itself for a scalar."""
    return ir.VectorType(element, type_.count) if isinstance(type_, ir.VectorType) else element


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


def at(builder: ir.IRBuilder, where: ir.Value, offset: int) -> ir.Value:
    """The address plus a constant offset in bytes."""
    return builder.add(where, I64(offset))


def splat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int = LANES) -> ir.Value:
    """The scalar in every lane."""
    type_ = ir.VectorType(scalar.type, lanes)
    undefined = ir.Constant(type_, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def broadcast(builder: ir.IRBuilder, where: ir.Value, type_: ir.Type) -> ir.Value:
    """The 32-bit scalar at an address in every lane; LLVM folds it into a broadcasting memory operand."""
    return splat(builder, load(builder, where, type_, 4))


def piece(builder: ir.IRBuilder, value: ir.Value, index: int, parts: int) -> ir.Value:
    """One of `parts` equal pieces of a vector."""
    if parts == 1:
        return value
    lanes = value.type.count // parts
    order = ir.Constant(ir.VectorType(I32, lanes), list(range(index * lanes, (index + 1) * lanes)))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), order)


def join(builder: ir.IRBuilder, pieces: list[ir.Value]) -> ir.Value:
    """Concatenate equal pieces to a vector."""
    while len(pieces) > 1:
        lanes = 2 * pieces[0].type.count
        order = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
        pieces = [builder.shuffle_vector(a, b, order) for a, b in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0]


def in_parts(
    builder: ir.IRBuilder, name: str, parts: int, *operands: ir.Value, result: ir.Type | None = None
) -> ir.Value:
    """Apply an LLVM intrinsic on narrower vectors to each of `parts` pieces. result: its type, if not the pieces'."""
    pieces = [[piece(builder, v, index, parts) for v in operands] for index in range(parts)]
    return join(builder, [call(builder, name, result or each[0].type, *each) for each in pieces])


def widen_half(builder: ir.IRBuilder, half: ir.Value) -> ir.Value:
    """Half precision to single. Without an instruction, shifts the bits and scales to correct the exponent."""
    single = like(half.type, F32)
    if POLICIES[emitted_isa()].converts_halves:
        return builder.fpext(half, single)
    integer = like(half.type, I32)
    bits = builder.zext(builder.bitcast(half, like(half.type, I16)), integer)
    sign = builder.shl(builder.and_(bits, constant(integer, 0x8000)), constant(integer, 16))
    rest = builder.shl(builder.and_(bits, constant(integer, 0x7FFF)), constant(integer, 13))
    scaled = builder.fmul(builder.bitcast(rest, single), constant(single, 2.0**112))
    special = builder.icmp_unsigned(">=", rest, constant(integer, 0x7C00 << 13))
    infinite = builder.or_(rest, constant(integer, 0x7F800000))
    found = builder.select(special, infinite, builder.bitcast(scaled, integer))
    return builder.bitcast(builder.or_(found, sign), single)


def narrow_to_half(builder: ir.IRBuilder, single: ir.Value) -> ir.Value:
    """Single precision to half, ties to even. Without an instruction, adding 0.5 rounds results that are subnormal."""
    half = like(single.type, F16)
    if POLICIES[emitted_isa()].converts_halves:
        return builder.fptrunc(single, half)
    integer = like(single.type, I32)
    bits = builder.bitcast(single, integer)
    sign = builder.and_(bits, constant(integer, -(2**31)))
    size = builder.xor(bits, sign)
    odd = builder.and_(builder.lshr(size, constant(integer, 13)), constant(integer, 1))
    biased = builder.add(builder.add(size, odd), constant(integer, 0xFFF - (112 << 23)))
    normal = builder.lshr(biased, constant(integer, 13))
    tiny = builder.fadd(builder.bitcast(size, single.type), constant(single.type, 0.5))
    subnormal = builder.sub(builder.bitcast(tiny, integer), constant(integer, 126 << 23))
    nan = builder.icmp_unsigned(">", size, constant(integer, 255 << 23))
    special = builder.select(nan, constant(integer, 0x7E00), constant(integer, 0x7C00))
    found = builder.select(builder.icmp_unsigned("<", size, constant(integer, 113 << 23)), subnormal, normal)
    found = builder.select(builder.icmp_unsigned(">=", size, constant(integer, 143 << 23)), special, found)
    found = builder.or_(found, builder.lshr(sign, constant(integer, 16)))
    return builder.bitcast(builder.trunc(found, like(single.type, I16)), half)


def _load(name: str, result: Vector, element: ir.Type, dtype: Any, widen: Any = None) -> Any:
    def emit(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
        value = load(builder, where, ir.VectorType(element, LANES), np.dtype(dtype).itemsize)
        return value if widen is None else widen(builder, value)

    return define(name, [address], result, emit, lambda p: view(p, dtype).astype(np.float32 if widen else dtype))


load_i32 = _load("load_i32", i32x16, I32, np.int32)
load_f32 = _load("load_f32", f32x16, F32, np.float32)
load_f16 = _load("load_f16", f32x16, F16, np.float16, widen_half)


def _load_bf16(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    words = builder.zext(load(builder, where, ir.VectorType(I16, LANES), 2), i32x16.llvm)
    return builder.bitcast(builder.shl(words, constant(i32x16.llvm, 16)), f32x16.llvm)


load_bf16 = define(
    "load_bf16",
    [address],
    f32x16,
    _load_bf16,
    lambda p: (view(p, np.uint16).astype(np.uint32) << 16).view(np.float32),
)


def _store(name: str, value: Vector, dtype: Any, narrow: Any = None, align: int = 1) -> Any:
    def emit(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> None:
        store(builder, where, value if narrow is None else narrow(builder, value), align)

    def meaning(where: int, value: NDArray[Any]) -> None:
        view(where, dtype)[:] = value.astype(dtype)

    return define(name, [address, value], none, emit, meaning)


store_i32 = _store("store_i32", i32x16, np.int32)
store_f32 = _store("store_f32", f32x16, np.float32)
store_i16 = _store("store_i16", i32x16, np.int16, lambda b, v: b.trunc(v, ir.VectorType(I16, LANES)), 2)


def _full(value: Any, dtype: Any) -> NDArray[Any]:
    return np.full(LANES, value, dtype)


splat_f32 = define("splat_f32", [float32], f32x16, splat, lambda x: _full(x, np.float32))
splat_i32 = define("splat_i32", [int64], i32x16, lambda b, x: splat(b, b.trunc(x, I32)), lambda x: _full(x, np.int32))
# The same integer, of which LLVM knows nothing. A loop that it bounds is not unrolled entirely.
opaque = define(
    "opaque",
    [int64],
    int64,
    lambda b, x: b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [x], side_effect=False),
    lambda x: x,
)
zero_i32 = define("zero_i32", [], i32x16, lambda b: constant(i32x16.llvm, 0), lambda: _full(0, np.int32))
zero_f32 = define("zero_f32", [], f32x16, lambda b: constant(f32x16.llvm, 0.0), lambda: _full(0, np.float32))


def _scatter(name: str, value: Vector, dtype: Any, narrow: Any, group: int) -> Any:
    """Narrow each lane and store runs of `group` lanes at p, p + stride, ..."""

    def emit(builder: ir.IRBuilder, where: ir.Value, stride: ir.Value, value: ir.Value) -> None:
        small = narrow(builder, value)
        if group > 1:
            small = builder.bitcast(small, ir.VectorType(I32, LANES // group))
        for i in range(LANES // group):
            place = builder.add(where, builder.mul(stride, I64(i)))
            store(builder, place, builder.extract_element(small, I32(i)), 2)

    def meaning(where: int, stride: int, value: NDArray[Any]) -> None:
        for i, some in enumerate(value.astype(dtype).reshape(-1, group)):
            view(where + i * stride, dtype, group)[:] = some

    return define(name, [address, address, value], none, emit, meaning)


scatter_i8x4 = _scatter("scatter_i8x4", i32x16, np.int8, lambda b, v: b.trunc(v, ir.VectorType(I8, LANES)), 4)
scatter_i16, scatter_i16x2 = (
    _scatter(name, i32x16, np.int16, lambda b, v: b.trunc(v, ir.VectorType(I16, LANES)), group)
    for name, group in (("scatter_i16", 1), ("scatter_i16x2", 2))
)
scatter_f16 = _scatter("scatter_f16", f32x16, np.float16, narrow_to_half, 1)


def _get(name: str, type_: ir.Type, number: Any, widen: Callable[..., ir.Value] | None = None) -> Any:
    """An integer from memory, widened to 64 bits. number: its type in C."""

    def emit(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
        value = load(builder, where, type_)
        return value if widen is None else widen(builder, value)

    return define(name, [address], int64, emit, lambda where: number.from_address(where).value)


def _put(name: str, type_: ir.Type, number: Any) -> Any:
    """Store the lowest bits of an integer. number: its type in C."""

    def emit(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> None:
        store(builder, where, value if type_ is I64 else builder.trunc(value, type_))

    def meaning(where: int, value: int) -> None:
        number.from_address(where).value = value

    return define(name, [address, int64], none, emit, meaning)


def _put_float(name: str, dtype: Any, narrow: Callable[..., ir.Value]) -> Any:
    def meaning(where: int, value: np.float32) -> None:
        view(where, dtype, 1)[0] = value

    return define(name, [address, float32], none, lambda b, p, v: store(b, p, narrow(b, v)), meaning)


get_i64 = _get("get_i64", I64, ctypes.c_int64)
get_i32 = _get("get_i32", I32, ctypes.c_int32, lambda b, v: b.sext(v, I64))
get_i16 = _get("get_i16", I16, ctypes.c_int16, lambda b, v: b.sext(v, I64))
get_u8 = _get("get_u8", I8, ctypes.c_uint8, lambda b, v: b.zext(v, I64))
get_f32 = define("get_f32", [address], float32, lambda b, p: load(b, p, F32), lambda p: view(p, np.float32, 1)[0])
get_f16 = define(
    "get_f16",
    [address],
    float32,
    lambda b, p: widen_half(b, load(b, p, F16)),
    lambda p: np.float32(view(p, np.float16, 1)[0]),
)
put_i64 = _put("put_i64", I64, ctypes.c_int64)
put_i32 = _put("put_i32", I32, ctypes.c_int32)
put_i16 = _put("put_i16", I16, ctypes.c_int16)
put_u8 = _put("put_u8", I8, ctypes.c_uint8)
put_f32 = _put_float("put_f32", np.float32, lambda b, v: v)
put_f16 = _put_float("put_f16", np.float16, narrow_to_half)
