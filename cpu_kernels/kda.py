"""Kimi delta attention: a gated delta network whose states forget each value of a key at a rate of its own.

A head's state S [D][D] maps keys to values. A token first decays its rows and then corrects the value that its key maps
to (Kimi Linear, 2025):

    S = diag(exp(g)) S      S = S + k beta (v - k S)      o = q S

A page of tokens has a slot (cpu_kernels.page_states): the state at its first token, and for each token so far its key
k, its correction u and G [D], the sum of g from the page's first token on. Row t is computed from these alone:

    u[t] = beta (v - (k exp(G[t])) S - sum over i < t of (k . k[i] exp(G[t] - G[i])) u[i])
    o[t] = (q exp(G[t])) S + sum over i <= t of (q . k[i] exp(G[t] - G[i])) u[i]

Exponents are never positive, so nothing overflows. Each sum has a fixed order, whichever rows a step computes. Threads
divide the heads, each with its part of a slot:

    S [D / 16][D][16]    k [16][D]    u [16][D]    G [16][D]    rows [K - 1 + 16][3 D]

where D is a head's size, padded to whole vectors, and rows are the inputs of the convolution (query, key, value),
starting K - 1 rows before the page.
"""

import math
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np

from cpu_kernels.activations import GATE_SIGMOID, gate_values, norm_row
from cpu_kernels.arguments import indices_of
from cpu_kernels.declarations import inner
from cpu_kernels.kernel import kernel
from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.page_states import (
    GROUP_PAGES,
    PART_BYTES,
    PARTS,
    PLACES,
    SLOT_BYTES,
    WIDE,
    PagedStates,
    clear_floats,
    convolve,
    copy_floats,
    softplus,
    through_state,
    unit_vector,
    walk,
)
from cpu_kernels.records import Step, argument, field, scratch
from cpu_kernels.self_check import Sample
from cpu_kernels.simd.arithmetic import exp2_f32, fma, mul_f32, sub_f32, sum_f32
from cpu_kernels.simd.tiles import tile_fma, tile_load_f32, tile_store, zero_tile_f32
from cpu_kernels.simd.vectors import get_f32, load_f32, put_f32, splat_f32, store_f32, zero_f32

_COLUMNS = 2 * PAGE_TOKENS
_ONE = np.float32(1.0)
_STATE, _KEYS, _CORRECTIONS, _FADED, _ROWS = range(5)


class KdaShape(IntEnum):
    """Indices into the record of a layer's sizes, to which PagedStates.shape points."""

    HEADS = PARTS
    PADDED = 1  # values of a head
    SIZE = 2  # the same without padding
    REACH = 3  # rows that the convolution reads
    GROUP_PAGES = GROUP_PAGES
    PLACES = PLACES  # place numbers that a group spans in a page table
    SLOT_BYTES = SLOT_BYTES  # stride of slots
    HEAD_BYTES = PART_BYTES  # stride of heads' parts of a slot
    COUNT = 11


def head_floats(padded: int, reach: int) -> int:
    """Floats of a head's part of a slot."""
    return padded * padded + 3 * PAGE_TOKENS * padded + (reach - 1 + PAGE_TOKENS) * 3 * padded


def scratch_bytes(padded: int) -> int:
    """Bytes of scratch memory that a thread needs."""
    return 4 * (3 * PAGE_TOKENS * padded + 2 * padded * _COLUMNS + 2 * PAGE_TOKENS * PAGE_TOKENS + 2 * padded)


class KimiDelta(PagedStates):
    """Arguments of kda."""

    rows: int  # inputs of the convolution: all heads' queries, then keys, then values
    rows_stride: int  # bytes from row to row
    part_bytes: int  # from a row's queries to its keys, and from those to its values
    decay: int  # of each value of a key before its activation function, [head][value]
    decay_stride: int  # bytes from row to row
    gates: int  # of the output [head][value]
    gates_stride: int  # bytes from row to row
    beta: int  # before its activation function, [head]
    beta_stride: int  # bytes from row to row
    biases: int  # of the decay, [head][value]
    rates: int  # factor of each head's decay, in base 2
    convolution: int  # weights [head][K][query, key, value], the oldest row first
    norm: int  # weight of the norm
    factors: int  # floats: epsilon of keys, factor of queries, epsilon of the norm
    out: int  # rows of heads, without padding
    out_stride: int  # bytes from row to row


