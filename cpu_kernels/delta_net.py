"""Gated delta networks: linear attention with a matrix state per head, kept for the start of each page of tokens.

A head's state S [D][D] maps keys to values. A token first decays it and then corrects the value that its key maps to
(Yang et al., "Gated Delta Networks", 2024):

    S = exp(g) S      S = S + k beta (v - k S)      o = q S

Within a page of tokens S does not change. A page has a slot: the state at its first token, and for each token so far
its key k, its correction u and G, the sum of g from the page's first token on. Row t is computed from these alone:

    u[t] = beta (v - exp(G[t]) k S - sum over i < t of exp(G[t] - G[i]) (k k[i]) u[i])
    o[t] = exp(G[t]) q S + sum over i <= t of exp(G[t] - G[i]) (q k[i]) u[i]

and the first row of the next page folds the full page into that page's state. Each sum has a fixed order, whichever
rows a step computes. So a row's result is bit-exact however its tokens were divided into steps, and a slot serves every
row of its page.

Queries, keys and values come from a short convolution that also reads the K - 1 previous rows, which the slot keeps
too. Threads divide the key heads, each with its R value heads and its part of a slot:

    S [R][D / 16][D][16]    k [16][D]    u [R][16][D]    G [R][16]    rows [K - 1 + 16][(2 + R) D]

where D is a head's size, padded to whole vectors, and rows are the inputs of the convolution, starting K - 1 rows
before the page: a row is a query, a key and R values.
"""

import math
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np

from cpu_kernels.activations import GATE_SILU, gate_values, norm_row
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
    ask,
    clear_floats,
    convolve,
    copy_floats,
    dot_product,
    fold_page,
    softplus,
    through_state,
    unit_vector,
    walk,
)
from cpu_kernels.records import Step, argument, field, scratch
from cpu_kernels.self_check import Sample
from cpu_kernels.simd.arithmetic import exp2_f32, fma, mul_f32, sub_f32
from cpu_kernels.simd.vectors import get_f32, load_f32, put_f32, splat_f32, store_f32

_COLUMNS = 2 * PAGE_TOKENS
_ONE = np.float32(1.0)
_LOG2E = np.float32(math.log2(math.e))


class Shape(IntEnum):
    """Indices into the record of a layer's sizes, to which PagedStates.shape points.

    VALUE_HEADS: per key head. PADDED, SIZE: values of a head with and without padding. REACH: rows that the convolution
    reads. ACROSS, BETWEEN: value head r of key head h is number h * ACROSS + r * BETWEEN in the file. GROUP_PAGES:
    pages of a group. PLACES: place numbers that a group spans in a page table. SLOT_BYTES, HEAD_BYTES: stride of slots,
    and of key heads' parts, in bytes.
    """

    KEY_HEADS = PARTS
    VALUE_HEADS = 1
    PADDED = 2
    SIZE = 3
    REACH = 4
    ACROSS = 5
    BETWEEN = 6
    GROUP_PAGES = GROUP_PAGES
    PLACES = PLACES
    SLOT_BYTES = SLOT_BYTES
    HEAD_BYTES = PART_BYTES
    COUNT = 11


def head_floats(value_heads: int, padded: int, reach: int) -> int:
    """Floats of a key head's part of a slot. value_heads: per key head."""
    of_values = value_heads * (padded * padded + PAGE_TOKENS * padded + PAGE_TOKENS)
    return of_values + PAGE_TOKENS * padded + (reach - 1 + PAGE_TOKENS) * (2 + value_heads) * padded


def scratch_bytes(value_heads: int, padded: int) -> int:
    """Bytes of scratch memory that a thread needs."""
    rows = (3 + value_heads) * PAGE_TOKENS * padded + 2 * padded * _COLUMNS
    return 4 * (rows + 2 * PAGE_TOKENS * PAGE_TOKENS + 3 * PAGE_TOKENS + 2 * padded)


