"""Matrix products: the loops over groups of weight rows and tiles of tokens. Each weight format defines its blocks.

Weights are packed so that a vector lane is an output row (see cpu_kernels.formats). A format provides one function for
a register tile of tokens, tile(zero, group, k, act, tile, sums, start, end, ahead): it adds the products of values
start..end-1 to sums in memory (64 bytes per token; sums of the group's next sixteen rows follow). zero is a tile of
zeros. ahead is the prefetch distance for weights in bytes, 0 if an earlier tile has read the group. Tiles of all widths
add the same products in the same order, so a token's result does not depend on the rest of the batch. If that is
faster, super-blocks are unpacked once for many tiles (cpu_kernels.formats.k_quants).
"""

from dataclasses import dataclass
from typing import Any

from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.declarations import inner
from cpu_kernels.isa import POLICY
from cpu_kernels.kernel import Function
from cpu_kernels.records import Ahead, Step, activation, argument, field, scratch, share, stage_rows
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.arithmetic import add_f32
from cpu_kernels.simd.tiles import zero_tile_i32
from cpu_kernels.simd.vectors import load_f32, store_f32, zero_f32

# Bytes of packed tokens that stay in a core's second-level cache while weights stream past.
_CACHED_TOKENS = 600_000
# The same beside a panel, and tokens whose sums stay in first-level cache with it.
_ROUND_BYTES, _ROUND_TOKENS = 256 << 10, 96
PANEL_BYTES = 6272
"""Bytes of the largest panel."""
SCRATCH_BYTES = PANEL_BYTES + 64 * _ROUND_TOKENS
"""Bytes of scratch memory that a thread needs: the most that tiles take."""
# AVX2 tiles are small, so _TOGETHER tiles alternate every _SPAN values. If each tile ran through a whole group of rows
# by itself, the first would wait for memory and the others would leave it idle.
_TOGETHER, _SPAN = (POLICY.interleaved_tiles, 256) if POLICY.interleaved_tiles > 1 else (1, 1 << 30)


@inner
def put_sum(total: Any, y: int, addends: int, offset: int) -> None:
    """Store sixteen results, plus the addend at `offset` if the address `addends` is not 0."""
    if addends == 0:
        store_f32(y, total)
    else:
        store_f32(y, add_f32(total, load_f32(addends + offset)))


@dataclass(frozen=True)
class Tiles:
    """How a group of rows is multiplied with tiles of `width` tokens.

    compute(group, k, act, first, tiles, out, memory, ahead) writes the results of tiles first..first+tiles-1 to out:
    (y of the first tile, its stride, addends or 0, offset of the first tile's addends, their stride). ahead: prefetch
    distance. most_tokens and most_bytes bound a round, the tokens that one call of compute gets (at one byte per
    value), so that they stay in cache while weights stream past.
    """

    compute: Any
    width: int
    most_tokens: int
    most_bytes: int


def plain_tiles(tile: Any, width: int, parts: int) -> Tiles:
    """Tiles that each unpack the weights. parts: rows of a group, in units of sixteen."""
    tile_bytes = 64 * width * parts

    @inner
    def put(sums: int, rows: int, out: Any) -> None:
        y, y_stride, addends, offset, addend_stride = out
        for part in range(parts):
            for t in range(rows):
                place = sums + t // width * tile_bytes + (part * width + t % width) * 64
                put_sum(load_f32(place), y + t * y_stride + part * 64, addends, offset + t * addend_stride + part * 64)

    @inner
    def compute(group: int, k: int, act: int, first: int, tiles: int, out: Any, memory: int, ahead: int) -> None:
        y, y_stride, addends, offset, addend_stride = out
        for m in range(0, tiles, _TOGETHER):
            count = min(_TOGETHER, tiles - m)
            for i in range(count * width * parts):
                store_f32(memory + i * 64, zero_f32())
            for start in range(0, k, _SPAN):
                end = min(k, start + _SPAN)
                for i in range(count):
                    sums = memory + i * tile_bytes
                    distance = ahead if m + i == 0 else 0
                    tile(zero_tile_i32(width), group, k, act, first + m + i, sums, start, end, distance)
            at = offset + m * width * addend_stride
            put(memory, count * width, (y + m * width * y_stride, y_stride, addends, at, addend_stride))

    return Tiles(compute, width, _CACHED_TOKENS, _CACHED_TOKENS)


