"""What threads need to meet: atomics on 64-bit integers, a pause, sleep until woken, and calls through an address."""

import platform
import sys

from llvmlite import ir

from cpu_kernels.isa import ISA, Isa
from cpu_kernels.simd.declarations import address, int64, none
from cpu_kernels.simd.vectors import I64, call, define

_POINTER = I64.as_pointer()
# Linux's number of the system call futex (see futex(2)), and its private operations.
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_WAIT, _WAKE, _EVERYBODY = 128, 129, 2**31 - 1


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


def _futex(builder: ir.IRBuilder, where: ir.Value, operation: int, value: ir.Value) -> None:
    function = builder.module.globals.get("syscall")
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(I64, [I64], var_arg=True), "syscall")
    builder.call(function, [I64(_FUTEX), where, I64(operation), value, I64(0)])


def _sleep(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> None:
    if _FUTEX is not None:
        _futex(builder, where, _WAIT, builder.and_(value, I64(0xFFFFFFFF)))
    else:
        call(builder, "SwitchToThread" if sys.platform == "win32" else "sched_yield", ir.IntType(32))


def _wake(builder: ir.IRBuilder, where: ir.Value) -> None:
    if _FUTEX is not None:
        _futex(builder, where, _WAKE, I64(_EVERYBODY))


def _call_kernel(builder: ir.IRBuilder, function: ir.Value, *args: ir.Value) -> None:
    type_ = ir.FunctionType(ir.VoidType(), [I64] * len(args))
    builder.call(builder.inttoptr(function, type_.as_pointer()), args)


atomic_add = define("atomic_add", int64(address, int64), _add)
atomic_load = define("atomic_load", int64(address), _load)
atomic_store = define("atomic_store", none(address, int64), _store)
pause = define("pause", none(), _pause)
# sleep(where, value) gives the core away until wake(where), or not at all if the low half of the integer there is no
# longer the value's; it may return early. Systems other than Linux only let the next thread go first.
sleep = define("sleep", none(address, int64), _sleep)
wake = define("wake", none(address), _wake)
call_kernel = define("call_kernel", none(address, address, address, int64, int64), _call_kernel)