_KDA = indices_of(KimiDelta)
_through_two, _through_many = through_state(2), through_state(WIDE)


@inner
def _part(slot: int, padded: int, which: int) -> int:
    """Address of a region of a head's part of a slot."""
    return slot + (4 * padded * (padded + (which - 1) * PAGE_TOKENS) if which > _STATE else 0)


@inner
def _fade(op: int, row: int, head: int, padded: int, faded: int, t: int) -> None:
    """Write G[t], the sum of a row's decays from the page's first token on, in base 2."""
    source = argument(op, _KDA.decay) + row * argument(op, _KDA.decay_stride) + head * padded * 4
    biases, rate = argument(op, _KDA.biases) + head * padded * 4, get_f32(argument(op, _KDA.rates) + head * 4)
    for d in range(padded):
        before = np.float32(0.0)
        if t > 0:
            before = get_f32(faded + ((t - 1) * padded + d) * 4)
        grown = softplus(np.float32(get_f32(source + d * 4) + get_f32(biases + d * 4)))
        put_f32(faded + (t * padded + d) * 4, np.float32(before + rate * grown))


@inner
def _scores(keys: int, faded: int, t: int, padded: int, query: int, key_scores: int, query_scores: int) -> None:
    """Scores of a row's key, the t-th of a page, and of its query with the faded keys up to there."""
    key, total = keys + t * padded * 4, faded + t * padded * 4
    for j in range(t + 1):
        of_key, of_query = zero_f32(), zero_f32()
        for d in range(0, padded * 4, 64):
            fade = exp2_f32(sub_f32(load_f32(total + d), load_f32(faded + j * padded * 4 + d)))
            before = mul_f32(fade, load_f32(keys + j * padded * 4 + d))
            of_key = fma(load_f32(key + d), before, of_key)
            of_query = fma(load_f32(query + d), before, of_query)
        put_f32(key_scores + j * 4, sum_f32(of_key))
        put_f32(query_scores + j * 4, sum_f32(of_query))


@inner
def _columns(key: int, query: int, total: int, padded: int, i: int, n: int, columns: int) -> None:
    """Write the i-th of n rows' faded key and query as columns."""
    for d in range(0, padded, 16):
        fade = exp2_f32(load_f32(total + d * 4))
        store_f32(query + d * 4, mul_f32(fade, load_f32(query + d * 4)))
        for e in range(d, d + 16):
            put_f32(columns + (e * _COLUMNS + n + i) * 4, get_f32(query + e * 4))
        store_f32(query + d * 4, mul_f32(fade, load_f32(key + d * 4)))
        for e in range(d, d + 16):
            put_f32(columns + (e * _COLUMNS + i) * 4, get_f32(query + e * 4))


