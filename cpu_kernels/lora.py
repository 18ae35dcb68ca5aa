"""LoRA adapters: y += weight * B (A x) on the rows that use an adapter, after the product of the base matrix.

A step's rows are grouped by adapter into tiles of up to four rows (`table`), as S-LoRA (arXiv:2311.03285) groups them,
so that an adapter's factors are read once for its rows. Each product of a changed matrix has two operations: `shrink`
computes A x from the packed activations of the base product, and `expand` adds B times that. A row's sums have a fixed
order: sums of SPAN inputs, these added in order, then the adapters in order. So they do not depend on the other rows.

Factors are in half precision, each matrix scaled by a power of two that keeps its values out of the subnormals. A:
[ranks / 16][input][16 ranks]. B: [outputs / 16][rank][16 outputs], in the order of the base matrix's rows.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from cpu_kernels.activations import pack_row
from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.declarations import inner, operation
from cpu_kernels.isa import POLICY
from cpu_kernels.kernel import kernel
from cpu_kernels.records import (
    Act,
    Form,
    Op,
    Stage,
    Step,
    activation,
    argument,
    field,
    scratch,
    stage_rows,
    stage_width,
)
from cpu_kernels.self_check import Sample
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.arithmetic import add_f32, exact_fma, fused_multiply_add, mul_f32, prefetch_lines
from cpu_kernels.simd.tiles import Tile, tile_store, zero_tile_f32
from cpu_kernels.simd.vectors import (
    F32,
    I8,
    I32,
    I64,
    Values,
    broadcast,
    f32x16,
    get_f32,
    get_i16,
    get_i32,
    load,
    load_f16,
    load_f32,
    put_f32,
    put_i32,
    put_i64,
    splat_f32,
    store_f32,
    view,
    zero_f32,
)
from cpu_kernels.words import BLOCK

TILE = 4
"""Rows of a tile."""
_APART = POLICY.vector_parts > 1  # registers hold the sums of one tile only


def _bytes_as_floats(where: int, stride: int) -> NDArray[np.float32]:
    return np.concatenate([view(where + i * stride, np.int8, 4) for i in range(4)]).astype(np.float32)


@operation(_bytes_as_floats, f32x16)
def load_i8x4(builder: ir.IRBuilder, where: ir.Value, stride: ir.Value) -> ir.Value:
    """Sixteen signed bytes as floats, in runs of four at where, where + stride, ..."""
    whole = ir.Constant(ir.VectorType(I32, 4), ir.Undefined)
    for i in range(4):
        run = load(builder, builder.add(where, builder.mul(stride, I64(i))), I32)
        whole = builder.insert_element(whole, run, I32(i))
    return builder.sitofp(builder.bitcast(whole, ir.VectorType(I8, LANES)), f32x16.llvm)


def _fma_rows(total: Tile, x: NDArray[np.float32], where: int, stride: int) -> Any:
    rows = (view(where + t * stride, np.float32, 1).repeat(LANES) for t in range(len(total)))
    return tuple(exact_fma(x, row, member) for member, row in zip(total, rows, strict=True))


@operation(_fma_rows, 0)
def fma_rows(builder: ir.IRBuilder, total: Values, x: ir.Value, where: ir.Value, stride: ir.Value) -> Values:
    """fma(x, the row's float, total[row]), where a row's float is at where + row * stride."""
    places = [builder.add(where, builder.mul(stride, I64(t))) for t in range(len(total))]
    return [
        fused_multiply_add(builder, x, broadcast(builder, place, F32), member)
        for place, member in zip(places, total, strict=True)
    ]


SPAN = 256
"""Inputs that are summed at once."""
LANES = 16
_BLOCK = 8  # vectors of outputs that a thread computes at once
_A_BYTES = 2 * LANES  # of an input's ranks
_X_BYTES = 4 * SPAN  # of a row's inputs
_BLOCKS_32, _BLOCKS_256, _WORDS = int(Form.BLOCKS_32), int(Form.BLOCKS_256), int(Form.WORDS)


class Table(IntEnum):
    """A step's tiles: int64 fields, then TILES of TileField.SIZE each.

    APART: 1 if every row is in one tile only, so that tiles may be computed concurrently. PARTS: address of room for
    the results of `shrink`: AREA bytes for each of the products that may run concurrently, ROOM bytes for each tile.
    """

    COUNT = 0
    APART = 1
    PARTS = 2
    AREA = 3
    ROOM = 4
    TILES = 8


class TileField(IntEnum):
    """A tile: its adapter and expert or head, then TILE rows (int32, -1 for none) and TILE weights (float)."""

    ADAPTER = 0
    EXPERT = 1
    ROWS = 2
    WEIGHTS = 4
    SIZE = 6


class Factors(IntEnum):
    """An adapter's factors for a matrix: addresses of A and B (0 if it does not change it), their rank, the number of
    ranks / 16 rounded up, bits of a float that multiplies the result, and bytes of an expert's A and B (0 if all share
    one).
    """

    A = 0
    B = 1
    RANK = 2
    PARTS = 3
    FACTOR = 4
    A_BYTES = 5
    B_BYTES = 6
    SIZE = 8


@inner
def _table(op: int, step: int, own: int) -> int:
    """Address of the table that an operation reads: its own, or the step's for the rows of its stage; 0 for none."""
    if field(step, Step.ADAPTERS) == 0:
        return 0
    if own != 0:
        return own
    return field(step, Step.WANTED_ADAPTERS if field(op, Op.STAGE) == Stage.WANTED else Step.ADAPTERS)


