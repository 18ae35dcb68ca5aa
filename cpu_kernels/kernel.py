"""Compiled entry points: how they are declared, compiled on first use, and loaded from the cache on disk.

Every kernel has one signature, kernel(op, step, thread, threads): two addresses of records of 64-bit integers (see
cpu_kernels.records) and who is calling. A program is then a table of addresses, and Python's cost is one call a step.
Kernels hold no Python object and never raise; all bounds are checked before a step.
"""

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar, cast

from cpu_kernels.kernel_cache import read_kernel, write_kernel
from cpu_kernels.loader import load_object

_PROTOTYPE = ctypes.CFUNCTYPE(None, *([ctypes.c_int64] * 4))
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Inner:
    """A function that only compiled functions call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self._function = function

    @property
    def _numba_type_(self) -> Any:
        """What Numba asks a global for."""
        from cpu_kernels.compiler import dispatcher

        return dispatcher(self._function)._numba_type_


def inner(function: FunctionT) -> FunctionT:
    """Decorator of functions that only other compiled functions call. Give them a single return: see below.

    LLVM 22 turns a function with two returns and a shift in one branch into a trap when it is inlined into a loop.
    """
    return cast(FunctionT, Inner(function))


class Kernel:
    """A function with the kernel signature, compiled when its address is first asked for.

    name must be unique among all kernels: it is the key in the cache.
    """

    def __init__(self, function: Callable[[int, int, int, int], None], name: str) -> None:
        self.name = name
        self.from_cache = False
        self._function = function
        self._address: int | None = None
        self._entry: Any = None

    @property
    def is_ready(self) -> bool:
        """Whether the kernel has an address already."""
        return self._address is not None

    def compile(self) -> None:
        """Compile, or load from the cache (seconds at worst), unless that is done."""
        if self._address is not None:
            return
        symbol = f"localllm.{self.name}"
        code = read_kernel(self.name)
        self.from_cache = code is not None
        if code is None:
            from cpu_kernels.compiler import compile_kernel

            code = compile_kernel(self._function, symbol)
            write_kernel(self.name, code)
        self._address = load_object(code, symbol)

    @property
    def address(self) -> int:
        """Address of the compiled code; compiles on first use."""
        self.compile()
        assert self._address is not None
        return self._address

    def __call__(self, op: int, step: int, thread: int, threads: int) -> None:
        """Run on this thread, without the interpreter's lock."""
        if self._entry is None:
            self._entry = _PROTOTYPE(self.address)
        self._entry(op, step, thread, threads)


def kernel(function: Callable[[int, int, int, int], None]) -> Kernel:
    """Declare a module's function as a kernel."""
    return Kernel(function, f"{function.__module__.removeprefix('cpu_kernels.')}.{function.__name__}")
