"""Shared code of layers whose state is kept for the start of each page of tokens, in a slot that belongs to the page.

A head's state S [K][V] maps keys to values and is stored as [V / 16][K][16]. The slot also holds what the page's tokens
add: keys k [16][K], the values u [16][V] that they map to, and G [16], sums of gates in base 2 from the page's first
token on. The state after the page is

    S exp2(G[15]) + sum over i of exp2(G[15] - G[i]) (k[i] u[i])

Every sum has a fixed order, whichever rows a step computes. K and V are padded to whole vectors.

Threads divide the parts of a layer's slot: `walk` goes through a step's rows for each of them. Some sizes
of a layer have the same indices in the records of all such layers: number of parts,
pages of a group, place numbers that a group spans in a page table, and stride in bytes of slots and of parts.
"""

import math
from typing import Any

import numpy as np

from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.declarations import inner
from cpu_kernels.isa import POLICY
from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.records import Step, argument, field
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.arithmetic import add_f32, div_f32, exp2_f32, fma, mul_f32, prefetch_lines, sub_f32, sum_f32
from cpu_kernels.simd.tiles import tile_fma, tile_load_f32, tile_scaled, tile_store, zero_tile_f32
from cpu_kernels.simd.vectors import get_f32, get_i32, load_f32, splat_f32, store_f32, zero_f32

WIDE = 16 if POLICY.vector_parts == 1 else 4
"""Accumulator vectors that fit into registers."""
_AHEAD = 4096
"""Prefetch distance of states in bytes: they are too large to stay in cache from step to step."""
PARTS, GROUP_PAGES, PLACES, SLOT_BYTES, PART_BYTES = 0, 7, 8, 9, 10
"""Indices into the record of a layer's sizes."""
_SEGMENT_BYTES = 4 * 8
_ONE = np.float32(1.0)
_MINUS_LOG2E = np.float32(-math.log2(math.e))
# Above this, log(1 + exp(x)) is x in single precision.
_SOFTPLUS_IS_LINEAR = np.float32(20.0)


class PagedStates(Arguments):
    """Arguments of every kernel that walks pages with states."""

    shape: int  # record of the layer's sizes: see above
    slots: int  # the layer's part of slot 0
    slot_of_page: int  # slot numbers of the pages, int32


_PAGED = indices_of(PagedStates)


