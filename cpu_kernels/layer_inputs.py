"""Layers' own inputs of each token, and how rows without requested logits are dropped.

Threads divide rows or columns; a row's values depend only on that row.
"""

from collections.abc import Iterator

import numpy as np

from cpu_kernels.activations import norm_row
from cpu_kernels.kernel import kernel
from cpu_kernels.records import Step, argument, field, scratch, stage_rows
from cpu_kernels.self_check import Sample
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.arithmetic import add_f32
from cpu_kernels.simd.vectors import get_f32, get_i32, load_f32, store_f32


def _layer_inputs_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    projected, table, out = s.normal(3, 2 * 32), s.normal(3, 64), s.zeros(2 * 4 * 32)
    yield s.arguments(projected, 256, table, 256, out, 4 * 32 * 4, 2, 24, 32, s.normal(32), s.array([1e-3]))


@kernel(_layer_inputs_samples)
def layer_inputs(op: int, step: int, thread: int, threads: int) -> None:
    """out[layer][row] = RMSNorm(projected[row][layer]) * weight + table[row][layer].

    Arguments: 0 projected (rows of layers * D), 1 its stride in bytes, 2 table (rows of layers * width), 3 its stride,
    4 out (rows of D), 5 bytes from one layer's rows to the next's, 6 layers, 7 width, 8 D, which is the width padded to
    whole vectors, 9 weight, 10 address of epsilon.
    """
    layers, width, padded, epsilon = argument(op, 6), argument(op, 7), argument(op, 8), get_f32(argument(op, 10))
    normal = scratch(step, thread)
    items = stage_rows(op, step) * layers
    first, last = first_share(op, step, items, thread, threads)
    while first >= 0:
        for item in range(first, last):
            row, layer = item // layers, item % layers
            source = argument(op, 0) + row * argument(op, 1) + layer * padded * 4
            addend = argument(op, 2) + row * argument(op, 3) + layer * width * 4
            out = argument(op, 4) + layer * argument(op, 5) + row * padded * 4
            norm_row(source, argument(op, 9), width, padded, epsilon, normal)
            for i in range(0, width, 16):
                store_f32(out + i * 4, add_f32(load_f32(normal + i * 4), load_f32(addend + i * 4)))
        first, last = next_share(op, step, items, thread, threads)


def _keep_wanted_samples() -> Iterator[Sample]:
    s = Sample(rows=2)
    s.step({Step.WANTED: s.array([1, 3], np.int32)})
    for apart in (False, True):
        rows = s.normal(2, 5, 48)
        yield s.arguments(
            rows, 48 * 4, 2, 5 * 48 * 4, s.zeros(2 * 3 * 48) if apart else rows, (3 if apart else 5) * 48 * 4
        )


@kernel(_keep_wanted_samples)
def keep_wanted(op: int, step: int, thread: int, threads: int) -> None:
    """Copy the rows with requested logits of some planes to the front of other planes, or of the same ones.

    Row indices are ascending, so copying within a plane is safe. Arguments: 0 rows, 1 bytes of a row, 2 planes, 3 bytes
    from one plane to the next, 4 rows to write, 5 bytes from one plane to the next there.
    """
    vectors = argument(op, 1) // 64
    first, last = first_share(op, step, vectors, thread, threads)
    while first >= 0:
        for plane in range(argument(op, 2)):
            rows, out = argument(op, 0) + plane * argument(op, 3), argument(op, 4) + plane * argument(op, 5)
            for row in range(stage_rows(op, step)):
                source = rows + get_i32(field(step, Step.WANTED) + 4 * row) * argument(op, 1)
                for v in range(first, last):
                    store_f32(out + row * argument(op, 1) + v * 64, load_f32(source + v * 64))
        first, last = next_share(op, step, vectors, thread, threads)
