"""Loads compiled kernels from object files into this process, using LLVM's linker only, not its compiler."""

import ctypes
import functools
import itertools
import mmap
import re
import threading
from pathlib import Path

from llvmlite import binding

_MAPS = Path("/proc/self/smaps")
# Functions that kernels may call: memory, mathematics that the processor has no instruction for, and sleeping.
SYMBOLS = ("memcpy", "memmove", "memset", "exp", "expf", "log", "fmaf", "rintf", "syscall", "usleep")
_lock = threading.Lock()
_numbers = itertools.count()
_loaded: list[binding.ResourceTracker] = []


class LoadError(Exception):
    """An object file that cannot be linked."""


@functools.cache
def _linker() -> binding.LLJIT:
    """LLVM's in-memory linker, kept for the life of the process."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.create_lljit_compiler(use_jit_link=True, suppress_errors=True)


def load_object(code: bytes, symbol: str) -> int:
    """Link an object file for the life of the process and return the address of one of its symbols.

    Raises LoadError if it is not an object file of this system, lacks the symbol, or calls a missing function.
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
    """Return LLVM's pages to the system (on Linux): tens of MiB that computing does not need.

    Releases only read-only pages that equal the file's; the system reads them again if they are used.
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