@inner
def _part_of_slot(op: int, part: int, table: int, page: int) -> int:
    """Address of a part of the slot that a sequence's page has in this step."""
    shape, place = argument(op, _PAGED.shape), get_i32(table + page * 4)
    places = field(shape, PLACES)
    number = get_i32(
        argument(op, _PAGED.slot_of_page) + (place // places * field(shape, GROUP_PAGES) + place % places) * 4
    )
    return argument(op, _PAGED.slots) + number * field(shape, SLOT_BYTES) + part * field(shape, PART_BYTES)


def walk(begin: Any, compute: Any) -> Any:
    """Function that takes a kernel's arguments and computes all rows of its share of the parts, segment by segment.

    begin(op, step, thread, slot, before) computes the state at the start of a page from the previous page's; both are
    addresses of parts, and before is 0 for the first page. compute(op, step, thread, part, slot, t, row, n) computes
    rows row..row+n-1 of the step, which are rows t.. of a page.
    """

    @inner
    def run(op: int, step: int, thread: int, threads: int) -> None:
        parts = field(argument(op, _PAGED.shape), PARTS)
        first, last = first_share(op, step, parts, thread, threads)
        while first >= 0:
            for part in range(first, last):
                for number in range(field(step, Step.SEGMENT_COUNT)):
                    segment = field(step, Step.SEGMENTS) + number * _SEGMENT_BYTES
                    row, position, table = field(segment, 0), field(segment, 2), field(segment, 3)
                    end = row + field(segment, 1)
                    while row < end:
                        page, t = position // PAGE_TOKENS, position % PAGE_TOKENS
                        n = min(PAGE_TOKENS - t, end - row)
                        slot = _part_of_slot(op, part, table, page)
                        if t == 0:
                            begin(op, step, thread, slot, _part_of_slot(op, part, table, page - 1) if page > 0 else 0)
                        compute(op, step, thread, part, slot, t, row, n)
                        row += n
                        position += n
            first, last = next_share(op, step, parts, thread, threads)

    return run


@inner
def ask(where: int, floats: int) -> None:
    """Prefetch this many floats."""
    for i in range(0, floats, 16):
        prefetch_lines(where + i * 4, 1)


@inner
def copy_floats(source: int, target: int, floats: int) -> None:
    """Copy this many floats, a multiple of 16."""
    for i in range(0, floats, 16):
        store_f32(target + i * 4, load_f32(source + i * 4))


@inner
def clear_floats(target: int, floats: int) -> None:
    """Zero this many floats, a multiple of 16."""
    for i in range(0, floats, 16):
        store_f32(target + i * 4, zero_f32())


@inner
def fold_page(before: int, after: int, keys: int, added: int, faded: int, k: int, v: int, memory: int) -> None:
    """Compute a head's state after a full page from the state before it; both may have the same address.

    added: u. faded: G. k, v: K and V. memory: scratch for 16 + 16 k floats.
    """
    last = splat_f32(get_f32(faded + (PAGE_TOKENS - 1) * 4))
    store_f32(memory, exp2_f32(sub_f32(last, load_f32(faded))))
    scaled = memory + 64
    for i in range(PAGE_TOKENS):
        factor = splat_f32(get_f32(memory + i * 4))
        for d in range(0, k, 16):
            at = (i * k + d) * 4
            store_f32(scaled + at, mul_f32(load_f32(keys + at), factor))
    whole = exp2_f32(last)
    for c in range(v // 16):
        for d in range(0, k, WIDE):
            at = (c * k + d) * 64
            prefetch_lines(before + at + _AHEAD, WIDE)
            prefetch_lines(after + at + _AHEAD, WIDE)
            tile = tile_scaled(tile_load_f32(zero_tile_f32(WIDE), before + at), whole)
            for i in range(PAGE_TOKENS):
                tile = tile_fma(tile, load_f32(added + (i * v + c * 16) * 4), scaled + (i * k + d) * 4)
            tile_store(tile, after + at)


def through_state(width: int) -> Any:
    """Function that multiplies `width` columns by a state.

    Its arguments are columns [K][pitch], a state, K, V, the pitch, and out [V / 16][pitch][16].
    """

    @inner
    def multiply(columns: int, state: int, k: int, v: int, pitch: int, out: int) -> None:
        for c in range(v // 16):
            tile = zero_tile_f32(width)
            for d in range(k):
                p = state + (c * k + d) * 64
                prefetch_lines(p + _AHEAD, 1)
                tile = tile_fma(tile, load_f32(p), columns + d * pitch * 4)
            tile_store(tile, out + c * pitch * 64)

    return multiply


@inner
def convolve(rows: int, count: int, reach: int, pitch: int, floats: int, weights: Any, out: int, to: int) -> None:
    """SiLU of the convolution of `count` rows, each with the reach - 1 rows before it, the oldest first.

    rows: address of the oldest row that the first one reads; each has `floats` floats, with a stride of `pitch` floats.
    weights: address of the oldest row's weights, address of the biases or 0, and stride of the weights in bytes. to:
    stride of out in floats.
    """
    first, bias, stride = weights
    one, minus = splat_f32(_ONE), splat_f32(_MINUS_LOG2E)
    for i in range(count):
        source = rows + i * pitch * 4
        for c in range(0, floats, 16):
            total = mul_f32(load_f32(first + c * 4), load_f32(source + c * 4))
            for j in range(1, reach):
                total = fma(load_f32(first + j * stride + c * 4), load_f32(source + (j * pitch + c) * 4), total)
            if bias != 0:
                total = add_f32(total, load_f32(bias + c * 4))
            store_f32(out + (i * to + c) * 4, div_f32(total, add_f32(one, exp2_f32(mul_f32(total, minus)))))


@inner
def dot_product(x: int, y: int, count: int) -> np.float32:
    """Dot product of `count` floats, a multiple of 16."""
    total = zero_f32()
    for d in range(0, count, 16):
        total = fma(load_f32(x + d * 4), load_f32(y + d * 4), total)
    return sum_f32(total)


@inner
def unit_vector(x: int, padded: int, epsilon: np.float32, scale: np.float32, out: int) -> None:
    """out = x * scale / sqrt(sum(x^2) + epsilon)."""
    squares = zero_f32()
    for d in range(0, padded, 16):
        squares = fma(load_f32(x + d * 4), load_f32(x + d * 4), squares)
    factor = splat_f32(scale / np.float32(math.sqrt(sum_f32(squares) + epsilon)))
    for d in range(0, padded, 16):
        store_f32(out + d * 4, mul_f32(load_f32(x + d * 4), factor))


@inner
def softplus(x: np.float32) -> np.float32:
    """log(1 + exp(x))."""
    return x if x > _SOFTPLUS_IS_LINEAR else np.float32(math.log(1.0 + math.exp(x)))