def panel_tiles(unpack: Any, add: Any, width: int, block_bytes: int, panel_bytes: int = PANEL_BYTES) -> Tiles:
    """Tiles that share panels: unpacked super-blocks of sixteen rows, in first-level cache.

    unpack(p, panel, ahead): unpacks a super-block into the panel, and prefetches `ahead` bytes ahead.
    add(panel, act, first, tiles, k, block, sums): adds the panel's products to the tokens' sums, 64 bytes each.
    """

    @inner
    def compute(group: int, k: int, act: int, first: int, tiles: int, out: Any, panel: int, ahead: int) -> None:
        y, y_stride, addends, offset, addend_stride = out
        sums = panel + panel_bytes
        for t in range(tiles * width):
            store_f32(sums + 64 * t, zero_f32())
        for b in range(k // 256):
            unpack(group + b * block_bytes, panel, ahead)
            add(panel, act, first, tiles, k, b, sums)
        for t in range(tiles * width):
            put_sum(load_f32(sums + 64 * t), y + t * y_stride, addends, offset + t * addend_stride)

    return Tiles(compute, width, _ROUND_TOKENS, _ROUND_BYTES)


class Product(Arguments):
    """Arguments of a matrix product."""

    weights: int  # packed groups of rows
    groups: int  # of rows
    group_bytes: int  # bytes of a group
    group_rows: int  # rows of a group
    k: int  # values of a row
    y: int  # rows of floats, the result
    y_stride: int  # bytes from row to row
    addend: int  # rows of floats to add (a residual or a bias), or 0
    addend_stride: int  # bytes from row to row; 0 for the same row
    packed: int  # descriptors of packed activations
    private: int  # 1 if a single row is packed once per thread
    segments: int = 0  # expert segments (count, then expert, first tile and tiles of each), or 0
    expert_bytes: int = 0  # bytes of an expert


_PRODUCT = indices_of(Product)


def product(tiles: Tiles, kind: Ahead) -> Function:
    """The product with tiles of one width. Each thread computes some groups of rows, of every round and expert."""
    distance = Step.AHEAD + kind
    compute, width, most_tokens, most_bytes = tiles.compute, tiles.width, tiles.most_tokens, tiles.most_bytes

    @inner
    def rounds_of(count: int, k: int) -> int:
        most = max(1, min(most_tokens, most_bytes // k) // width)
        return (count + most - 1) // most

    @inner
    def run(op: int, act: int, weights: int, tile: int, count: int, first: int, last: int, own: Any) -> None:
        """Compute groups first..last-1, counted through all rounds, for `count` tiles from `tile` on.

        own: the thread's scratch memory, and its prefetch distance.
        """
        memory, ahead = own
        groups, group_bytes, group_rows, k = (
            argument(op, _PRODUCT.groups),
            argument(op, _PRODUCT.group_bytes),
            argument(op, _PRODUCT.group_rows),
            argument(op, _PRODUCT.k),
        )
        y_stride, addend_stride = argument(op, _PRODUCT.y_stride), argument(op, _PRODUCT.addend_stride)
        rounds = rounds_of(count, k)
        for r in range(first // groups, (last + groups - 1) // groups):
            begin = tile + share(count, r, rounds)
            some = tile + share(count, r + 1, rounds) - begin
            for g in range(max(first - r * groups, 0), min(last - r * groups, groups)):
                column, row = g * group_rows * 4, begin * width
                place, offset = argument(op, _PRODUCT.y) + row * y_stride + column, row * addend_stride + column
                out = (place, y_stride, argument(op, _PRODUCT.addend), offset, addend_stride)
                compute(weights + g * group_bytes, k, act, begin, some, out, memory, ahead)

    @inner
    def run_segments(op: int, act: int, rows: int, first: int, last: int, own: Any) -> int:
        """Run groups first..last-1, counted through all segments; return the total number of groups."""
        groups, k, segments = argument(op, _PRODUCT.groups), argument(op, _PRODUCT.k), argument(op, _PRODUCT.segments)
        done = 0
        for s in range(1 if segments == 0 else field(segments, 0)):
            weights, start, count = argument(op, _PRODUCT.weights), 0, (rows + width - 1) // width
            if segments != 0:
                weights += field(segments, 3 * s + 1) * argument(op, _PRODUCT.expert_bytes)
                start, count = field(segments, 3 * s + 2), field(segments, 3 * s + 3)
            items = rounds_of(count, k) * groups
            low, high = max(first - done, 0), min(last - done, items)
            if low < high:
                run(op, act, weights, start, count, low, high, own)
            done += items
        return done

    def matmul(op: int, step: int, thread: int, threads: int) -> None:
        rows = stage_rows(op, step)
        act = activation(argument(op, _PRODUCT.packed), argument(op, _PRODUCT.private), rows, thread)
        own = (scratch(step, thread), field(step, distance))
        items = run_segments(op, act, rows, 0, 0, own)
        first, last = first_share(op, step, items, thread, threads)
        while first >= 0:
            run_segments(op, act, rows, first, last, own)
            first, last = next_share(op, step, items, thread, threads)

    return matmul
