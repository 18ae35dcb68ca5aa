"""Attention over pages of 16 tokens.

A column is one query head of one row; a tile is up to MAX_COLUMNS columns that share a key-value head. Tokens are
processed in spans at fixed positions, counted from position 0: each span has its own softmax, and the spans' results
are merged in order. So a row's result depends neither on the other rows nor on how the prompt was chunked, and
different threads may compute the spans of a tile. Threads divide a step with few tiles by spans, any other by tiles.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np

from cpu_kernels import (
    attention_blocks,
    attention_f16,
    attention_i16,
    attention_latent,
    attention_q4_0,
    attention_q8_0,
)
from cpu_kernels.arguments import Arguments, indices_of, integers_of
from cpu_kernels.attention_shape import (
    HEADER_BYTES,
    MAX_COLUMNS,
    SPAN_BYTES,
    SPAN_PAGES,
    SPAN_TOKENS,
    WIDTHS,
    parts_bytes,
    spans_of,
    tiles_of,
)
from cpu_kernels.attention_span import TOTAL_BYTES, add_distances, add_part, add_sinks, clear, first_seen, softmax
from cpu_kernels.declarations import inner
from cpu_kernels.kernel import Function, Kernel
from cpu_kernels.kv_types import OF_HEADS, OF_LATENTS, PAGE_TOKENS, KVType, PageLayout, key_layout, value_layout
from cpu_kernels.pages import HeadPages, KVPages
from cpu_kernels.records import Op, Step, argument, field, page_table, scratch, stage_rows, stage_width
from cpu_kernels.rope import rotate_head
from cpu_kernels.self_check import Sample
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.arithmetic import mul_f32
from cpu_kernels.simd.threads import atomic_add, atomic_store
from cpu_kernels.simd.vectors import get_f32, get_i32, load_f32, put_f32, splat_f32, store_f32

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_OF_WANTED = Step.WANTED_SEGMENTS - Step.SEGMENTS
_SEGMENT_FIELDS = 4
_TYPES: dict[KVType, Any] = {
    KVType.I16: attention_i16,
    KVType.F16: attention_f16,
    KVType.Q8_0: attention_q8_0,
    KVType.Q4_0: attention_q4_0,
}

# A thread's scratch buffer: scales of queries, running maxima and sums, scores, scratch for the value sums, one span's
# result, totals, queries, one query. Regions whose size depends on D come last.
_STATE = MAX_COLUMNS * 4
_SCORES = _STATE + TOTAL_BYTES
_WEIGHING = _SCORES + MAX_COLUMNS * SPAN_BYTES
_PART = _WEIGHING + (max(attention_blocks.MEMORY_BYTES, attention_i16.MEMORY_BYTES) + 63) // 64 * 64


def scratch_bytes(padded: int) -> int:
    """Bytes of scratch that a thread needs for heads of `padded` values."""
    return _PART + HEADER_BYTES + (3 * MAX_COLUMNS + 1) * padded * 4 + 64


@inner
def _of_stage(op: int, step: int, index: int) -> int:
    """A field of the step record for the rows of the operation's stage: all, or those with requested logits."""
    return field(step, index + (_OF_WANTED if field(op, Op.STAGE) != 0 else 0))


@inner
def _first_span(position: int, window: int) -> int:
    """The first span with a token that a row attends to."""
    return max(0, first_seen(position, window)) // SPAN_TOKENS


@inner
def _end(segment: int, first: int, count: int, ahead: int) -> int:
    """One past the last position that rows first..first+count-1 of a segment attend to."""
    return min(field(segment, 2) + first + count + ahead, field(segment, 2) + field(segment, 1))


class Mask(Arguments):
    """Which tokens a row sees: all up to its own by default."""

    window: int = 0  # see attention_span.first_seen
    behind: int = 0  # tokens after the row's own, within the segment
    images: int = 0  # 1 if rows of an image may see later ones, see Step.LOOK_AHEAD


class Alibi(Arguments):
    """What ALiBi subtracts from scores; 0 without it."""

    slopes: int = 0  # the heads' slopes, floats in base 2
    numbers: int = 0  # floats 0 to 15


class LatentQueries(Arguments):
    """The queries for latents, which have two parts and no norm."""

    parts: int = 0  # those without RoPE, in slots (see cpu_kernels.latents)
    slot_stride: int = 0  # bytes from slot to slot of these parts
    head_bytes: int = 0  # of a head in a row of queries
    turned_offset: int = 0  # bytes in a head before the part with RoPE
    turned: int = 0  # values of that part, which the rope table covers and which come last in D


