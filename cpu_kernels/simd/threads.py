"""Thread primitives: atomics on 64-bit integers, a clock and a pause for spinning, sleeping on an address, and calls.

The clock is the processor's own: the time stamp counter of x86, the virtual counter of ARM.
"""

import ctypes
import platform
import sys
import time
from typing import Any

from llvmlite import ir

from cpu_kernels.declarations import address, define, int64, none
from cpu_kernels.isa import TARGET
from cpu_kernels.simd.vectors import I32, I64, call
from cpu_kernels.system_facts import is_arm

_POINTER = I64.as_pointer()
# Linux's number of the system call futex (see futex(2)), and its private operations.
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_WAIT, _WAKE, _EVERYBODY = 128, 129, 2**31 - 1
# macOS: UL_COMPARE_AND_WAIT on 32 bits and ULF_WAKE_ALL (bsd/sys/ulock.h of xnu), as libc++ uses them.
_ULOCK_WAIT, _ULOCK_WAKE = 1, 0x101
_FOREVER = 2**32 - 1  # INFINITE of Windows
_MICROSECONDS = 100
_WHOLE_SYSTEM = 15  # the only operand that isb has
SLEEPING = ("syscall", "WaitOnAddress", "WakeByAddressAll", "__ulock_wait", "__ulock_wake", "usleep", "sched_yield")
"""Functions of the systems that compiled code calls to sleep and wake."""
_ARM64, _X86 = is_arm(TARGET.triple), TARGET.triple.startswith(("x86_64", "i686"))
# The time stamp counter runs at 2 to 4 GHz; how long a thread spins need not be exact.
_TICKS_OF_X86 = 2500


def _add(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> ir.Value:
    return builder.atomic_rmw("add", builder.inttoptr(where, _POINTER), value, "seq_cst")


def _load(builder: ir.IRBuilder, where: ir.Value) -> ir.Value:
    return builder.load_atomic(builder.inttoptr(where, _POINTER), "acquire", 8, typ=I64)


def _store(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> None:
    builder.store_atomic(value, builder.inttoptr(where, _POINTER), "release", 8)


def _compare_and_swap(builder: ir.IRBuilder, where: ir.Value, expected: ir.Value, value: ir.Value) -> ir.Value:
    found = builder.cmpxchg(builder.inttoptr(where, _POINTER), expected, value, "seq_cst", "acquire")
    return builder.zext(builder.extract_value(found, 1), I64)


def _pause(builder: ir.IRBuilder) -> None:
    if _ARM64:  # yield does nothing on most processors; isb takes as long as pause
        call(builder, "llvm.aarch64.isb", ir.VoidType(), I32(_WHOLE_SYSTEM))
    elif _X86:
        call(builder, "llvm.x86.sse2.pause", ir.VoidType())


def _register(builder: ir.IRBuilder, name: str) -> ir.Value:
    """A system register of ARM. No assembly text: LLVM could not read it when it compiles for another processor."""
    return call(builder, "llvm.read_volatile_register.i64", I64, builder.module.add_metadata([name]))


def _ticks(builder: ir.IRBuilder) -> ir.Value:
    return _register(builder, "cntvct_el0") if _ARM64 else call(builder, "llvm.readcyclecounter", I64)


def _microseconds(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    rate = builder.udiv(_register(builder, "cntfrq_el0"), I64(1_000_000)) if _ARM64 else I64(_TICKS_OF_X86)
    return builder.mul(count, rate)


def _futex(builder: ir.IRBuilder, where: ir.Value, operation: int, value: ir.Value) -> None:
    function = builder.module.globals.get("syscall")
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(I64, [I64], var_arg=True), "syscall")
    builder.call(function, [I64(_FUTEX), where, I64(operation), value, I64(0)])


def _sleep(builder: ir.IRBuilder, where: ir.Value, value: ir.Value) -> None:
    if _FUTEX is not None:
        _futex(builder, where, _WAIT, builder.and_(value, I64(0xFFFFFFFF)))
    elif sys.platform == "win32":
        with builder.goto_entry_block():
            compared = builder.alloca(I64)
        builder.store(value, compared)
        call(builder, "WaitOnAddress", I32, where, builder.ptrtoint(compared, I64), I64(8), I32(_FOREVER))
    elif sys.platform == "darwin":
        call(builder, "__ulock_wait", I32, I32(_ULOCK_WAIT), where, builder.and_(value, I64(0xFFFFFFFF)), I32(0))
    else:
        call(builder, "usleep", I32, I32(_MICROSECONDS))


def _wake(builder: ir.IRBuilder, where: ir.Value) -> None:
    if _FUTEX is not None:
        _futex(builder, where, _WAKE, I64(_EVERYBODY))
    elif sys.platform == "win32":
        call(builder, "WakeByAddressAll", ir.VoidType(), where)
    elif sys.platform == "darwin":
        call(builder, "__ulock_wake", I32, I32(_ULOCK_WAKE), where, I64(0))


def _yield_core(builder: ir.IRBuilder) -> None:
    if sys.platform == "linux":
        call(builder, "sched_yield", I32)


def _call_kernel(builder: ir.IRBuilder, function: ir.Value, *args: ir.Value) -> None:
    type_ = ir.FunctionType(ir.VoidType(), [I64] * len(args))
    builder.call(builder.inttoptr(function, type_.as_pointer()), args)


def _integer(where: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(where)


def _added(where: int, value: int) -> int:
    before = _integer(where).value
    _integer(where).value = before + value
    return before


def _set(where: int, value: int) -> None:
    _integer(where).value = value


def _swapped(where: int, expected: int, value: int) -> int:
    if _integer(where).value != expected:
        return 0
    _integer(where).value = value
    return 1


def _only_compiled(*_arguments: Any) -> None:
    raise NotImplementedError("threads meet in compiled code alone")


atomic_add = define("atomic_add", [address, int64], int64, _add, _added)
atomic_load = define("atomic_load", [address], int64, _load, lambda where: _integer(where).value)
atomic_store = define("atomic_store", [address, int64], none, _store, _set)
# compare_and_swap(where, expected, value): store the value if the integer is the expected one; 1 if it was, else 0.
compare_and_swap = define("compare_and_swap", [address, int64, int64], int64, _compare_and_swap, _swapped)
pause = define("pause", [], none, _pause, lambda: None)
# ticks(): the clock. microseconds(count): about as many of its ticks as these microseconds take.
ticks = define("ticks", [], int64, _ticks, time.perf_counter_ns)
microseconds = define("microseconds", [int64], int64, _microseconds, lambda count: 1000 * count)
# sleep(where, value) blocks until wake(where). It returns at once if the low half of the integer at `where` differs
# from the value's, and may return early. Where no call waits for an address, it sleeps for a tenth of a millisecond.
sleep = define("sleep", [address, int64], none, _sleep, _only_compiled)
wake = define("wake", [address], none, _wake, _only_compiled)
# yield_core(): let another thread that waits for this core run.
yield_core = define("yield_core", [], none, _yield_core, _only_compiled)
call_kernel = define("call_kernel", [address, address, address, int64, int64], none, _call_kernel, _only_compiled)
