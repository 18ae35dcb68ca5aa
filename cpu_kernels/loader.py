"""Compiled kernels from object files into this process: LLVM links them, which takes no compiler."""

import ctypes
import functools
import mmap
import re
import threading
from pathlib import Path

from llvmlite import binding

_MAPS = Path("/proc/self/smaps")
_lock = threading.Lock()


class LoadError(Exception):
    """An object file that cannot be linked."""


@functools.cache
def _engine() -> binding.ExecutionEngine:
    """LLVM's linker in memory, for the process's life; kernels' code stays."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    return binding.create_mcjit_compiler(binding.parse_assembly(""), machine)


def load_object(code: bytes, symbol: str) -> int:
    """Link an object file and return the address of a symbol of it. Raises LoadError."""
    with _lock:
        try:
            _engine().add_object_file(binding.ObjectFileRef.from_data(code))
            _engine().finalize_object()
            address = int(_engine().get_function_address(symbol))
        except RuntimeError as error:
            raise LoadError(str(error)) from error
    if not address:
        raise LoadError(f"no {symbol} in an object file")
    return address


def release_linker() -> None:
    """Give LLVM's pages back to the system (on Linux): tens of MiB that computing has no use for.

    Only what cannot be written and is as in its file goes; what is touched again is read again.
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
