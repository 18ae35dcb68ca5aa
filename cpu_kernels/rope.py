"""Rotary embeddings.

Heads are padded to D values, a multiple of 16. Their values are reordered at load so that all rotations use split
halves: value i is rotated with value i + D/2. A rope table holds cos[D/2], sin[D/2] for each position; values that are
not rotated have cos 1 and sin 0.
"""

import math

import numpy as np

from cpu_kernels.declarations import inner
from cpu_kernels.simd.arithmetic import add_f32, fma, mul_f32, sub_f32, sum_f32
from cpu_kernels.simd.vectors import load_f32, splat_f32, store_f32, zero_f32

_ONE = np.float32(1.0)


@inner
def rotate_head(
    x: int, norm: int, table: int, padded: int, size: int, epsilon: np.float32, scale: np.float32, out: int
) -> None:
    """out = scale * rope(RMSNorm(x) * norm) for one head; norm 0 skips the norm. size: values without padding.

    If D is no multiple of 32, each address has 8 floats more, which are read, or overwritten in `out`; x is not `out`.
    """
    factor = splat_f32(_ONE)
    if norm != 0:
        squares = zero_f32()
        for i in range(0, padded, 16):
            v = load_f32(x + i * 4)
            squares = fma(v, v, squares)
        factor = splat_f32(_ONE / np.float32(math.sqrt(sum_f32(squares) / np.float32(size) + epsilon)))
    half = padded // 2
    scales = splat_f32(scale)
    # Backwards, so that a half's last vector, which may reach beyond it, is overwritten by what is there.
    for i in range((half - 1) // 16 * 16, -1, -16):
        a = load_f32(x + i * 4)
        b = load_f32(x + (half + i) * 4)
        if norm != 0:
            a = mul_f32(mul_f32(a, factor), load_f32(norm + i * 4))
            b = mul_f32(mul_f32(b, factor), load_f32(norm + (half + i) * 4))
        cos = load_f32(table + i * 4)
        sin = load_f32(table + (half + i) * 4)
        store_f32(out + i * 4, mul_f32(scales, sub_f32(mul_f32(a, cos), mul_f32(b, sin))))
        store_f32(out + (half + i) * 4, mul_f32(scales, add_f32(mul_f32(b, cos), mul_f32(a, sin))))