@inner
def _row(t: int, i: int, n: int, beta: np.float32, padded: int, memory: Any, corrections: int) -> None:
    """Compute correction u[t] and the output of a row, the i-th of the step's n rows in its page.

    memory: addresses of the row's scores of its key and of its query, of its value, of keys and queries times the
    state, and of the output.
    """
    key_scores, query_scores, value, through, out = memory
    for v in range(padded // 16):
        known = load_f32(through + (v * _COLUMNS + i) * 64)
        asked = load_f32(through + (v * _COLUMNS + n + i) * 64)
        for j in range(t):
            u = load_f32(corrections + (j * padded + v * 16) * 4)
            known = fma(splat_f32(get_f32(key_scores + j * 4)), u, known)
            asked = fma(splat_f32(get_f32(query_scores + j * 4)), u, asked)
        u = mul_f32(splat_f32(beta), sub_f32(load_f32(value + v * 64), known))
        store_f32(corrections + (t * padded + v * 16) * 4, u)
        store_f32(out + v * 64, fma(splat_f32(get_f32(query_scores + t * 4)), u, asked))


@inner
def _give(op: int, shape: int, row: int, head: int, out: int, memory: int) -> None:
    """Normalise a head's output, gate it, and write it."""
    padded, size = field(shape, KdaShape.PADDED), field(shape, KdaShape.SIZE)
    norm_row(out, argument(op, _KDA.norm), size, padded, get_f32(argument(op, _KDA.factors) + 8), memory)
    gates = argument(op, _KDA.gates) + row * argument(op, _KDA.gates_stride) + head * padded * 4
    gate_values(GATE_SIGMOID, gates, memory, memory, padded)
    target = argument(op, _KDA.out) + row * argument(op, _KDA.out_stride) + head * size * 4
    for d in range(0, size // 16 * 16, 16):
        store_f32(target + d * 4, load_f32(memory + d * 4))
    for d in range(size // 16 * 16, size):
        put_f32(target + d * 4, get_f32(memory + d * 4))


@inner
def _rows_of_page(op: int, step: int, thread: int, head: int, slot: int, t0: int, row0: int, n: int) -> None:
    """Compute rows row0..row0+n-1 of the step, which are rows t0.. of a page, for one head."""
    shape = argument(op, _KDA.shape)
    padded, reach = field(shape, KdaShape.PADDED), field(shape, KdaShape.REACH)
    floats = 3 * padded
    rows = _part(slot, padded, _ROWS)
    for i in range(n):
        source = argument(op, _KDA.rows) + (row0 + i) * argument(op, _KDA.rows_stride) + head * padded * 4
        target = rows + (reach - 1 + t0 + i) * floats * 4
        for part in range(3):
            copy_floats(source + part * argument(op, _KDA.part_bytes), target + part * padded * 4, padded)
    convolved = scratch(step, thread)
    columns = convolved + PAGE_TOKENS * floats * 4
    through = columns + padded * _COLUMNS * 4
    key_scores = through + padded * _COLUMNS * 4
    query_scores = key_scores + PAGE_TOKENS * PAGE_TOKENS * 4
    out = query_scores + PAGE_TOKENS * PAGE_TOKENS * 4
    weights = (argument(op, _KDA.convolution) + head * reach * floats * 4, 0, floats * 4)
    convolve(rows + t0 * floats * 4, n, reach, floats, floats, weights, convolved, floats)
    keys, faded = _part(slot, padded, _KEYS), _part(slot, padded, _FADED)
    epsilon, scale = get_f32(argument(op, _KDA.factors)), get_f32(argument(op, _KDA.factors) + 4)
    for i in range(n):
        t, query = t0 + i, convolved + i * floats * 4
        key, scores = keys + t * padded * 4, i * PAGE_TOKENS * 4
        unit_vector(query, padded, epsilon, scale, query)
        unit_vector(query + padded * 4, padded, epsilon, _ONE, key)
        _fade(op, row0 + i, head, padded, faded, t)
        _scores(keys, faded, t, padded, query, key_scores + scores, query_scores + scores)
        _columns(key, query, faded + t * padded * 4, padded, i, n, columns)
    state = _part(slot, padded, _STATE)
    if n == 1:
        _through_two(columns, state, padded, padded, _COLUMNS, through)
    else:
        for c in range(0, 2 * n, WIDE):
            _through_many(columns + c * 4, state, padded, padded, _COLUMNS, through + c * 64)
    for i in range(n):
        beta = get_f32(argument(op, _KDA.beta) + (row0 + i) * argument(op, _KDA.beta_stride) + head * 4)
        beta = np.float32(_ONE / (_ONE + np.float32(math.exp(-beta))))
        scores, value = i * PAGE_TOKENS * 4, convolved + (i * floats + 2 * padded) * 4
        memory = (key_scores + scores, query_scores + scores, value, through, out)
        _row(t0 + i, i, n, beta, padded, memory, _part(slot, padded, _CORRECTIONS))
        _give(op, shape, row0 + i, head, out, out + padded * 4)


@inner
def _fold(before: int, after: int, padded: int, memory: int) -> None:
    """Compute a head's state after a full page. before, after: parts of slots. memory: for 17 D floats."""
    keys, faded = _part(before, padded, _KEYS), _part(before, padded, _FADED)
    added, last = _part(before, padded, _CORRECTIONS), faded + (PAGE_TOKENS - 1) * padded * 4
    scaled = memory + padded * 4
    for d in range(0, padded * 4, 64):
        store_f32(memory + d, exp2_f32(load_f32(last + d)))
        for i in range(0, PAGE_TOKENS * padded * 4, padded * 4):
            fade = exp2_f32(sub_f32(load_f32(last + d), load_f32(faded + i + d)))
            store_f32(scaled + i + d, mul_f32(fade, load_f32(keys + i + d)))
    for c in range(padded // 16):
        for d in range(0, padded, WIDE):
            at = (c * padded + d) * 64
            for r in range(WIDE):
                whole = splat_f32(get_f32(memory + (d + r) * 4))
                store_f32(after + at + r * 64, mul_f32(whole, load_f32(before + at + r * 64)))
            tile = tile_load_f32(zero_tile_f32(WIDE), after + at)
            for i in range(PAGE_TOKENS):
                tile = tile_fma(tile, load_f32(added + (i * padded + c * 16) * 4), scaled + (i * padded + d) * 4)
            tile_store(tile, after + at)


@inner
def _begin(op: int, step: int, thread: int, slot: int, before: int) -> None:
    """Compute a head's state at the start of a page from the previous page's slot, 0 for the first page."""
    shape = argument(op, _KDA.shape)
    padded, reach = field(shape, KdaShape.PADDED), field(shape, KdaShape.REACH)
    rows, floats = _part(slot, padded, _ROWS), 3 * padded
    if before == 0:
        clear_floats(slot, padded * padded)
        clear_floats(rows, (reach - 1) * floats)
        return
    _fold(before, slot, padded, scratch(step, thread))
    copy_floats(_part(before, padded, _ROWS) + PAGE_TOKENS * floats * 4, rows, (reach - 1) * floats)


_all_rows = walk(_begin, _rows_of_page)


def _samples() -> Iterator[Sample]:
    for heads, size, reach, start, rows in ((1, 16, 4, 0, 18), (2, 24, 3, 13, 5), (2, 16, 4, 17, 1)):
        s = Sample(rows=rows, scratch=scratch_bytes(32) + 4096)
        padded, count = -(-size // 16) * 16, 3
        table = s.array([1, 0, 3], np.int32)
        s.step({Step.SEGMENTS: s.array([0, rows, start, table], np.int64), Step.SEGMENT_COUNT: 1})
        floats, width = head_floats(padded, reach), heads * padded
        shape = [heads, padded, size, reach, 0, 0, 0, 2, 2, 4 * heads * floats, 4 * floats]
        states = 0.1 * s.random.standard_normal((count, heads, floats))
        decays = padded * (padded + 2 * PAGE_TOKENS)
        states[:, :, decays : decays + PAGE_TOKENS * padded] = np.linspace(-0.1, -2, PAGE_TOKENS * padded)
        places = (s.array([1, 0, 1, 2], np.int32), s.normal(rows, 3 * width), 12 * width, 4 * width)
        gates = (s.normal(rows, width), 4 * width, s.normal(rows, width), 4 * width, s.normal(rows, 32), 128)
        weights = (s.normal(heads, padded), s.array([-0.2] * heads), s.normal(heads, reach, 3 * padded))
        last = (s.normal(padded), s.array([1e-5, size**-0.5, 1e-5]))
        out = (s.zeros(rows * (heads * size + 16)), 4 * (heads * size + 16))
        yield s.arguments(s.array(shape, np.int64), s.array(states), *places, *gates, *weights, *last, *out)


@kernel(KimiDelta, _samples)
def kda(op: int, step: int, thread: int, threads: int) -> None:
    """Compute all rows, each segment's in order."""
    _all_rows(op, step, thread, threads)
