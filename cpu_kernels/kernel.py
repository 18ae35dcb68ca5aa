"""Compiled entry points: how they are declared, compiled on first use, and loaded from the cache on disk.

Every kernel has one signature, kernel(op, step, thread, threads): two addresses of records of 64-bit integers (see
cpu_kernels.records) and who is calling. A program is then a table of addresses, and Python's cost is one call a step.
Kernels hold no Python object and never raise; all bounds are checked before a step.
"""

import ctypes
import logging
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

from cpu_kernels.isa import TARGET, Isa, plain_target
from cpu_kernels.kernel_cache import CachedKernel, read_kernel, write_kernel
from cpu_kernels.loader import LoadError, load_object

_PROTOTYPE = ctypes.CFUNCTYPE(None, *([ctypes.c_int64] * 4))
log = logging.getLogger("localllm.kernels")
Samples = Callable[[], Iterable[Any]] | None
_declared: "WeakValueDictionary[str, Kernel]" = WeakValueDictionary()


class KernelError(Exception):
    """A kernel that no build of computes what its source says."""


class Kernel:
    """A function with the kernel signature, compiled when its address is first asked for.

    name must be unique among all kernels: it is the key in the cache. samples(): small arguments on which the compiled
    kernel is held against its source before it is used; None for one that has no result, or meets other threads.
    """

    def __init__(self, function: Callable[[int, int, int, int], None], name: str, samples: Samples = None) -> None:
        self.name = name
        self.samples = samples
        self.from_cache = False
        self._function = function
        self._address: int | None = None
        self._entry: Any = None
        _declared[name] = self

    @property
    def is_ready(self) -> bool:
        """Whether the kernel has an address already."""
        return self._address is not None

    def load(self) -> bool:
        """Load from the cache, unless that is done; whether there is an address now."""
        if self._address is None and (cached := read_kernel(self.name)) is not None:
            self.from_cache = True
            self._address = load_object(cached.code, self._symbol)
            if cached.portable:
                log.warning("kernel %s is a portable one, which is slower: see localllm doctor", self.name)
        return self._address is not None

    def compile(self) -> None:
        """Load from the cache, or compile, which takes seconds at worst, unless that is done."""
        if not self.load():
            self._address = self._build()

    @property
    def _symbol(self) -> str:
        return f"localllm.{self.name}"

    def _build(self) -> int:
        """Compile and check the kernel, keep it, and return its address.

        Where a build computes something else than its source says, one without this processor's own instructions takes
        its place. Raises KernelError where that is wrong too.
        """
        from cpu_kernels.compiler import CompileError, compile_kernel

        for target in (TARGET, plain_target(Isa.PORTABLE)):
            try:
                code = compile_kernel(self._function, self._symbol, target)
                address = load_object(code, self._symbol)
                self._check(address)
            except (CompileError, LoadError, KernelError) as error:
                log.warning("%s; it is not used. Please report it with what localllm doctor prints.", error)
                continue
            write_kernel(self.name, CachedKernel(code, portable=target is not TARGET))
            return address
        raise KernelError(
            f"no build of the kernel {self.name} computes what its source says on this processor. "
            "Use --backend llama, and please report it with what localllm doctor prints."
        )

    def _check(self, address: int) -> None:
        """Raise KernelError where compiled code computes something else than the source on a sample."""
        from cpu_kernels.self_check import differing

        if self.samples is not None and differing(self.samples(), _PROTOTYPE(address), self._function):
            raise KernelError(f"kernel {self.name}: as compiled for {TARGET.cpu} ({TARGET.isa}), its results are wrong")

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


def find_kernel(name: str) -> Kernel:
    """The kernel of this name. Raises KeyError where no module that was imported declares it."""
    return _declared[name]


def kernel(samples: Samples = None) -> Callable[[Callable[[int, int, int, int], None]], Kernel]:
    """Declare a module's function as a kernel; samples: as Kernel has them."""

    def declare(function: Callable[[int, int, int, int], None]) -> Kernel:
        return Kernel(function, f"{function.__module__.removeprefix('cpu_kernels.')}.{function.__name__}", samples)

    return declare
