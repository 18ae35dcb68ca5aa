"""A virtual file for llama.cpp, whose bytes are produced as they are read.

llama.cpp accepts a FILE*, and the C library can make one whose reads are callbacks (fopencookie, in glibc and musl). So
a model in another layout needs neither a copy on disk nor a second one in memory.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_ssize_t, c_void_p

from gguf_io.layouts import StandardFile
from gpu_offload.errors import LlamaCppError

_READ = ctypes.CFUNCTYPE(c_ssize_t, c_void_p, c_void_p, c_size_t)
_SEEK = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_int64), c_int)
_FAILED = -1
_FULLY_BUFFERED = 0  # _IOFBF
_BUFFER = 1 << 18  # glibc reads no more than this at once; its own 8 KiB took 0.2 s longer for 390 MiB


class _Calls(ctypes.Structure):
    """cookie_io_functions_t: null functions are not called."""

    _fields_ = (("read", _READ), ("write", c_void_p), ("seek", _SEEK), ("close", c_void_p))


@contextmanager
def served(file: StandardFile) -> Iterator[int]:
    """Yield a FILE* that reads the file from its beginning; it is closed after the block.

    An error while reading fails that read, and is raised after the block. Raises LlamaCppError if the C library has no
    fopencookie.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "fopencookie"):
        raise LlamaCppError("llama.cpp can load files in this layout on Linux only.")
    position = 0
    errors: list[BaseException] = []

    def read(_cookie: int, buffer: int, length: int) -> int:
        nonlocal position
        try:
            done = file.read_into(memoryview((ctypes.c_ubyte * length).from_address(buffer)).cast("B"), position)
        except BaseException as error:  # must not propagate through C frames
            errors.append(error)
            return _FAILED
        position += done
        return done

    def seek(_cookie: int, offset: "ctypes._Pointer[c_int64]", whence: int) -> int:
        nonlocal position
        wanted: int = (0, position, file.size)[whence] + offset[0]
        if wanted < 0:
            return _FAILED
        position = offset[0] = wanted
        return 0

    calls = _Calls(_READ(read), None, _SEEK(seek), None)
    library.fopencookie.argtypes, library.fopencookie.restype = [c_void_p, c_char_p, _Calls], c_void_p
    library.setvbuf.argtypes = [c_void_p, c_char_p, c_int, c_size_t]
    library.fclose.argtypes = [c_void_p]
    stream: int | None = library.fopencookie(None, b"r", calls)
    if not stream:
        raise LlamaCppError("The C library gave no stream for the model's file: too little memory.")
    buffer = ctypes.create_string_buffer(_BUFFER)
    library.setvbuf(stream, buffer, _FULLY_BUFFERED, _BUFFER)
    try:
        yield stream
    finally:
        library.fclose(stream)
        if errors:
            raise errors[0]
