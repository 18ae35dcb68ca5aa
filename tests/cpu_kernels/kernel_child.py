"""What processes of the cache's tests do: compile or load one small kernel, and say what came of it, as JSON."""

import json
import sys

import numpy as np

from cpu_kernels.kernel import Kernel
from cpu_kernels.kernel_cache import cache_directory
from cpu_kernels.simd.vectors import put_i32


def _add(op: int, step: int, thread: int, threads: int) -> None:
    put_i32(op, step + threads)


add = Kernel(_add, "kernel_child.add")


def main() -> None:
    out = np.zeros(1, np.int32)
    add(out.ctypes.data, 5, 0, 2)
    said = {
        "result": int(out[0]),
        "cached": add.from_cache,
        "numba": "numba" in sys.modules,
        "folder": str(cache_directory()),
    }
    json.dump(said, sys.stdout)
