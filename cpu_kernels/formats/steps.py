"""Four k steps at once: how formats that unpack four vectors of weights together multiply them."""

from typing import Any

from cpu_kernels.kernel import inner
from cpu_kernels.simd.dot import dot4
from cpu_kernels.simd.tiles import tile_dot4, tile_width
from cpu_kernels.simd.vectors import broadcast_i32


@inner
def four_steps(total: Any, weights: Any, x: int) -> Any:
    """Add the products of four vectors of weights and the sixteen bytes at x, for one token."""
    w0, w1, w2, w3 = weights
    total = dot4(total, w0, broadcast_i32(x))
    total = dot4(total, w1, broadcast_i32(x + 4))
    total = dot4(total, w2, broadcast_i32(x + 8))
    return dot4(total, w3, broadcast_i32(x + 12))


@inner
def tile_four_steps(total: Any, weights: Any, x: int) -> Any:
    """`four_steps` for a tile of tokens."""
    step = 4 * tile_width(total)
    w0, w1, w2, w3 = weights
    total = tile_dot4(total, w0, x)
    total = tile_dot4(total, w1, x + step)
    total = tile_dot4(total, w2, x + 2 * step)
    return tile_dot4(total, w3, x + 3 * step)
