"""Compiled entry points: their declaration, compilation on first use, loading from the disk cache, and linking.

Every kernel has the same signature, kernel(op, step, thread, threads): addresses of two records of 64-bit integers (see
cpu_kernels.records), the calling thread's index, and the number of threads. So a program is a table of addresses, and
Python makes one call per step. Kernels hold no Python object and never raise; all bounds are checked before a step.
"""

import ctypes
import functools
import itertools
import logging
import mmap
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from llvmlite import binding

from cpu_kernels.arguments import Arguments
from cpu_kernels.compile_children import CompileProgress, compile_in_children
from cpu_kernels.kernel_cache import CachedKernel, read_kernel

EntryPoint = ctypes.CFUNCTYPE(None, *([ctypes.c_int64] * 4))
"""Makes compiled code at an address a Python function that releases the GIL."""
log = logging.getLogger("localllm.kernels")
Function = Callable[[int, int, int, int], None]
Samples = Callable[[], Iterable[Any]] | None
_declared: "dict[str, Kernel]" = {}
_MAPS = Path("/proc/self/smaps")
_lock = threading.Lock()
_numbers = itertools.count()
_loaded: list[binding.ResourceTracker] = []


class Kernel:
    """A function with the kernel signature, loaded when its address is first needed, and compiled if it must be.

    name: unique among all kernels, as it is the cache key. module: importing it must declare the kernel, since child
    processes compile it. make(): returns the function; called only to compile it. samples(): small arguments on which
    the compiled kernel is compared with its interpreted source before use; None for a kernel that has no result or
    waits for threads. arguments: those of its operations; None for a kernel that programs do not record.
    """

    def __init__(
        self,
        name: str,
        module: str,
        make: Callable[[], Function],
        samples: Samples = None,
        arguments: type[Arguments] | None = None,
    ) -> None:
        self.name = name
        self.symbol = f"localllm.{name}"
        """Name of the C function in the kernel's object file."""
        self.arguments = arguments
        self.module = module
        self.make = make
        self.samples = samples
        self._address: int | None = None
        self._entry: Any = None
        _declared[name] = self

    def load(self) -> bool:
        """Load from the cache unless already loaded; return whether the kernel is loaded now."""
        if self._address is None and (cached := read_kernel(self.module, self.name)) is not None:
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
            self._entry = EntryPoint(self.address)
        self._entry(op, step, thread, threads)


def compile_all(kernels: Sequence[Kernel], progress: CompileProgress | None = None) -> None:
    """Load kernels from the cache, and compile missing ones, which may take seconds.

    progress: called only if some are missing. It may raise to cancel; finished kernels stay in the cache. Raises
    KernelError.
    """
    missing = [kernel for kernel in kernels if not kernel.load()]
    if not missing:
        return
    # Compile attention first: it takes as long as all others together.
    missing.sort(key=lambda kernel: not kernel.name.startswith("attention."))
    ready = len(kernels) - len(missing)

    def show(done: int) -> None:
        if progress is not None:
            progress(ready + done, len(kernels))

    built = compile_in_children([(kernel.module, kernel.name) for kernel in missing], show)
    for kernel in missing:
        kernel.use(built[kernel.name])
    show(len(missing))


def find_kernel(name: str) -> Kernel:
    """The kernel of this name. Raises KeyError if no imported module declares it."""
    return _declared[name]


def kernel(arguments: type[Arguments] | None = None, samples: Samples = None) -> Callable[[Function], Kernel]:
    """Decorator that declares a module's function as a kernel. arguments, samples: as for Kernel."""

    def declare(function: Function) -> Kernel:
        module = function.__module__
        name = f"{module.removeprefix('cpu_kernels.')}.{function.__name__}"
        return Kernel(name, module, lambda: function, samples, arguments)

    return declare


class LoadError(Exception):
    """An object file that cannot be linked."""


@functools.cache
def _linker() -> binding.LLJIT:
    """LLVM's in-memory linker, for the life of the process."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.create_lljit_compiler(use_jit_link=sys.platform != "win32", suppress_errors=True)


def load_object(code: bytes, symbol: str) -> int:
    """Link an object file for the life of the process and return the address of one of its symbols.

    Raises LoadError if `code` is not an object file of this system, lacks the symbol, or has an unresolved reference.
    """
    with _lock:
        builder = binding.JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol(symbol)
        try:
            linked = builder.link(_linker(), f"kernel {next(_numbers)}")
        except RuntimeError as error:
            raise LoadError(f"{symbol}: {error}") from error
        _loaded.append(linked)
        return int(linked[symbol])


def release_linker() -> None:
    """Return LLVM's memory pages to the system (on Linux): tens of MiB that inference does not use.

    Releases only unmodified, read-only mappings of the library; pages touched again are read from the file.
    """
    if not _MAPS.exists() or not hasattr(mmap, "MADV_DONTNEED"):
        return
    library = ctypes.CDLL(None)
    for first, last, details in re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) r-\S+ .*libllvmlite\S*\n((?:\w+:.*\n)*)", _MAPS.read_text(), re.MULTILINE
    ):
        if re.search(r"^Anonymous: +0 kB", details, re.MULTILINE):
            start = int(first, 16)
            library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(int(last, 16) - start), mmap.MADV_DONTNEED)