@inner
def _part(slot: int, heads: int, padded: int, which: int) -> int:
    """Address of region `which` of a key head's part of a slot: 0 S, 1 k, 2 u, 3 G, 4 rows."""
    square, tokens = 4 * heads * padded * padded, 4 * PAGE_TOKENS * padded
    if which == 0:
        return slot
    if which == 1:
        return slot + square
    if which == 2:
        return slot + square + tokens
    if which == 3:
        return slot + square + tokens + heads * tokens
    return slot + square + tokens + heads * tokens + heads * PAGE_TOKENS * 4


_through_two, _through_many = through_state(2), through_state(WIDE)


class DeltaNet(PagedStates):
    """Arguments of delta_net."""

    rows: int  # inputs of the convolution [key head][query, key, values]
    gates: int  # of the output [key head][value head]
    gates_stride: int  # bytes from row to row
    beta: int  # before its activation function, [key head][value head]
    alpha: int  # before its activation function, [key head][value head]
    beta_stride: int  # bytes from row to row of beta and of alpha
    constants: int  # for each head the bias of alpha and the factor of its softplus, in base 2
    convolution: int  # weights [K][row], the oldest row first
    norm: int  # weight of the norm
    factors: int  # floats: epsilon of keys, factor of queries, epsilon of the norm
    out: int  # rows in the file's order of heads
    out_stride: int  # bytes from row to row
    rows_stride: int  # bytes from row to row


_NET = indices_of(DeltaNet)


@inner
def _gates(op: int, row: int, head: int, faded: int, t: int, memory: int) -> np.float32:
    """Write G[t], the sum of g up to row t in base 2, and return the row's beta. head: index of the value head."""
    constants = argument(op, _NET.constants) + head * 8
    alpha = get_f32(argument(op, _NET.alpha) + row * argument(op, _NET.beta_stride) + head * 4) + get_f32(constants)
    grown = softplus(alpha)
    before = np.float32(0.0)
    if t > 0:
        before = get_f32(faded + (t - 1) * 4)
    put_f32(faded + t * 4, np.float32(before + get_f32(constants + 4) * grown))
    beta = get_f32(argument(op, _NET.beta) + row * argument(op, _NET.beta_stride) + head * 4)
    return np.float32(_ONE / (_ONE + np.float32(math.exp(-beta))))


