"""Selective scans: state-space layers of Mamba-2 with a matrix state per head, kept for the start of each page.

Each token multiplies a head's state S [K][V] by one factor and adds its own input (Dao and Gu, "Transformers are
SSMs", 2024). b and c are shared by a group of heads, and D is a scalar:

    S = exp(dt A) S + b (dt x)      y = c S + D x      dt = softplus(the row's dt + a bias)

Within a page of tokens S does not change. A page has a slot (cpu_kernels.page_states): the state at its first token,
and for each token so far b, dt x, and G, the sum of dt A from the page's first token on. A row is computed from these
alone, in a fixed order, so its result is bit-exact however its tokens were divided into steps:

    y[t] = exp(G[t]) c S + sum over i <= t of exp(G[t] - G[i]) (c b[i]) (dt[i] x[i]) + D x

b, c and x come from a short convolution that also reads previous rows, which the slot keeps too. Threads divide the
units: each is some heads of one group, with copies of the group's b and of its convolution inputs. A unit's part of a
slot is

    S [H][V / 16][K][16]    b [16][K]    dt x [H][16][V]    G [H][16]    rows [reach - 1 + 16][2 K + H V]

with the unit's H heads and K and V padded to whole vectors; a row is b, c, and the heads' x.
"""

from collections.abc import Iterator
from enum import IntEnum

import numpy as np

from cpu_kernels.activations import GATE_SILU, gate_values
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
    walk,
)
from cpu_kernels.records import Step, argument, field, scratch
from cpu_kernels.self_check import Sample
from cpu_kernels.simd.arithmetic import exp2_f32, fma, mul_f32, sub_f32
from cpu_kernels.simd.vectors import get_f32, load_f32, put_f32, splat_f32, store_f32


class ScanShape(IntEnum):
    """Indices into the record of a layer's sizes, to which PagedStates.shape points.

    HEADS: per unit. GROUP_UNITS: units that share b and c. STATE, VALUES: K and V with padding. SIZE: values of a head
    without padding. REACH: rows that the convolution reads. GROUP_PAGES: pages of a group. PLACES: place numbers that a
    group spans in a page table. SLOT_BYTES, UNIT_BYTES: stride of slots, and of units' parts, in bytes.
    """

    UNITS = PARTS
    HEADS = 1
    GROUP_UNITS = 2
    STATE = 3
    VALUES = 4
    SIZE = 5
    REACH = 6
    GROUP_PAGES = GROUP_PAGES
    PLACES = PLACES
    SLOT_BYTES = SLOT_BYTES
    UNIT_BYTES = PART_BYTES
    COUNT = 11


def unit_floats(heads: int, state: int, values: int, reach: int) -> int:
    """Floats of a unit's part of a slot. heads: per unit; state and values include padding."""
    of_heads = heads * (values * state + PAGE_TOKENS * values + PAGE_TOKENS)
    return of_heads + PAGE_TOKENS * state + (reach - 1 + PAGE_TOKENS) * (2 * state + heads * values)


def scratch_bytes(heads: int, state: int, values: int) -> int:
    """Bytes of scratch memory that a thread needs."""
    rows = PAGE_TOKENS * (2 * state + heads * values + state + values)
    return 4 * max(rows + PAGE_TOKENS * PAGE_TOKENS + 16 + 2 * values, 16 + PAGE_TOKENS * state)


@inner
def _parts(slot: int, shape: int) -> tuple[int, int, int, int]:
    """Addresses of b, dt x, G and rows in a unit's part of a slot, which begins with S."""
    heads, state, values = field(shape, ScanShape.HEADS), field(shape, ScanShape.STATE), field(shape, ScanShape.VALUES)
    keys = slot + 4 * heads * state * values
    added = keys + 4 * PAGE_TOKENS * state
    faded = added + 4 * heads * PAGE_TOKENS * values
    return keys, added, faded, faded + 4 * heads * PAGE_TOKENS


class SelectiveScan(PagedStates):
    """Arguments of selective_scan."""

    rows: int  # inputs of the convolution: each group's b and c, then each head's x
    stride: int  # bytes from row to row of rows, gates and dt
    gates: int  # of the output [head][V]
    dt: int  # before its bias, [head]
    constants: int  # for each head four floats: the bias of dt, A in base 2, D, and padding
    convolution: int  # weights in the layout of rows, a row for each input row, the oldest first, then a row of biases
    convolution_stride: int  # bytes from row to row of these weights
    out: int  # rows [head][size]
    out_stride: int  # bytes from row to row


_SCAN = indices_of(SelectiveScan)


