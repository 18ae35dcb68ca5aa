"""What threads need to meet: atomics on 64-bit integers, a pause, and calls through an address."""

from llvmlite import ir
from numba.core import types

from cpu_kernels.isa import ISA, Isa
from cpu_kernels.simd.vectors import I64, address, call, define

_POINTER = I64.as_pointer()


def _add(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> ir.Value:
    return builder.atomic_rmw("add", builder.inttoptr(where, _POINTER), value, "seq_cst")


def _load(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    return builder.load_atomic(builder.inttoptr(where, _POINTER), "acquire", 8, typ=I64)


def _store(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> None:
    builder.store_atomic(value, builder.inttoptr(where, _POINTER), "release", 8)


def _pause(builder: ir.IRBuilder) -> None:
    if ISA is Isa.NEON_DOT:
        call(builder, "llvm.aarch64.hint", ir.VoidType(), ir.IntType(32)(1))
    elif ISA is not Isa.PORTABLE:
        call(builder, "llvm.x86.sse2.pause", ir.VoidType())


def _call_kernel(builder: ir.IRBuilder, function: ir.Value, *args: ir.Value) -> None:
    type_ = ir.FunctionType(ir.VoidType(), [I64] * len(args))
    builder.call(builder.inttoptr(function, type_.as_pointer()), args)


atomic_add = define("atomic_add", types.int64(address, types.int64), _add)
atomic_load = define("atomic_load", types.int64(address), _load)
atomic_store = define("atomic_store", types.none(address, types.int64), _store)
pause = define("pause", types.none(), _pause)
call_kernel = define("call_kernel", types.none(address, address, address, types.int64, types.int64), _call_kernel)