class Attention(Arguments):
    """Arguments of attention."""

    queries: int  # rows of heads * D
    out: int  # rows of heads * size
    query_norm: int = 0  # weight of the norm of queries, or 0
    pages: KVPages
    kv_heads: int  # heads of keys and of values
    group: int  # query heads per head of keys
    padded: int  # D: values of a head with padding
    size: int  # values of a head
    rope: int  # number of the rope table in the step record
    epsilon: int  # address of a float
    scale: int  # address of a float, which includes log2(e) unless there is a cap
    cap: int  # address of the soft cap, a float; 0.0 for none
    mask: Mask = Mask()
    sinks: int = 0  # the heads' sink scores, floats in base 2, or 0
    longest: int  # the largest D of any layer: the counters in parts are never where other layers write results
    alibi: Alibi = Alibi()
    latents: LatentQueries = LatentQueries()


_ATTEND = indices_of(Attention)


@inner
def _ahead(op: int, step: int) -> int:
    """Tokens that a row sees after its own, within the segment."""
    return max(argument(op, _ATTEND.mask.behind), argument(op, _ATTEND.mask.images) * field(step, Step.LOOK_AHEAD))


@inner
def _rope_table(op: int, step: int, row: int, turned: int) -> int:
    """Address of a row's cosines and sines, for `turned` values."""
    place = get_i32(_of_stage(op, step, Step.ROPE_ROWS) + 4 * row)
    return field(step, Step.ROPE_TABLES + argument(op, _ATTEND.rope)) + place * turned * 4


@inner
def _rotate(op: int, step: int, place: Any, column: int, out: int) -> None:
    """Write a column's query to `out`, normalised, rotated (RoPE) and scaled."""
    segment, first, _, head0, mine = place
    padded = argument(op, _ATTEND.padded)
    row = first + column // mine
    source = (
        argument(op, _ATTEND.queries)
        + ((field(segment, 0) + row) * argument(op, _ATTEND.kv_heads) * argument(op, _ATTEND.group)) * padded * 4
    )
    source += (head0 + column % mine) * padded * 4
    table = _rope_table(op, step, field(segment, 0) + row, padded)
    epsilon, scale = get_f32(argument(op, _ATTEND.epsilon)), get_f32(argument(op, _ATTEND.scale))
    norm, size = argument(op, _ATTEND.query_norm), argument(op, _ATTEND.size)
    rotate_head(source, norm, table, padded, size, epsilon, scale, out)