@inner
def _begin(op: int, step: int, thread: int, slot: int, before: int) -> None:
    """Compute a unit's state at the start of a page from the previous page's slot, 0 for the first page."""
    shape, memory = argument(op, _SCAN.shape), scratch(step, thread)
    heads, state, values = field(shape, ScanShape.HEADS), field(shape, ScanShape.STATE), field(shape, ScanShape.VALUES)
    floats = 2 * state + heads * values
    kept = (field(shape, ScanShape.REACH) - 1) * floats
    rows = _parts(slot, shape)[3]
    if before == 0:
        clear_floats(slot, heads * state * values)
        clear_floats(rows, kept)
        return
    keys, added, faded, rows_before = _parts(before, shape)
    for h in range(heads):
        at, tokens = h * state * values * 4, h * PAGE_TOKENS * 4
        fold_page(before + at, slot + at, keys, added + tokens * values, faded + tokens, state, values, memory)
    copy_floats(rows_before + PAGE_TOKENS * floats * 4, rows, kept)


_through_one, _through_four, _through_many = through_state(1), through_state(4), through_state(WIDE)


@inner
def _through(columns: int, n: int, states: int, state: int, values: int, out: int) -> None:
    """Multiply the first n of 16 columns by a head's state."""
    if n == 1:
        _through_one(columns, states, state, values, PAGE_TOKENS, out)
    elif n <= 4:
        _through_four(columns, states, state, values, PAGE_TOKENS, out)
    else:
        for c in range(0, n, WIDE):
            _through_many(columns + c * 4, states, state, values, PAGE_TOKENS, out + c * 64)