@inner
def _tile(table: int, index: int) -> int:
    return table + 8 * (Table.TILES + index * TileField.SIZE)


@inner
def _parts(table: int, product: int, index: int) -> int:
    """Address of the results of `shrink` for a tile. product: the operation's number among concurrent ones."""
    return field(table, Table.PARTS) + product * field(table, Table.AREA) + index * field(table, Table.ROOM)


@inner
def _row(tile: int, lane: int) -> int:
    return get_i32(tile + 8 * TileField.ROWS + 4 * lane)


@inner
def _factors(factors: int, tile: int) -> int:
    return factors + 8 * Factors.SIZE * field(tile, TileField.ADAPTER)


@inner
def _a(factors: int, tile: int) -> int:
    """Address of a tile's A, of its expert."""
    own = _factors(factors, tile)
    return field(own, Factors.A) + field(tile, TileField.EXPERT) * field(own, Factors.A_BYTES)


@inner
def _b(factors: int, tile: int) -> int:
    """Address of a tile's B, of its expert."""
    own = _factors(factors, tile)
    return field(own, Factors.B) + field(tile, TileField.EXPERT) * field(own, Factors.B_BYTES)


@inner
def _unpack(act: int, form: int, k: int, place: tuple[int, int], first: int, last: int, out: int) -> None:
    """Write packed values first..last-1 of a row as floats. place: the row, and the width of its tiles."""
    row, width = place
    tile, lane = row // width, row % width
    if form & _BLOCKS_32 or form & _BLOCKS_256:
        block = 32 if form & _BLOCKS_32 else 256
        values = field(act, Act.Q32 if form & _BLOCKS_32 else Act.Q256) + tile * width * k + lane * 4
        scales = field(act, Act.SCALE32 if form & _BLOCKS_32 else Act.SCALE256)
        scales += (tile * (k // block) * width + lane) * 4
        for i in range(first, last, LANES):
            scale = splat_f32(get_f32(scales + i // block * width * 4))
            store_f32(out + (i - first) * 4, mul_f32(load_i8x4(values + i * width, 4 * width), scale))
    elif form & _WORDS:
        words = field(act, Act.WORDS) + (tile * k // 2 * width + lane) * 4
        units = field(act, Act.WORD_UNITS) + (tile * (k // BLOCK) * width + lane) * 4
        for i in range(first, last):
            word = np.float32(get_i16(words + i // 2 * width * 4 + i % 2 * 2))
            put_f32(out + (i - first) * 4, word * get_f32(units + i // BLOCK * width * 4))
    else:
        floats = field(act, Act.FLOATS) + (tile * width * k + lane) * 4
        for i in range(first, last):
            put_f32(out + (i - first) * 4, get_f32(floats + i * width * 4))


@inner
def _sum_products(a: int, x: int, count: int, next_a: int, out: int) -> None:
    """out[row] = the sum over `count` inputs of A's sixteen ranks times x[row]: that of the first half, then the other.

    next_a: what is read next, to be prefetched.
    """
    half = min(count, SPAN // 2)
    first, second = zero_tile_f32(TILE), zero_tile_f32(TILE)
    for i in range(half):
        prefetch_lines(next_a + i * 64, 1)
        first = fma_rows(first, load_f16(a + i * _A_BYTES), x + i * 4, _X_BYTES)
        if not _APART and half + i < count:
            second = fma_rows(second, load_f16(a + (half + i) * _A_BYTES), x + (half + i) * 4, _X_BYTES)
    if _APART:
        for i in range(half, count):
            second = fma_rows(second, load_f16(a + i * _A_BYTES), x + i * 4, _X_BYTES)
    tile_store(first, out)
    tile_store(second, out + TILE * LANES * 4)
    for lane in range(TILE):
        at = out + lane * LANES * 4
        store_f32(at, add_f32(load_f32(at), load_f32(at + TILE * LANES * 4)))


class Shrink(Arguments):
    """Arguments of shrink."""

    factors: int  # Factors of each adapter
    k: int  # values of a row
    form: int  # Form: which packed activations to read
    packed: int  # descriptors of packed activations
    private: int  # 1 if a single row is packed once per thread
    index: int  # number of this product among concurrent ones
    table: int = 0  # of slots, or 0 for the step's


_SHRINK = indices_of(Shrink)


def _sample_tiles(rows: int, apart: bool, parts: int, area: int) -> list[int]:
    """A table with tiles of adapters 0 and 1; apart: of different rows."""
    weights = np.array([1.0, -0.5, 2.0, 0.25], np.float32).view(np.int64)
    tiles = []
    for adapter in range(2):
        some = [row for row in range(rows) if not apart or row % 2 == adapter][:TILE]
        packed = np.array((some + [-1] * TILE)[:TILE], np.int32).view(np.int64)
        tiles += [adapter, 0, *packed, *weights]
    return [2, int(apart), parts, area, area // 2, 0, 0, 0, *tiles]


def _sample_factors(s: Sample, k: int, n: int, rank: int) -> int:
    rows = []
    for scale in (0.5, 2.0):
        a = s.array(s.random.standard_normal((-(-rank // 16), k, 16)), np.float16)
        b = s.array(s.random.standard_normal((n // 16, rank, 16)), np.float16)
        bits = int(np.float32(scale).view(np.int32))
        rows.append([a, b, rank, -(-rank // 16), bits, 0, 0, 0])
    rows[1][Factors.RANK] = rank - 1
    return s.array(rows, np.int64)


def _shrink_samples() -> Iterator[Sample]:
    for form, width in ((Form.BLOCKS_32, 1), (Form.BLOCKS_256, 2), (Form.WORDS, 2), (Form.FLOATS, 4)):
        rows, k = (1 if width == 1 else 3), 512
        s = Sample(rows=rows, width=width)
        act = s.activations(k)
        for row in range(rows):
            values = s.random.standard_normal(k).astype(np.float32)
            pack_row(values.ctypes.data, 0, k, k, int(form), width, row, act)
        area = 2 * 2 * 2 * TILE * LANES
        table = s.array(_sample_tiles(rows, width != 2, s.zeros(2 * area), 4 * area), np.int64)
        s.step({Step.ADAPTERS: table})
        yield s.arguments(_sample_factors(s, k, 32, 18), k, int(form), act, int(width == 1), 1)


@kernel(Shrink, _shrink_samples)
def shrink(op: int, step: int, thread: int, threads: int) -> None:
    """parts[tile][span][ranks / 16][row][16 ranks] = A times the span's inputs, for each tile's adapter."""
    table = _table(op, step, argument(op, _SHRINK.table))
    if table == 0:
        return
    k, form, factors = argument(op, _SHRINK.k), argument(op, _SHRINK.form), argument(op, _SHRINK.factors)
    rows, width = stage_rows(op, step), stage_width(op, step)
    act = activation(argument(op, _SHRINK.packed), argument(op, _SHRINK.private), rows, thread)
    spans, tiles, x = (k + SPAN - 1) // SPAN, field(table, Table.COUNT), scratch(step, thread)
    sums = x + TILE * _X_BYTES
    first, last = first_share(op, step, spans * tiles, thread, threads)
    while first >= 0:
        for item in range(first, last):
            span, index = item // tiles, item % tiles
            tile = _tile(table, index)
            own = _factors(factors, tile)
            if field(own, Factors.A) != 0:
                begin, end = span * SPAN, min(k, (span + 1) * SPAN)
                if _row(tile, TILE - 1) < 0:
                    for i in range(0, SPAN * TILE, LANES):
                        store_f32(x + 4 * i, zero_f32())
                for lane in range(TILE):
                    if _row(tile, lane) >= 0:
                        _unpack(act, form, k, (_row(tile, lane), width), begin, end, x + lane * _X_BYTES)
                parts, out = field(own, Factors.PARTS), _parts(table, argument(op, _SHRINK.index), index)
                following = _a(factors, _tile(table, (item + 1) % tiles)) + (item + 1) // tiles * SPAN * _A_BYTES
                for part in range(parts):
                    a = _a(factors, tile) + (part * k + begin) * _A_BYTES
                    ahead = following if part == parts - 1 else a + k * _A_BYTES
                    _sum_products(a, x, end - begin, ahead, sums)
                    for lane in range(TILE):
                        place = out + ((span * parts + part) * TILE + lane) * LANES * 4
                        store_f32(place, load_f32(sums + lane * LANES * 4))
        first, last = next_share(op, step, spans * tiles, thread, threads)


class Expand(Arguments):
    """Arguments of expand."""

    factors: int  # Factors of each adapter
    spans: int  # of the inputs, as `shrink` divides them
    vectors: int  # outputs / 16
    y: int  # rows of floats, changed in place
    y_stride: int  # bytes from row to row
    index: int  # number of this product among concurrent ones
    table: int = 0  # of slots, or 0 for the step's


_EXPAND = indices_of(Expand)


def _expand_samples() -> Iterator[Sample]:
    for apart in (True, False):
        s = Sample(rows=3)
        n, rank, spans, stride = 160, 18, 3, 4 * 192
        area = 2 * spans * 2 * TILE * LANES
        table = s.array(_sample_tiles(3, apart, s.normal(2 * area), 4 * area), np.int64)
        s.step({Step.ADAPTERS: table})
        yield s.arguments(_sample_factors(s, 64, n, rank), spans, n // 16, s.normal(3, 192), stride, 1)


@kernel(Expand, _expand_samples)
def expand(op: int, step: int, thread: int, threads: int) -> None:
    """y[row] += weight * B times the sum of the row's parts, for each tile's adapter."""
    table = _table(op, step, argument(op, _EXPAND.table))
    if table == 0:
        return
    vectors, tiles = argument(op, _EXPAND.vectors), field(table, Table.COUNT)
    blocks = (vectors + _BLOCK - 1) // _BLOCK
    together = 1 if field(table, Table.APART) != 0 else tiles
    groups = tiles // max(1, together)
    first, last = first_share(op, step, blocks * groups, thread, threads)
    while first >= 0:
        for item in range(first, last):
            begin, following = item // groups * _BLOCK, (item + 1) // groups * _BLOCK
            for index in range(item % groups * together, item % groups * together + together):
                ahead = begin if index + 1 < tiles else following
                _expand_tile(op, table, index, (begin, min(vectors, begin + _BLOCK), ahead), scratch(step, thread))
        first, last = next_share(op, step, blocks * groups, thread, threads)


@inner
def _expand_tile(op: int, table: int, index: int, block: tuple[int, int, int], memory: int) -> None:
    """Add a tile's results to the outputs of some vectors. block: the first vector, the end, the next tile's first.

    memory: room for the tile's ranks, and two tiles.
    """
    tile, factors = _tile(table, index), argument(op, _EXPAND.factors)
    own = _factors(factors, tile)
    if field(own, Factors.B) == 0:
        return
    rank, ranks = field(own, Factors.RANK), field(own, Factors.PARTS)
    parts = _parts(table, argument(op, _EXPAND.index), index)
    _sum_parts(parts, argument(op, _EXPAND.spans), ranks, tile, get_f32(own + 8 * Factors.FACTOR), memory)
    stride = ranks * LANES * 4
    sums = memory + TILE * stride
    following = _tile(table, (index + 1) % field(table, Table.COUNT))
    ahead = _b(factors, following) + block[2] * field(_factors(factors, following), Factors.RANK) * 2 * LANES
    for v in range(block[0], block[1], 2):
        b = _b(factors, tile) + v * rank * 2 * LANES
        total, other = zero_tile_f32(TILE), zero_tile_f32(TILE)
        both = v + 1 < block[1]
        for j in range(rank):
            prefetch_lines(ahead + ((v - block[0]) // 2 * rank + j) * 64, 1)
            total = fma_rows(total, load_f16(b + j * 2 * LANES), memory + j * 4, stride)
            if not _APART and both:
                other = fma_rows(other, load_f16(b + (rank + j) * 2 * LANES), memory + j * 4, stride)
        if _APART and both:
            for j in range(rank):
                other = fma_rows(other, load_f16(b + (rank + j) * 2 * LANES), memory + j * 4, stride)
        tile_store(total, sums)
        tile_store(other, sums + TILE * LANES * 4)
        for lane in range(TILE):
            row = _row(tile, lane)
            if row >= 0:
                y = argument(op, _EXPAND.y) + row * argument(op, _EXPAND.y_stride) + v * 64
                store_f32(y, add_f32(load_f32(y), load_f32(sums + 64 * lane)))
                if both:
                    store_f32(y + 64, add_f32(load_f32(y + 64), load_f32(sums + 64 * (TILE + lane))))


@inner
def _sum_parts(parts: int, spans: int, ranks: int, tile: int, factor: np.float32, out: int) -> None:
    """out[row][rank] = the sum of a row's parts, times the factor and the row's weight."""
    for part in range(ranks):
        for lane in range(TILE):
            total = zero_f32()
            for span in range(spans):
                total = add_f32(total, load_f32(parts + ((span * ranks + part) * TILE + lane) * LANES * 4))
            weight = splat_f32(factor * get_f32(tile + 8 * TileField.WEIGHTS + 4 * lane))
            store_f32(out + (lane * ranks + part) * LANES * 4, mul_f32(total, weight))


class LookUp(Arguments):
    """Arguments of look_up."""

    factors: int  # Factors of each adapter; A: [token][ranks, a multiple of 16]
    index: int  # number of this product among concurrent ones


_LOOK_UP = indices_of(LookUp)


def _look_up_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    area = 2 * 2 * TILE * LANES
    s.step({Step.TOKENS: s.array([4, 0, 7], np.int32)})
    s.step({Step.ADAPTERS: s.array(_sample_tiles(3, False, s.zeros(area), 4 * area), np.int64)})
    yield s.arguments(_sample_factors(s, 8, 32, 18), 0)


@kernel(LookUp, _look_up_samples)
def look_up(op: int, step: int, thread: int, threads: int) -> None:
    """parts[tile][ranks / 16][row][16 ranks] = the columns of A of the rows' tokens, for token embeddings."""
    table = _table(op, step, 0)
    if table == 0:
        return
    tiles = field(table, Table.COUNT)
    first, last = first_share(op, step, tiles, thread, threads)
    while first >= 0:
        for index in range(first, last):
            tile = _tile(table, index)
            own = _factors(argument(op, _LOOK_UP.factors), tile)
            if field(own, Factors.A) != 0:
                parts, out = field(own, Factors.PARTS), _parts(table, argument(op, _LOOK_UP.index), index)
                for part in range(parts):
                    for lane in range(TILE):
                        row = _row(tile, lane)
                        token = get_i32(field(step, Step.TOKENS) + 4 * max(row, 0))
                        ranks = load_f16(field(own, Factors.A) + (token * parts + part) * 2 * LANES)
                        store_f32(out + (part * TILE + lane) * LANES * 4, ranks)
        first, last = next_share(op, step, tiles, thread, threads)


class TileHeads(Arguments):
    """Arguments of tile_heads."""

    table: int  # out: Table of slots; PARTS and AREA are the step's
    heads: int


_HEADS = indices_of(TileHeads)


def _tile_heads_samples() -> Iterator[Sample]:
    for rows, width in ((1, 1), (6, 4)):
        s = Sample(rows=rows, width=width)
        s.step({Step.ADAPTERS: s.array(_sample_tiles(rows, True, 4096, 8192), np.int64)})
        yield s.arguments(s.zeros(Table.TILES + 3 * 2 * TileField.SIZE, np.int64), 3)


@kernel(TileHeads, _tile_heads_samples)
def tile_heads(op: int, step: int, thread: int, threads: int) -> None:
    """Give each head the tiles of the rows, on its slots (see cpu_kernels.latents), on one thread."""
    rows = field(step, Step.ADAPTERS)
    if thread != 0 or rows == 0:
        return
    table, heads, width = argument(op, _HEADS.table), argument(op, _HEADS.heads), stage_width(op, step)
    count, slots = field(rows, Table.COUNT), (stage_rows(op, step) + width - 1) // width * width
    for head in range(heads):
        for index in range(count):
            tile, new = _tile(rows, index), _tile(table, head * count + index)
            for part in range(TileField.SIZE):
                put_i64(new + 8 * part, field(tile, part))
            put_i64(new + 8 * TileField.EXPERT, head)
            for lane in range(TILE):
                if _row(tile, lane) >= 0:
                    put_i32(new + 8 * TileField.ROWS + 4 * lane, head * slots + _row(tile, lane))
    for index in range(Table.TILES):
        put_i64(table + 8 * index, field(rows, index))
    put_i64(table + 8 * Table.COUNT, heads * count)


class TileSlots(Arguments):
    """Arguments of tile_slots."""

    table: int  # out: Table of slots; PARTS and AREA are the step's
    used: int  # experts that a row uses
    segments: int  # as cpu_kernels.experts.route writes them
    slot_of_choice: int  # int32 [row][used]
    expert_of_choice: int  # int32 [row][used]


_SLOTS = indices_of(TileSlots)


def _tile_slots_samples() -> Iterator[Sample]:
    for apart in (True, False):
        s = Sample(rows=3, width=2)
        s.step({Step.ADAPTERS: s.array(_sample_tiles(3, apart, 4096, 8192), np.int64)})
        segments, experts = s.array([2, 1, 0, 2, 3, 2, 2], np.int64), s.array([1, 3, 3, 1, 1, 3], np.int32)
        yield s.arguments(s.zeros(8 + 12 * 6, np.int64), 2, segments, s.array([0, 4, 5, 1, 2, 6], np.int32), experts)


@kernel(TileSlots, _tile_slots_samples)
def tile_slots(op: int, step: int, thread: int, threads: int) -> None:
    """Group the slots of rows with adapters by expert and adapter, on one thread."""
    rows = field(step, Step.ADAPTERS)
    if thread != 0 or rows == 0:
        return
    table, used, segments = argument(op, _SLOTS.table), argument(op, _SLOTS.used), argument(op, _SLOTS.segments)
    count = 0
    for s in range(field(segments, 0)):
        expert, adapter, filled = field(segments, 3 * s + 1), -1, TILE
        for index in range(field(rows, Table.COUNT)):
            tile = _tile(rows, index)
            if field(tile, TileField.ADAPTER) != adapter:
                adapter, filled = field(tile, TileField.ADAPTER), TILE
            for lane in range(TILE):
                row = _row(tile, lane)
                for choice in range(row * used, row * used + used):
                    if row >= 0 and get_i32(argument(op, _SLOTS.expert_of_choice) + 4 * choice) == expert:
                        if filled == TILE:
                            new = _tile(table, count)
                            put_i64(new + 8 * TileField.ADAPTER, adapter)
                            put_i64(new + 8 * TileField.EXPERT, expert)
                            for other in range(TILE):
                                put_i32(new + 8 * TileField.ROWS + 4 * other, -1)
                                put_f32(new + 8 * TileField.WEIGHTS + 4 * other, np.float32(0.0))
                            count, filled = count + 1, 0
                        into = _tile(table, count - 1)
                        slot = get_i32(argument(op, _SLOTS.slot_of_choice) + 4 * choice)
                        put_i32(into + 8 * TileField.ROWS + 4 * filled, slot)
                        weight = get_f32(tile + 8 * TileField.WEIGHTS + 4 * lane)
                        put_f32(into + 8 * TileField.WEIGHTS + 4 * filled, weight)
                        filled += 1
    for index in range(Table.TILES):
        put_i64(table + 8 * index, field(rows, index))
    put_i64(table + 8 * Table.COUNT, count)
