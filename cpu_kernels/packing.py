"""Walking the rows of a matrix: from a tensor's blocks into packed groups at load, and one row back for embeddings.

Arguments of a repack: 0 source, 1 bytes of a source row, 2 packed weights, 3 bytes of a group, 4 rows of a group, 5 k,
6 row map (int32 a packed row: the source row, or -1 for a row of zeros), 7 groups.
Arguments of an embedding: 0 packed weights, 1 bytes of a group, 2 rows of a group, 3 k, 4 x, 5 x stride,
6 address of the factor that rows are multiplied by.
"""

from typing import Any

import numpy as np

from cpu_kernels.kernel import Kernel
from cpu_kernels.records import Step, argument, field, share, stage_rows
from cpu_kernels.simd.vectors import get_f32, get_i32, put_f32, put_u8

_TOKENS = int(Step.TOKENS)


def repack_kernel(pack_row: Any, name: str) -> Kernel:
    """Call pack_row(source row, packed group, row within the group, k) for every packed row of this thread's groups."""

    def repack(op: int, step: int, thread: int, threads: int) -> None:
        group_bytes, group_rows, k, rows = argument(op, 3), argument(op, 4), argument(op, 5), argument(op, 6)
        groups = argument(op, 7)
        for g in range(share(groups, thread, threads), share(groups, thread + 1, threads)):
            group = argument(op, 2) + g * group_bytes
            for i in range(group_bytes):
                put_u8(group + i, 0)
            for lane in range(group_rows):
                row = get_i32(rows + 4 * (g * group_rows + lane))
                if row >= 0:
                    pack_row(argument(op, 0) + row * argument(op, 1), group, lane, k)

    return Kernel(repack, f"{name}.repack")


def embed_kernel(unpack_row: Any, name: str) -> Kernel:
    """x[row] = factor * the packed row of the row's token; unpack_row(group, row within the group, k, out)."""

    def embed(op: int, step: int, thread: int, threads: int) -> None:
        group_bytes, group_rows, k = argument(op, 1), argument(op, 2), argument(op, 3)
        factor = get_f32(argument(op, 6))
        rows = stage_rows(op, step)
        for row in range(share(rows, thread, threads), share(rows, thread + 1, threads)):
            token = get_i32(field(step, _TOKENS) + 4 * row)
            x = argument(op, 4) + row * argument(op, 5)
            unpack_row(argument(op, 0) + token // group_rows * group_bytes, token % group_rows, k, x)
            if factor != np.float32(1.0):
                for i in range(k):
                    put_f32(x + 4 * i, get_f32(x + 4 * i) * factor)

    return Kernel(embed, f"{name}.embed")