@inner
def _convolve_rows(op: int, shape: int, unit: int, rows: int, t0: int, row0: int, n: int, out: int) -> None:
    """Copy the rows of the step into the slot, and convolve them: b, c and x of each."""
    heads, state, values = field(shape, ScanShape.HEADS), field(shape, ScanShape.STATE), field(shape, ScanShape.VALUES)
    reach = field(shape, ScanShape.REACH)
    floats, of_group = 2 * state + heads * values, 2 * state
    group = unit // field(shape, ScanShape.GROUP_UNITS) * of_group * 4
    own = (field(shape, ScanShape.UNITS) // field(shape, ScanShape.GROUP_UNITS) * of_group + unit * heads * values) * 4
    stride = argument(op, _SCAN.stride)
    for i in range(n):
        source = argument(op, _SCAN.rows) + (row0 + i) * stride
        target = rows + (reach - 1 + t0 + i) * floats * 4
        copy_floats(source + group, target, of_group)
        copy_floats(source + own, target + of_group * 4, heads * values)
    first = rows + t0 * floats * 4
    weights, apart = argument(op, _SCAN.convolution), argument(op, _SCAN.convolution_stride)
    bias = weights + reach * apart
    convolve(first, n, reach, floats, of_group, (weights + group, bias + group, apart), out, floats)
    first, out = first + of_group * 4, out + of_group * 4
    convolve(first, n, reach, floats, heads * values, (weights + own, bias + own, apart), out, floats)


@inner
def _row(
    t: int, faded: int, scores: int, added: int, seen: int, skip: np.float32, x: int, values: int, out: int
) -> None:
    """y of row t of a page. seen: c S, [V / 16] vectors with a stride of 16. out: scratch for 16 floats, then y [V]."""
    total = splat_f32(get_f32(faded + t * 4))
    store_f32(out, mul_f32(exp2_f32(sub_f32(total, load_f32(faded))), load_f32(scores)))
    whole = exp2_f32(total)
    for c in range(values // 16):
        y = mul_f32(whole, load_f32(seen + c * PAGE_TOKENS * 64))
        for j in range(t + 1):
            y = fma(splat_f32(get_f32(out + j * 4)), load_f32(added + (j * values + c * 16) * 4), y)
        store_f32(out + 64 + c * 64, fma(splat_f32(skip), load_f32(x + c * 64), y))


@inner
def _give(op: int, shape: int, row: int, head: int, y: int, memory: int) -> None:
    """Gate a head's output and write it at the head's index."""
    values, size = field(shape, ScanShape.VALUES), field(shape, ScanShape.SIZE)
    gates = argument(op, _SCAN.gates) + row * argument(op, _SCAN.stride) + head * values * 4
    gate_values(GATE_SILU, gates, y, memory, values)
    target = argument(op, _SCAN.out) + row * argument(op, _SCAN.out_stride) + head * size * 4
    whole = size // 16 * 16
    copy_floats(memory, target, whole)
    for d in range(whole, size):
        put_f32(target + d * 4, get_f32(memory + d * 4))


@inner
def _rows_of_page(op: int, step: int, thread: int, unit: int, slot: int, t0: int, row0: int, n: int) -> None:
    """Compute rows row0..row0+n-1 of the step, which are rows t0.. of a page, for one unit."""
    shape, memory = argument(op, _SCAN.shape), scratch(step, thread)
    heads, state, values = field(shape, ScanShape.HEADS), field(shape, ScanShape.STATE), field(shape, ScanShape.VALUES)
    floats = 2 * state + heads * values
    keys, added, faded, rows = _parts(slot, shape)
    columns = memory + PAGE_TOKENS * floats * 4
    seen = columns + PAGE_TOKENS * state * 4
    scores = seen + PAGE_TOKENS * values * 4
    out = scores + PAGE_TOKENS * PAGE_TOKENS * 4
    if n == 1:
        ask(slot, 2048)
        ask(keys, t0 * state)
        for h in range(heads):
            ask(added + h * PAGE_TOKENS * values * 4, t0 * values)
    _convolve_rows(op, shape, unit, rows, t0, row0, n, memory)
    for i in range(n):
        b, c = memory + i * floats * 4, memory + (i * floats + state) * 4
        copy_floats(b, keys + (t0 + i) * state * 4, state)
        for d in range(state):
            put_f32(columns + (d * PAGE_TOKENS + i) * 4, get_f32(c + d * 4))
        for j in range(t0 + i + 1):
            put_f32(scores + (i * PAGE_TOKENS + j) * 4, dot_product(c, keys + j * state * 4, state))
    for h in range(heads):
        head = unit * heads + h
        _through(columns, n, slot + h * state * values * 4, state, values, seen)
        constants = argument(op, _SCAN.constants) + head * 16
        of_head, sums = added + h * PAGE_TOKENS * values * 4, faded + h * PAGE_TOKENS * 4
        for i in range(n):
            t, x = t0 + i, memory + (i * floats + 2 * state + h * values) * 4
            dt = softplus(
                get_f32(argument(op, _SCAN.dt) + (row0 + i) * argument(op, _SCAN.stride) + head * 4)
                + get_f32(constants)
            )
            before = np.float32(0.0)
            if t > 0:
                before = get_f32(sums + (t - 1) * 4)
            put_f32(sums + t * 4, np.float32(before + dt * get_f32(constants + 4)))
            for d in range(0, values, 16):
                store_f32(of_head + (t * values + d) * 4, mul_f32(splat_f32(dt), load_f32(x + d * 4)))
            skip = get_f32(constants + 8)
            _row(t, sums, scores + i * PAGE_TOKENS * 4, of_head, seen + i * 64, skip, x, values, out)
            _give(op, shape, row0 + i, head, out + 64, out + 64 + values * 4)


_all_rows = walk(_begin, _rows_of_page)


def _samples() -> Iterator[Sample]:
    for size, state_size, reach, start, rows in ((16, 16, 4, 0, 18), (24, 32, 3, 13, 7), (16, 24, 4, 17, 1)):
        s = Sample(rows=rows, scratch=scratch_bytes(2, 32, 32) + 4096)
        state, values = -(-state_size // 16) * 16, -(-size // 16) * 16
        units, heads, group_units, slots = 4, 2, 2, 3
        table = s.array([1, 0, 3], np.int32)
        s.step({Step.SEGMENTS: s.array([0, rows, start, table], np.int64), Step.SEGMENT_COUNT: 1})
        floats, convolved = unit_floats(heads, state, values, reach), 2 * 2 * state + units * heads * values
        shape = [units, heads, group_units, state, values, size, reach, 2, 2, 4 * units * floats, 4 * floats]
        states = s.array(0.1 * s.random.standard_normal((slots, units, floats)))
        gates, out = units * heads * values, units * heads * size + 16
        width = convolved + gates + 16
        x = s.normal(rows, width)
        places = (s.array([1, 0, 1, 2], np.int32), x, 4 * width, x + 4 * convolved, x + 4 * (convolved + gates))
        constants = s.array([[0.1, -0.2, 0.7, 0.0]] * (units * heads))
        weights = (s.normal(reach + 1, convolved), 4 * convolved)
        yield s.arguments(s.array(shape, np.int64), states, *places, constants, *weights, s.zeros(rows * out), 4 * out)


@kernel(SelectiveScan, _samples)
def selective_scan(op: int, step: int, thread: int, threads: int) -> None:
    """Compute all rows, each segment's in order."""
    _all_rows(op, step, thread, threads)
