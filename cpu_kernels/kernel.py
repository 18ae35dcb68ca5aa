"""Kernels, the compiled entry points: declared, compiled on first use, and loaded from the cache on disk.

Every kernel has the same signature, kernel(op, step, thread, threads): two addresses of records of 64-bit integers (see
cpu_kernels.records), the calling thread's index, and the number of threads. So a program is a table of addresses, and
Python makes one call per step. Kernels hold no Python object and never raise; all bounds are checked before a step.
"""

import ctypes
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from cpu_kernels.compile_children import CompileProgress, compile_in_children
from cpu_kernels.kernel_cache import CachedKernel, read_kernel
from cpu_kernels.loader import load_object

_PROTOTYPE = ctypes.CFUNCTYPE(None, *([ctypes.c_int64] * 4))
log = logging.getLogger("localllm.kernels")
Samples = Callable[[], Iterable[Any]] | None
_declared: "WeakValueDictionary[str, Kernel]" = WeakValueDictionary()


class Kernel:
    """A function with the kernel signature, compiled when its address is first needed.

    name must be unique among all kernels: it is the key in the cache. Importing the function's module, or the table of
    formats, must declare the kernel, since child processes compile it. samples(): small arguments on which the compiled
    kernel is compared with its source before it is used; None for one without a result, or that waits for threads.
    """

    def __init__(self, function: Callable[[int, int, int, int], None], name: str, samples: Samples = None) -> None:
        self.function = function
        self.name = name
        self.samples = samples
        self.from_cache = False
        self._address: int | None = None
        self._entry: Any = None
        _declared[name] = self

    @property
    def symbol(self) -> str:
        """Name of the C function in the kernel's object file."""
        return f"localllm.{self.name}"

    @staticmethod
    def entry(address: int) -> Callable[[int, int, int, int], None]:
        """Compiled code as a Python function that releases the GIL."""
        return _PROTOTYPE(address)

    def load(self) -> bool:
        """Load from the cache unless already loaded; return whether the kernel has an address now."""
        if self._address is None and (cached := read_kernel(self.name)) is not None:
            self.from_cache = True
            self.use(cached)
        return self._address is not None

    def use(self, built: CachedKernel) -> None:
        """Load compiled code into this process. Raises LoadError."""
        self._address = load_object(built.code, self.symbol)
        if built.portable:
            log.warning("kernel %s is a portable one, which is slower: see localllm doctor", self.name)

    @property
    def address(self) -> int:
        """Address of the compiled code. Compiles on first use; raises KernelError if that fails."""
        if self._address is None:
            compile_all([self])
        assert self._address is not None
        return self._address

    def __call__(self, op: int, step: int, thread: int, threads: int) -> None:
        """Run on this thread, without the GIL."""
        if self._entry is None:
            self._entry = self.entry(self.address)
        self._entry(op, step, thread, threads)


def compile_all(kernels: Sequence[Kernel], progress: CompileProgress | None = None) -> None:
    """Load kernels from the cache, or compile them, which may take seconds.

    progress may raise to cancel; finished kernels stay in the cache. Raises KernelError.
    """
    missing = [kernel for kernel in kernels if not kernel.load()]
    # Start attention first: it takes as long as all others together.
    missing.sort(key=lambda kernel: not kernel.name.startswith("attention."))
    ready = len(kernels) - len(missing)

    def show(done: int) -> None:
        if progress is not None:
            progress(ready + done, len(kernels))

    if missing:
        built = compile_in_children([(kernel.function.__module__, kernel.name) for kernel in missing], show)
        for kernel in missing:
            kernel.use(built[kernel.name])
    show(len(missing))


def find_kernel(name: str) -> Kernel:
    """The kernel of this name. Raises KeyError if no imported module declares it."""
    return _declared[name]


def kernel(samples: Samples = None) -> Callable[[Callable[[int, int, int, int], None]], Kernel]:
    """Decorator that declares a module's function as a kernel. samples: as for Kernel."""

    def declare(function: Callable[[int, int, int, int], None]) -> Kernel:
        return Kernel(function, f"{function.__module__.removeprefix('cpu_kernels.')}.{function.__name__}", samples)

    return declare
