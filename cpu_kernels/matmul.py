"""Matrix products: how rows of weights and tiles of tokens are walked. What a block holds is a format's own affair.

Weights are packed so that a vector lane is an output row (see cpu_kernels.formats). A format brings two functions:
gemv(weights, k, act, tile, y, addend, first, last) for one token, over its groups of rows, and
tile(zero_i, zero_f, group, k, act, tile, out, scratch, fresh) for a register tile of tokens, where out is (y, its
stride, addend, its stride) and fresh tells that the group still lies in memory: the first tile asks for it ahead.
Both add the same products in the same order, so a token's result does not depend on its company. On AVX2 super-blocks
are unpacked for many tiles instead (cpu_kernels.formats.panels).

Arguments of a product: 0 weights, 1 groups of rows, 2 bytes of a group, 3 rows of a group, 4 k, 5 y, 6 y stride,
7 addend or 0 (a residual or a bias), 8 addend stride, 9 descriptors, 10 packed privately, 11 expert segments or 0,
12 bytes of an expert. Expert segments: count, then (expert, first tile, tiles) each.
"""

from typing import Any

from cpu_kernels.kernel import Kernel, inner
from cpu_kernels.records import activation, argument, field, scratch, share, stage_rows
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.arithmetic import add_f32
from cpu_kernels.simd.tiles import tile_width, zero_tile_f32, zero_tile_i32
from cpu_kernels.simd.vectors import load_f32, store_f32

# Packed tokens that stay in a core's second-level cache while weights stream past, in bytes.
_CACHED_TOKENS = 600_000


@inner
def put_sum(total: Any, y: int, addend: int) -> None:
    """Store sixteen results, the addend (if its address is not 0) last."""
    store_f32(y, total if addend == 0 else add_f32(total, load_f32(addend)))


@inner
def moved(out: Any, rows: int, columns: int) -> Any:
    """A tile's place and addend, some rows and bytes further on."""
    y, y_stride, addend, addend_stride = out
    at = addend + rows * addend_stride + columns if addend != 0 else 0
    return y + rows * y_stride + columns, y_stride, at, addend_stride


@inner
def put_tile(zero: Any, sums: int, out: Any) -> None:
    """Store the accumulators of a tile, 64 bytes a token at `sums`, as put_sum does."""
    y, y_stride, addend, addend_stride = out
    for t in range(tile_width(zero)):
        put_sum(load_f32(sums + t * 64), y + t * y_stride, addend + t * addend_stride if addend != 0 else 0)


def gemv_kernel(gemv: Any, name: str) -> Kernel:
    """The kernel for tiles of one token; threads share out the groups of rows of all tiles (of an expert's each)."""

    @inner
    def run(op: int, act: int, first: int, last: int) -> None:
        """Groups first..last-1 of all tiles', one tile's after the other's."""
        weights, groups, k, y = argument(op, 0), argument(op, 1), argument(op, 4), argument(op, 5)
        segments = argument(op, 11)
        if segments == 0:
            gemv(weights, k, act, 0, y, argument(op, 7), first, last)
        else:
            for s in range(field(segments, 0)):
                expert, start = field(segments, 3 * s + 1), field(segments, 3 * s + 2)
                for m in range(start, start + field(segments, 3 * s + 3)):
                    low, high = max(first - m * groups, 0), min(last - m * groups, groups)
                    if low < high:
                        to = y + m * argument(op, 6)
                        gemv(weights + expert * argument(op, 12), k, act, m, to, 0, low, high)

    def matmul(op: int, step: int, thread: int, threads: int) -> None:
        rows = stage_rows(op, step)
        act = activation(argument(op, 9), argument(op, 10), rows, thread)
        count = argument(op, 1) * (1 if argument(op, 11) == 0 else rows)
        first, last = first_share(count, thread, threads)
        while first >= 0:
            run(op, act, first, last)
            first, last = next_share(op, count, threads)

    return Kernel(matmul, f"{name}.matmul_1")


def tile_segment(tile: Any, width: int) -> Any:
    """A segment of register tiles of `width` tokens, a block of which stays in cache while weights stream past."""

    @inner
    def run_segment(
        op: int, step: int, thread: int, threads: int, act: int, weights: int, start: int, end: int
    ) -> None:
        groups, group_bytes, group_rows, k = argument(op, 1), argument(op, 2), argument(op, 3), argument(op, 4)
        y, y_stride, addend, addend_stride = argument(op, 5), argument(op, 6), argument(op, 7), argument(op, 8)
        sums = scratch(step, thread)
        block = max(1, _CACHED_TOKENS // (k * width))
        for m0 in range(start, end, block):
            for g in range(share(groups, thread, threads), share(groups, thread + 1, threads)):
                for m in range(m0, min(end, m0 + block)):
                    column = g * group_rows * 4
                    row = m * width
                    tile(
                        zero_tile_i32(width),
                        zero_tile_f32(width),
                        weights + g * group_bytes,
                        k,
                        act,
                        m,
                        moved((y, y_stride, addend, addend_stride), row, column),
                        sums,
                        m == m0,
                    )

    return run_segment


def kernel_of_segments(run_segment: Any, width: int, name: str) -> Kernel:
    """The kernel that runs a segment of tiles for each expert, or one of all rows."""

    def matmul(op: int, step: int, thread: int, threads: int) -> None:
        rows = stage_rows(op, step)
        act = activation(argument(op, 9), argument(op, 10), rows, thread)
        segments = argument(op, 11)
        if segments == 0:
            run_segment(op, step, thread, threads, act, argument(op, 0), 0, (rows + width - 1) // width)
            return
        for s in range(field(segments, 0)):
            weights = argument(op, 0) + field(segments, 3 * s + 1) * argument(op, 12)
            start = field(segments, 3 * s + 2)
            run_segment(op, step, thread, threads, act, weights, start, start + field(segments, 3 * s + 3))

    return Kernel(matmul, f"{name}.matmul_{width}")
