"""Child processes of the cache's tests: compile or load one small kernel and report the result as JSON."""

import json
import logging
import os
import sys

import numpy as np

from cpu_kernels.compile_children import KernelError
from cpu_kernels.declarations import define, int64
from cpu_kernels.isa import Isa, emitted_isa
from cpu_kernels.kernel import Kernel
from cpu_kernels.kernel_cache import cache_directory, portable_kernels, read_kernel
from cpu_kernels.self_check import Sample
from cpu_kernels.simd.vectors import I64, call, put_i32


def _add(op: int, step: int, thread: int, threads: int) -> None:
    put_i32(op, step + threads)


add = Kernel("kernel_child.add", __name__, lambda: _add)


def say(cached: bool, result: int = 7) -> None:
    said = {
        "result": result,
        "cached": cached,
        "numba": "numba" in sys.modules,
        "folder": str(cache_directory()),
        "portable": portable_kernels(),
    }
    json.dump(said, sys.stdout)


def run(kernel: Kernel) -> int:
    out = np.zeros(1, np.int32)
    kernel(out.ctypes.data, 5, 0, 2)
    return int(out[0])


def main() -> None:
    cached = add.load()
    say(cached, run(add))


def folder_alone() -> None:
    """Open the cache without compiling anything."""
    read_kernel("", "none")
    say(cached=False)


def another_process_removes() -> None:
    """What this process removes from old folders has just been removed by another one."""
    unlink = os.unlink

    def already_gone(path, *, dir_fd=None) -> None:
        unlink(path, dir_fd=dir_fd)
        if path.endswith(".kernel"):
            raise FileNotFoundError(2, "No such file", path)

    os.unlink = already_gone
    main()


def exchange_folder_and_load() -> None:
    """Replace the cache's folder by another after it was opened."""
    read_kernel("", "none")
    folder = cache_directory()
    folder.rename(folder.with_name("moved"))
    os.mkdir(folder)
    main()


def _kernel(number, name: str) -> Kernel:
    def add_number(op: int, step: int, thread: int, threads: int) -> None:
        put_i32(op, step + number())

    # The kernel writes into the sample's op record, as `run` expects.
    return Kernel(f"kernel_child.{name}", __name__, lambda: add_number, lambda: iter([Sample()]))


_LIAR = _kernel(define("two", [], int64, lambda b: I64(2 if emitted_isa() is Isa.PORTABLE else 3), lambda: 2), "liar")
_ALWAYS_WRONG = _kernel(define("three", [], int64, lambda b: I64(3), lambda: 2), "always_wrong")
_CALLS_OUT = _kernel(define("clock", [], int64, lambda b: call(b, "clock", I64), lambda: 2), "calls_out")


def liar() -> None:
    logging.basicConfig()
    cached = _LIAR.load()
    say(cached, run(_LIAR))


def _refused(kernel: Kernel) -> None:
    logging.basicConfig()
    try:
        run(kernel)
    except KernelError as error:
        sys.stderr.write(str(error))
        say(cached=False)


def always_wrong() -> None:
    _refused(_ALWAYS_WRONG)


def calls_out() -> None:
    _refused(_CALLS_OUT)