@inner
def _join(op: int, step: int, place: Any, column: int, out: int) -> None:
    """Write a column's query for latents: its product with the head's key matrix, then the part that RoPE rotates."""
    segment, first, _, head0, mine = place
    head, row = head0 + column % mine, field(segment, 0) + first + column // mine
    turned, width = argument(op, _ATTEND.latents.turned), stage_width(op, step)
    plain = (argument(op, _ATTEND.padded) - turned) * 4
    slot = head * ((stage_rows(op, step) + width - 1) // width * width) + row
    source = argument(op, _ATTEND.latents.parts) + slot * argument(op, _ATTEND.latents.slot_stride)
    scale = get_f32(argument(op, _ATTEND.scale))
    for i in range(0, plain, 64):
        store_f32(out + i, mul_f32(load_f32(source + i), splat_f32(scale)))
    source = (
        argument(op, _ATTEND.queries)
        + (row * argument(op, _ATTEND.group) + head) * argument(op, _ATTEND.latents.head_bytes)
        + argument(op, _ATTEND.latents.turned_offset)
    )
    rotate_head(source, 0, _rope_table(op, step, row, turned), turned, turned, _ZERO, scale, out + plain)


@inner
def _finish(op: int, place: Any, columns: int, totals: int, state: int) -> None:
    """Divide the totals by the softmax sums and write them to the output rows."""
    segment, first, _, head0, mine = place
    padded, size = argument(op, _ATTEND.padded), argument(op, _ATTEND.size)
    for c in range(columns):
        inverse = _ONE / get_f32(state + MAX_COLUMNS * 4 + 4 * c)
        row = field(segment, 0) + first + c // mine
        out = (
            argument(op, _ATTEND.out)
            + (row * argument(op, _ATTEND.kv_heads) * argument(op, _ATTEND.group) + head0 + c % mine) * size * 4
        )
        source = totals + c * padded * 4
        if size % 16 == 0:
            for i in range(0, size * 4, 64):
                store_f32(out + i, mul_f32(load_f32(source + i), splat_f32(inverse)))
        else:
            for i in range(0, size * 4, 4):
                put_f32(out + i, get_f32(source + i) * inverse)


@inner
def _fade(op: int, place: Any, pages: int, where: Any, scores: int) -> None:
    """Apply ALiBi to a span's scores, if the model uses it."""
    _, _, count, head0, mine = place
    if argument(op, _ATTEND.alibi.slopes) != 0:
        add_distances(
            count * mine,
            mine,
            pages,
            where,
            argument(op, _ATTEND.alibi.slopes) + 4 * head0,
            argument(op, _ATTEND.alibi.numbers),
            scores,
        )


@inner
def _turn_back(columns: int, padded: int, totals: int) -> None:
    """Undo the Hadamard transform of values in the totals."""
    for c in range(columns):
        attention_q4_0.turn(totals + c * padded * 4, padded, totals + c * padded * 4)


def _parts_of_tile(width: int, keys: KVType, values: KVType | None) -> Sequence[Any]:
    """Functions that make a column's query, store it, compute scores, and sum weighted values."""
    if values is None:
        kind = _TYPES[keys]
        return _join, kind.queries(width), kind.scores(width, 0), attention_latent.outputs(width, keys)
    score = _TYPES[keys].scores(width, _TYPES[values].VALUE_BYTES)
    return _rotate, _TYPES[keys].queries(width), score, _TYPES[values].outputs(width, _TYPES[keys].PAGE_BYTES_PER_VALUE)


@cache  # so that a process that compiles several kernels of these types lowers it once
def _tile(width: int, keys: KVType, values: KVType | None) -> Any:
    """Function that computes attention for a tile, with `width` columns per register tile."""
    query_of, put_query, score, weigh = _parts_of_tile(width, keys, values)
    turned = values is KVType.Q4_0

    @inner
    def attend(op: int, step: int, place: Any, head: int, spans: Any, parts: int, memory: int) -> None:
        """Compute spans first..last-1 of the tile's begin..end-1, and its output rows once all spans are computed.

        spans: (begin, end, first, last). place: (segment, first row in it, rows, first query head, query heads). parts:
        address that collects the results of all spans, or 0 if this call computes them all.
        """
        segment, first, count, head0, mine = place
        begin, end, first_span, last_span = spans
        padded, window = argument(op, _ATTEND.padded), argument(op, _ATTEND.mask.window)
        ahead = _ahead(op, step)
        position = field(segment, 2) + first
        table = page_table(field(segment, 3), argument(op, _ATTEND.pages.of_window))
        columns = count * mine
        part = memory + _PART
        size = parts_bytes(1, argument(op, _ATTEND.longest))
        totals = part + size
        state = memory + _STATE
        queries = totals + MAX_COLUMNS * padded * 4
        query = queries + MAX_COLUMNS * padded * 4
        for c in range(columns):
            query_of(op, step, place, c, query)
            put_query(query, c, padded, queries, memory)
        key_pages = argument(op, _ATTEND.pages.keys.first) + head * argument(op, _ATTEND.pages.keys.head_bytes)
        value_pages = argument(op, _ATTEND.pages.values.first) + head * argument(op, _ATTEND.pages.values.head_bytes)
        storage = (
            key_pages,
            value_pages,
            argument(op, _ATTEND.pages.keys.place_bytes),
            argument(op, _ATTEND.pages.values.place_bytes),
            padded,
            argument(op, _ATTEND.size),
        )
        last_page = (_end(segment, first, count, ahead) - 1) // PAGE_TOKENS + 1
        clear(columns, padded, totals, state)
        if argument(op, _ATTEND.sinks) != 0:
            add_sinks(columns, mine, argument(op, _ATTEND.sinks) + 4 * head0, state)
        for span in range(first_span, last_span):
            page = span * SPAN_PAGES
            pages = (table + 4 * page, min(SPAN_PAGES, last_page - page), last_page - page)
            where = (span * SPAN_TOKENS, position, window, ahead, field(segment, 1) + field(segment, 2))
            to = part if parts == 0 else parts + (span - begin) * size
            score(pages, storage, columns, queries, memory, memory + _SCORES, part)
            _fade(op, place, pages[1], where, memory + _SCORES)
            softmax(columns, mine, pages[1], where, get_f32(argument(op, _ATTEND.cap)), memory + _SCORES, to)
            weigh(pages, storage, columns, mine, where, memory + _SCORES, to + HEADER_BYTES, memory + _WEIGHING)
            if parts == 0:
                add_part(columns, padded, to, totals, state)
        complete = parts == 0
        if parts != 0:
            computed = last_span - first_span
            complete = atomic_add(parts, computed) + computed == end - begin
            if complete:
                atomic_store(parts, 0)
                for span in range(end - begin):
                    add_part(columns, padded, parts + span * size, totals, state)
        if complete:
            if turned:
                _turn_back(columns, padded, totals)
            _finish(op, place, columns, totals, state)

    return attend


@inner
def _spans_of_step(op: int, step: int) -> int:
    """The number of spans of all tiles of a step."""
    group, window = argument(op, _ATTEND.group), argument(op, _ATTEND.mask.window)
    ahead = _ahead(op, step)
    together = max(1, MAX_COLUMNS // group)
    total = 0
    for s in range(_of_stage(op, step, Step.SEGMENT_COUNT)):
        segment = _of_stage(op, step, Step.SEGMENTS) + s * _SEGMENT_FIELDS * 8
        for first in range(0, field(segment, 1), together):
            count = min(together, field(segment, 1) - first)
            position = field(segment, 2) + first
            end = _end(segment, first, count, ahead)
            total += (end - 1) // SPAN_TOKENS + 1 - _first_span(position, window)
    return total * argument(op, _ATTEND.kv_heads) * ((group + MAX_COLUMNS - 1) // MAX_COLUMNS)


def _attention(keys: KVType, values: KVType | None, narrowest: int) -> Function:
    """Attention of all segments of a step. narrowest: the fewest columns of a register tile.

    values: None for latents, whose rows serve as keys and, with their first `size` numbers, as values.

    If the step has a buffer for parts, threads divide the spans of all tiles, tile after tile. Otherwise a thread
    computes the whole tiles whose first spans it has.
    """
    tiles = {width: _tile(width, keys, values) for width in WIDTHS if width >= narrowest}
    one, two, four, widest = (tiles[min(max(width, narrowest), WIDTHS[-1])] for width in (1, 2, 4, 8))

    @inner
    def attend(op: int, step: int, thread: int, mine: int, others: int) -> None:
        """Compute spans mine..others-1 of all tiles or, without parts, the tiles whose first spans these are."""
        group, window, ahead, parts = (
            argument(op, _ATTEND.group),
            argument(op, _ATTEND.mask.window),
            _ahead(op, step),
            _of_stage(op, step, Step.PARTS),
        )
        together = max(1, MAX_COLUMNS // group)
        blocks = (group + MAX_COLUMNS - 1) // MAX_COLUMNS
        before = 0
        for part_of_head in range(argument(op, _ATTEND.kv_heads) * blocks):
            head, low = part_of_head // blocks, part_of_head % blocks * MAX_COLUMNS
            used = min(MAX_COLUMNS, group - low)
            for s in range(_of_stage(op, step, Step.SEGMENT_COUNT)):
                segment = _of_stage(op, step, Step.SEGMENTS) + s * _SEGMENT_FIELDS * 8
                for first in range(0, field(segment, 1), together):
                    count = min(together, field(segment, 1) - first)
                    position = field(segment, 2) + first
                    begin = _first_span(position, window)
                    end = (_end(segment, first, count, ahead) - 1) // SPAN_TOKENS + 1
                    spans = (begin, end, max(begin, begin + mine - before), min(end, begin + others - before))
                    gathered = parts + parts_bytes(before, argument(op, _ATTEND.longest))
                    if parts == 0:
                        spans = (begin, end, begin, end if mine <= before < others else begin)
                        gathered = 0
                    place = (segment, first, count, head * group + low, used)
                    before += end - begin
                    if spans[2] >= spans[3]:
                        continue
                    if count * used == 1:
                        one(op, step, place, head, spans, gathered, scratch(step, thread))
                    elif count * used == 2:
                        two(op, step, place, head, spans, gathered, scratch(step, thread))
                    elif count * used <= 4:
                        four(op, step, place, head, spans, gathered, scratch(step, thread))
                    else:
                        widest(op, step, place, head, spans, gathered, scratch(step, thread))

    def attention(op: int, step: int, thread: int, threads: int) -> None:
        total = _spans_of_step(op, step)
        first, last = first_share(op, step, total, thread, threads)
        while first >= 0:
            attend(op, step, thread, first, last)
            first, last = next_share(op, step, total, thread, threads)

    return attention


def _samples(keys: KVType, values: KVType | None, group: int) -> Iterator[Sample]:
    if values is None:
        yield from _latent_samples(keys, group)
        return
    # A window, a cap, sinks and a token after each row; then two spans, divided among threads by tiles or by spans.
    layouts = key_layout(keys, 32), value_layout(values, 32)
    for rows, tokens, options, split in ((3, 40, True, False), (2, 270, False, False), (2, 270, False, True)):
        s, (key_pages, value_pages) = _sample(rows, tokens, group, 32, split, layouts)
        s.positions(tokens - rows, 32)
        alibi = Alibi(slopes=s.array(np.linspace(0.1, 0.9, group)), numbers=s.array(range(16)))
        arguments = Attention(
            queries=s.normal(rows, group, 32),
            query_norm=s.normal(32) if options else 0,
            out=s.zeros(rows * group * 32),
            pages=KVPages(keys=key_pages, values=value_pages, of_window=int(options)),
            kv_heads=1,
            group=group,
            padded=32,
            size=24 if options else 32,
            rope=0,
            epsilon=s.array([1e-5]),
            scale=s.array([0.3]),
            cap=s.array([3.0 if options else 0.0]),
            mask=Mask(window=20, behind=1) if options else Mask(),
            sinks=s.normal(group) if options else 0,
            longest=32,
            alibi=alibi if options else Alibi(),
        )
        yield s.arguments(*integers_of(arguments))


def _latent_samples(keys: KVType, group: int) -> Iterator[Sample]:
    padded, turned, size = 96, 32, 40
    layout = key_layout(keys, padded)
    for rows, tokens, split in ((3, 40, False), (2, 270, True)):
        s, (pages,) = _sample(rows, tokens, group, padded, split, [layout])
        s.positions(tokens - rows, turned)
        parts = s.normal(group * rows, 64)
        arguments = Attention(
            queries=s.normal(rows, group, 64),
            out=s.zeros(rows * group * size),
            pages=KVPages(keys=pages, values=pages),
            kv_heads=1,
            group=group,
            padded=padded,
            size=size,
            rope=0,
            epsilon=s.array([1e-5]),
            scale=s.array([0.3]),
            cap=s.array([0.0]),
            longest=padded,
            latents=LatentQueries(
                parts=parts, slot_stride=64 * 4, head_bytes=64 * 4, turned_offset=32 * 4, turned=turned
            ),
        )
        yield s.arguments(*integers_of(arguments))


def _sample(
    rows: int, tokens: int, group: int, padded: int, split: bool, layouts: Sequence[PageLayout]
) -> tuple[Sample, list[HeadPages]]:
    """A sample with a segment of the last `rows` of some tokens, and its pages in each layout. split: by spans."""
    s, count = Sample(rows=rows, scratch=scratch_bytes(padded)), -(-tokens // PAGE_TOKENS)
    places = s.random.permutation(count)
    table = s.tables(places, places[::-1])
    pages = [
        HeadPages(first=_random_pages(s, each, count), head_bytes=0, place_bytes=each.page_bytes) for each in layouts
    ]
    parts = s.zeros(parts_bytes(tiles_of(rows, group) * spans_of(tokens), padded), np.uint8) if split else 0
    s.step({Step.SEGMENTS: s.array([0, rows, tokens - rows, table], np.int64), Step.SEGMENT_COUNT: 1})
    s.step({Step.PARTS: parts})
    return s, pages


def _random_pages(s: Sample, layout: PageLayout, count: int) -> int:
    """Pages of random bytes with normally distributed floats; the f32 factors of words are positive and small."""
    pages = s.random.integers(0, 256, (1, 1, count, layout.page_bytes), np.uint8)
    for plane in layout.planes:
        if np.dtype(plane.dtype).kind == "f":
            floats = s.random.standard_normal((count, *plane.shape)).astype(plane.dtype)
            if plane.dtype is np.float32:
                floats = np.abs(floats) * np.float32(1e-5)
            pages[0, 0, :, plane.offset : plane.offset + plane.nbytes] = floats.reshape(count, -1).view(np.uint8)
    return s.array(pages, np.uint8)


def _kernel(keys: KVType, values: KVType | None, narrowest: int) -> Kernel:
    how = (keys, values, narrowest)
    name = f"attention.{keys}_{values or 'latent'}_{narrowest}"
    return Kernel(name, __name__, partial(_attention, *how), partial(_samples, *how), Attention)


_KERNELS = {
    (*types, width): _kernel(*types, width)
    for types in (*product(OF_HEADS, OF_HEADS), *product(OF_LATENTS, [None]))
    for width in WIDTHS
}


def attention_kernel(keys: KVType, values: KVType | None, group: int) -> Kernel:
    """The kernel for models with `group` query heads per key-value head. values: None for latents.

    Its tiles have at least `group` columns, or the largest width of a register tile; none narrower is compiled.
    """
    return _KERNELS[keys, values, WIDTHS[min(bisect_left(WIDTHS, group), len(WIDTHS) - 1)]]