@inner
def _row(t: int, i: int, count: int, faded: int, beta: np.float32, padded: int, memory: Any, corrections: int) -> None:
    """Compute correction u[t] and the output of a row, the i-th of the step's `count` rows in its page.

    memory: addresses of scores of keys and of queries [16][16] each, of values, of keys and queries times the state, of
    the output, and of scratch for 48 floats.
    """
    key_scores, query_scores, value, through, out, factors = memory
    total = splat_f32(get_f32(faded + t * 4))
    decay = exp2_f32(sub_f32(total, load_f32(faded)))
    whole = exp2_f32(total)
    store_f32(factors, mul_f32(decay, load_f32(key_scores + i * 64)))
    store_f32(factors + 64, mul_f32(decay, load_f32(query_scores + i * 64)))
    for v in range(padded // 16):
        known = mul_f32(whole, load_f32(through + (v * _COLUMNS + i) * 64))
        asked = mul_f32(whole, load_f32(through + (v * _COLUMNS + count + i) * 64))
        for j in range(t):
            u = load_f32(corrections + (j * padded + v * 16) * 4)
            known = fma(splat_f32(get_f32(factors + j * 4)), u, known)
            asked = fma(splat_f32(get_f32(factors + 64 + j * 4)), u, asked)
        u = mul_f32(splat_f32(beta), sub_f32(load_f32(value + v * 64), known))
        store_f32(corrections + (t * padded + v * 16) * 4, u)
        store_f32(out + v * 64, fma(splat_f32(get_f32(factors + 64 + t * 4)), u, asked))


@inner
def _give(op: int, shape: int, row: int, head: int, number: int, out: int, memory: int) -> None:
    """Normalise a head's output, gate it, and write it at the head's index in the file, `number`."""
    padded, size = field(shape, Shape.PADDED), field(shape, Shape.SIZE)
    norm_row(out, argument(op, _NET.norm), size, padded, get_f32(argument(op, _NET.factors) + 8), memory)
    gate_values(
        GATE_SILU,
        argument(op, _NET.gates) + row * argument(op, _NET.gates_stride) + head * padded * 4,
        memory,
        memory,
        padded,
    )
    target = argument(op, _NET.out) + row * argument(op, _NET.out_stride) + number * size * 4
    for d in range(0, size // 16 * 16, 16):
        store_f32(target + d * 4, load_f32(memory + d * 4))
    for d in range(size // 16 * 16, size):
        put_f32(target + d * 4, get_f32(memory + d * 4))


@inner
def _scores(keys: int, t: int, i: int, padded: int, query: int, key_scores: int, query_scores: int) -> None:
    """Scores of row i's key, the t-th of a page, and of its query with the keys up to there."""
    key = keys + t * padded * 4
    for j in range(t + 1):
        before = keys + j * padded * 4
        put_f32(key_scores + (i * PAGE_TOKENS + j) * 4, dot_product(key, before, padded))
        put_f32(query_scores + (i * PAGE_TOKENS + j) * 4, dot_product(query, before, padded))


@inner
def _rows_of_page(op: int, step: int, thread: int, head: int, slot: int, t0: int, row0: int, n: int) -> None:
    """Compute rows row0..row0+n-1 of the step, which are rows t0.. of a page, for one key head."""
    shape = argument(op, _NET.shape)
    heads, padded, reach = field(shape, Shape.VALUE_HEADS), field(shape, Shape.PADDED), field(shape, Shape.REACH)
    floats = (2 + heads) * padded
    rows = _part(slot, heads, padded, 4)
    for i in range(n):
        source = argument(op, _NET.rows) + (row0 + i) * argument(op, _NET.rows_stride) + head * floats * 4
        copy_floats(source, rows + (reach - 1 + t0 + i) * floats * 4, floats)
    convolved = scratch(step, thread)
    columns = convolved + PAGE_TOKENS * floats * 4
    through = columns + padded * _COLUMNS * 4
    key_scores = through + padded * _COLUMNS * 4
    query_scores = key_scores + PAGE_TOKENS * PAGE_TOKENS * 4
    factors = query_scores + PAGE_TOKENS * PAGE_TOKENS * 4
    out = factors + 3 * PAGE_TOKENS * 4
    if n == 1:
        for r in range(heads):
            ask(_part(slot, heads, padded, 2) + r * PAGE_TOKENS * padded * 4, t0 * padded)
        ask(_part(slot, heads, padded, 1), t0 * padded)
        ask(slot, 2048)
    weights = (argument(op, _NET.convolution) + head * floats * 4, 0, field(shape, Shape.KEY_HEADS) * floats * 4)
    convolve(rows + t0 * floats * 4, n, reach, floats, floats, weights, convolved, floats)
    keys = _part(slot, heads, padded, 1)
    epsilon, scale = get_f32(argument(op, _NET.factors)), get_f32(argument(op, _NET.factors) + 4)
    for i in range(n):
        query = convolved + i * floats * 4
        key = keys + (t0 + i) * padded * 4
        unit_vector(query, padded, epsilon, scale, query)
        unit_vector(query + padded * 4, padded, epsilon, _ONE, key)
        for d in range(padded):
            put_f32(columns + (d * _COLUMNS + i) * 4, get_f32(key + d * 4))
            put_f32(columns + (d * _COLUMNS + n + i) * 4, get_f32(query + d * 4))
        _scores(keys, t0 + i, i, padded, query, key_scores, query_scores)
    for r in range(heads):
        state = _part(slot, heads, padded, 0) + r * padded * padded * 4
        if n == 1:
            _through_two(columns, state, padded, padded, _COLUMNS, through)
        else:
            for c in range(0, 2 * n, WIDE):
                _through_many(columns + c * 4, state, padded, padded, _COLUMNS, through + c * 64)
        faded = _part(slot, heads, padded, 3) + r * PAGE_TOKENS * 4
        corrections = _part(slot, heads, padded, 2) + r * PAGE_TOKENS * padded * 4
        for i in range(n):
            beta = _gates(op, row0 + i, head * heads + r, faded, t0 + i, factors)
            value = convolved + (i * floats + (2 + r) * padded) * 4
            memory = (key_scores, query_scores, value, through, out, factors)
            _row(t0 + i, i, n, faded, beta, padded, memory, corrections)
            number = head * field(shape, Shape.ACROSS) + r * field(shape, Shape.BETWEEN)
            _give(op, shape, row0 + i, head * heads + r, number, out, out + padded * 4)


@inner
def _begin(op: int, step: int, thread: int, slot: int, before: int) -> None:
    """Compute a key head's state at the start of a page from the previous page's slot, 0 for the first page."""
    shape = argument(op, _NET.shape)
    heads, padded, reach = field(shape, Shape.VALUE_HEADS), field(shape, Shape.PADDED), field(shape, Shape.REACH)
    floats = (2 + heads) * padded
    if before == 0:
        clear_floats(slot, heads * padded * padded)
        clear_floats(_part(slot, heads, padded, 4), (reach - 1) * floats)
        return
    for r in range(heads):
        state, tokens = r * padded * padded * 4, r * PAGE_TOKENS * 4
        added, faded = _part(before, heads, padded, 2) + tokens * padded, _part(before, heads, padded, 3) + tokens
        keys, memory = _part(before, heads, padded, 1), scratch(step, thread)
        fold_page(before + state, slot + state, keys, added, faded, padded, padded, memory)
    rows = _part(before, heads, padded, 4) + PAGE_TOKENS * floats * 4
    copy_floats(rows, _part(slot, heads, padded, 4), (reach - 1) * floats)


_all_rows = walk(_begin, _rows_of_page)


def _samples() -> Iterator[Sample]:
    for heads, size, reach, start, rows in ((1, 16, 4, 0, 18), (2, 24, 3, 13, 5), (2, 16, 4, 17, 1)):
        s = Sample(rows=rows, scratch=scratch_bytes(heads, 32) + 4096)
        padded, groups, count = -(-size // 16) * 16, 2, 3
        table = s.array([1, 0, 3], np.int32)
        s.step({Step.SEGMENTS: s.array([0, rows, start, table], np.int64), Step.SEGMENT_COUNT: 1})
        floats = head_floats(heads, padded, reach)
        shape = [groups, heads, padded, size, reach, 1, groups, 2, 2, 4 * groups * floats, 4 * floats]
        width = (2 + heads) * padded * groups
        states = s.array(0.1 * s.random.standard_normal((count, groups, floats)))
        z_width, values = heads * groups * padded, heads * groups
        places = (s.array([1, 0, 1, 2], np.int32), s.normal(rows, width), s.normal(rows, z_width), 4 * z_width)
        gates = (s.normal(rows, 32), s.normal(rows, 32), 128, s.array([[0.1, -0.2]] * values))
        weights = (s.normal(reach, width), s.normal(padded), s.array([1e-5, size**-0.5, 1e-5]))
        out = (s.zeros(rows * (values * size + 16)), 4 * (values * size + 16), 4 * width)
        yield s.arguments(s.array(shape, np.int64), states, *places, *gates, *weights, *out)


@kernel(DeltaNet, _samples)
def delta_net(op: int, step: int, thread: int, threads: int) -> None:
    """Compute all rows, each segment's in order."""
    _all_rows(op, step, thread, threads)
