"""Rotary embeddings, and keys and values on their way into pages.

Heads are padded to D values, a multiple of 32, and their rows are ordered at load so that every rotation is of the
half-split kind: value i turns with value i + D/2. A rope table holds cos[D/2], sin[D/2] for each position; values that
do not turn have cos 1 and sin 0.
"""

import math

import numpy as np

from cpu_kernels.kernel import inner, kernel
from cpu_kernels.records import Step, argument, field, scratch, share, stage_rows
from cpu_kernels.simd.arithmetic import add_f32, fma, mul_f32, sub_f32, sum_f32
from cpu_kernels.simd.vectors import (
    get_f32,
    get_i32,
    load_f32,
    scatter_f16,
    splat_f32,
    store_f16,
    store_f32,
    zero_f32,
)

PAGE_TOKENS = 16
_ONE = np.float32(1.0)
_POSITIONS, _ROW_TABLES, _ROPE_TABLES = int(Step.POSITIONS), int(Step.ROW_TABLES), int(Step.ROPE_TABLES)


@inner
def owner(item: int, threads: int) -> int:
    """The thread that an item belongs to, dealt forth and back, since later items tend to be longer."""
    turn = item % (2 * threads)
    return turn if turn < threads else 2 * threads - 1 - turn


@inner
def rotate_head(
    x: int, norm: int, table: int, padded: int, size: int, epsilon: np.float32, scale: np.float32, out: int
) -> None:
    """out = scale * rope(RMSNorm(x) * norm) of one head; norm 0 leaves it out. size: values without padding."""
    factor = splat_f32(_ONE)
    if norm != 0:
        squares = zero_f32()
        for i in range(0, padded, 16):
            v = load_f32(x + i * 4)
            squares = fma(v, v, squares)
        factor = splat_f32(_ONE / np.float32(math.sqrt(sum_f32(squares) / np.float32(size) + epsilon)))
    half = padded // 2
    scales = splat_f32(scale)
    for i in range(0, half, 16):
        a = load_f32(x + i * 4)
        b = load_f32(x + (half + i) * 4)
        if norm != 0:
            a = mul_f32(mul_f32(a, factor), load_f32(norm + i * 4))
            b = mul_f32(mul_f32(b, factor), load_f32(norm + (half + i) * 4))
        cos = load_f32(table + i * 4)
        sin = load_f32(table + (half + i) * 4)
        store_f32(out + i * 4, mul_f32(scales, sub_f32(mul_f32(a, cos), mul_f32(b, sin))))
        store_f32(out + (half + i) * 4, mul_f32(scales, add_f32(mul_f32(b, cos), mul_f32(a, sin))))


@kernel
def store_kv(op: int, step: int, thread: int, threads: int) -> None:
    """Rotate keys and write keys and values of all rows into their pages, in half precision.

    Arguments: 0 keys, 1 values (rows of kv_heads * D), 2 norm of keys or 0, 3 key pages [head][page][D][16],
    4 value pages [head][page][16][D], 5 kv heads, 6 D, 7 size of a head, 8 rope table, 9 address of epsilon,
    10 bytes from one head's pages to the next's.
    With one row threads share out its heads as attention does, else the rows.
    """
    rows = stage_rows(op, step)
    heads, padded = argument(op, 5), argument(op, 6)
    turned = scratch(step, thread)
    tables = field(step, _ROPE_TABLES + argument(op, 8))
    first, last = share(rows, thread, threads), share(rows, thread + 1, threads)
    if rows == 1:
        first, last = 0, 1
    for row in range(first, last):
        position = get_i32(field(step, _POSITIONS) + 4 * row)
        page = get_i32(field(field(step, _ROW_TABLES), row) + position // PAGE_TOKENS * 4)
        slot = position % PAGE_TOKENS
        for head in range(heads):
            if rows > 1 or owner(head, threads) == thread:
                source = (row * heads + head) * padded * 4
                rotate_head(
                    argument(op, 0) + source,
                    argument(op, 2),
                    tables + position * padded * 4,
                    padded,
                    argument(op, 7),
                    get_f32(argument(op, 9)),
                    _ONE,
                    turned,
                )
                place = head * argument(op, 10) + page * padded * PAGE_TOKENS * 2
                key = argument(op, 3) + place + slot * 2
                value = argument(op, 4) + place + slot * padded * 2
                for i in range(0, padded, 16):
                    scatter_f16(key + i * PAGE_TOKENS * 2, PAGE_TOKENS * 2, load_f32(turned + i * 4))
                    store_f16(value + i * 2, load_f32(argument(op, 1) + source + i * 4))
