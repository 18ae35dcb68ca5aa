"""Mixtures of experts: choosing experts for each row, gathering rows by expert, and summing the experts' outputs.

A slot is a (row, expert) pair. Slots are ordered by expert, then by row, and each expert's slots start at the first
lane of a tile, so that each tile is multiplied with one expert's weights.
"""

import math
from collections.abc import Iterator
from itertools import product

import numpy as np

from cpu_kernels.activations import ALL_FORMS, norm_row, pack_row
from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.declarations import inner
from cpu_kernels.kernel import kernel
from cpu_kernels.records import Stage, Step, argument, field, scratch, stage_rows, stage_width
from cpu_kernels.self_check import Sample
from cpu_kernels.sharing import first_share, next_share
from cpu_kernels.simd.arithmetic import fma, mul_f32
from cpu_kernels.simd.vectors import (
    get_f32,
    get_i32,
    load_f32,
    put_f32,
    put_i32,
    put_i64,
    splat_f32,
    store_f32,
    zero_f32,
)

_LOWEST = np.float32(-3.4e38)
# Of the shares of the total that a row's experts have, as in llama.cpp (build_moe_ffn); the smallest half's exponent.
_LEAST_SUM = np.float32(6.103515625e-5)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@inner
def _weigh_all(scores: int, experts: int, sigmoid: int) -> np.float32:
    """Turn scores into weights, by a softmax over all experts or a sigmoid of each. Returns their sum."""
    largest = _LOWEST
    for e in range(experts):
        largest = max(largest, get_f32(scores + 4 * e))
    total = _ZERO
    for e in range(experts):
        score = get_f32(scores + 4 * e)
        weight = np.float32(math.exp(score - largest))
        if sigmoid != 0:
            weight = _ONE / (_ONE + np.float32(math.exp(-score)))
        put_f32(scores + 4 * e, weight)
        total += weight
    return total


@inner
def _preference(weights: int, total: np.float32, biases: int, expert: int) -> np.float32:
    """The value by which experts are chosen: the weight, or with biases its share of the total plus the bias."""
    weight = get_f32(weights + 4 * expert)
    return weight / total + get_f32(biases + 4 * expert) if biases != 0 else weight


@inner
def _group_score(weights: int, first: int, size: int, total: np.float32, biases: int) -> np.float32:
    """The value by which groups of experts are chosen: the sum of a group's two largest preferences."""
    best, second = _LOWEST, _LOWEST
    for e in range(first, first + size):
        value = _preference(weights, total, biases, e)
        if value > best:
            best, second = value, best
        elif value > second:
            second = value
    return best + second


@inner
def _leave_groups_out(weights: int, size: int, groups: tuple[int, int], total: np.float32, biases: int) -> None:
    """Set the weights of all groups but the best ones to _LOWEST, so that none of their experts is chosen.

    Among equals, the first groups are kept. groups: number of groups of `size` experts, and how many are used.
    """
    count, used = groups
    for _ in range(count - used):
        worst, least = -1, _ZERO
        for g in range(count):
            if get_f32(weights + 4 * g * size) == _LOWEST:
                continue
            score = _group_score(weights, g * size, size, total, biases)
            if worst < 0 or score <= least:
                worst, least = g, score
        for e in range(worst * size, (worst + 1) * size):
            put_f32(weights + 4 * e, _LOWEST)


@inner
def _choose(
    scores: int,
    experts: int,
    used: int,
    chosen: int,
    weights: int,
    how: tuple[int, int, int],
    groups: tuple[int, int],
    scale: np.float32,
    scales: int,
) -> None:
    """Write the `used` experts with the highest preference (the lower index among equals) and their weights.

    how: (normalise, sigmoid, address of biases or 0); normalise divides by the sum of the chosen weights. groups:
    number of groups, and how many are used. scales: address of a factor per expert, in addition to `scale`, or 0.
    Scores are overwritten.
    """
    normalise, sigmoid, biases = how
    total = _weigh_all(scores, experts, sigmoid)
    divisor = _ONE if sigmoid != 0 else total
    if groups[0] > 1:
        _leave_groups_out(scores, experts // groups[0], groups, divisor, biases)
    kept = _ZERO
    for i in range(used):
        best = 0
        for e in range(experts):
            if _preference(scores, divisor, biases, e) > _preference(scores, divisor, biases, best):
                best = e
        weight = get_f32(scores + 4 * best)
        put_i32(chosen + 4 * i, best)
        put_f32(weights + 4 * i, weight)
        kept += weight
        put_f32(scores + 4 * best, _LOWEST)
    if normalise != 0:
        divisor = max(kept, _LEAST_SUM * divisor)
    # If any score is NaN, so is the total, and this makes all weights NaN.
    divisor += total - total
    for i in range(used):
        factor = scale
        if scales != 0:
            factor = scale * get_f32(scales + 4 * get_i32(chosen + 4 * i))
        put_f32(weights + 4 * i, factor * get_f32(weights + 4 * i) / divisor)


def _route_samples() -> Iterator[Sample]:
    for normalise, sigmoid, biased, groups in product((0, 1), (0, 1), (0, 1), (1, 4)):
        s = Sample(rows=4, width=2)
        count = 8 if groups > 1 else 7
        scores, scale = s.array(s.random.integers(-3, 3, (4, 32))), s.array([1.5])
        segments, slots = s.zeros(3 * count + 1, np.int64), s.zeros(4 * 3 + count * 2, np.int32)
        choices = s.zeros(12, np.int32), s.zeros(12), s.zeros(12, np.int32)
        biases, scales = (s.normal(count), s.normal(count)) if biased else (0, 0)
        how = normalise, scale, segments, slots, *choices, sigmoid, biases, scales
        yield s.arguments(scores, 128, count, 3, *how, groups, (groups + 1) // 2)


class Route(Arguments):
    """Arguments of route."""

    scores: int  # rows of floats
    stride: int  # bytes from row to row
    count: int  # experts
    used: int  # experts that a row uses
    normalise: int  # 1 to divide the weights by their sum
    scale: int  # address of a float that multiplies the weights
    segments: int  # out, as cpu_kernels.matmul reads them
    row_of_slot: int  # out, int32, -1 for none
    slot_of_choice: int  # out, int32 [row][used]
    weight_of_choice: int  # out, float [row][used]
    expert_of_choice: int  # scratch memory, int32 [row][used]
    sigmoid: int  # 1 for a sigmoid of each score in place of a softmax over all
    biases: int  # floats added to scores for choosing, or 0
    factors: int  # a float per expert, or 0
    groups: int  # equal groups of experts
    groups_used: int  # groups from which a row's experts are chosen


_ROUTE = indices_of(Route)


@kernel(Route, _route_samples)
def route(op: int, step: int, thread: int, threads: int) -> None:
    """Choose experts and assign slots, on one thread; sets the step's number of expert rows."""
    if thread != 0:
        return
    rows = field(step, Step.ROWS)
    width = field(step, Step.WIDTH + Stage.EXPERT)
    experts, used = argument(op, _ROUTE.count), argument(op, _ROUTE.used)
    for row in range(rows):
        _choose(
            argument(op, _ROUTE.scores) + row * argument(op, _ROUTE.stride),
            experts,
            used,
            argument(op, _ROUTE.expert_of_choice) + row * used * 4,
            argument(op, _ROUTE.weight_of_choice) + row * used * 4,
            (argument(op, _ROUTE.normalise), argument(op, _ROUTE.sigmoid), argument(op, _ROUTE.biases)),
            (argument(op, _ROUTE.groups), argument(op, _ROUTE.groups_used)),
            get_f32(argument(op, _ROUTE.scale)),
            argument(op, _ROUTE.factors),
        )
    slot = 0
    segments = argument(op, _ROUTE.segments)
    count = 0
    for e in range(experts):
        first = slot
        for choice in range(rows * used):
            if get_i32(argument(op, _ROUTE.expert_of_choice) + 4 * choice) == e:
                put_i32(argument(op, _ROUTE.row_of_slot) + 4 * slot, choice // used)
                put_i32(argument(op, _ROUTE.slot_of_choice) + 4 * choice, slot)
                slot += 1
        if slot > first:
            while slot % width != 0:
                put_i32(argument(op, _ROUTE.row_of_slot) + 4 * slot, -1)
                slot += 1
            put_i64(segments + 8 * (3 * count + 1), e)
            put_i64(segments + 8 * (3 * count + 2), first // width)
            put_i64(segments + 8 * (3 * count + 3), (slot - first) // width)
            count += 1
    put_i64(segments, count)
    put_i64(step + 8 * (Step.ROWS + Stage.EXPERT), slot)


def _expert_pack_samples() -> Iterator[Sample]:
    s = Sample(rows=6, width=2)
    x, weight, epsilon, slots = s.normal(3, 256), s.normal(256), s.array([1e-5]), s.array([0, 2, 1, -1, 0, 1], np.int32)
    choices, weights = s.array([0, 4, 2, 5, 1, 1], np.int32), s.normal(6)  # the slots of each row
    for norm, of_choices in ((weight, 0), (0, weights)):
        packed = s.activations(256)
        yield s.arguments(x, 1024, norm, 256, ALL_FORMS, packed, epsilon, slots, 2, choices, of_choices)


class ExpertPack(Arguments):
    """Arguments of expert_pack."""

    x: int  # rows of floats
    stride: int  # bytes from row to row
    weight: int  # of the norm, or 0 to pack x as it is
    k: int  # values of a row
    forms: int  # Form: what to pack
    packed: int  # descriptors of packed activations
    epsilon: int  # address of a float
    row_of_slot: int  # int32, -1 for none
    used: int  # experts that a row uses
    slot_of_choice: int  # int32 [row][used]
    weight_of_choice: int  # float [row][used] that multiply the rows, or 0


_PACK = indices_of(ExpertPack)


@inner
def _weigh_row(op: int, row: int, slot: int, source: int, padded: int, out: int) -> None:
    """out = source times the weight of a row's choice of a slot. out may be source."""
    choice = row * argument(op, _PACK.used)
    while get_i32(argument(op, _PACK.slot_of_choice) + 4 * choice) != slot:
        choice += 1
    weight = splat_f32(get_f32(argument(op, _PACK.weight_of_choice) + 4 * choice))
    for i in range(0, padded * 4, 64):
        store_f32(out + i, mul_f32(load_f32(source + i), weight))


@kernel(ExpertPack, _expert_pack_samples)
def expert_pack(op: int, step: int, thread: int, threads: int) -> None:
    """Normalise the row of each slot, multiply it by its weight, if there are weights, and pack it."""
    slots, width, k = stage_rows(op, step), stage_width(op, step), argument(op, _PACK.k)
    padded = (k + 15) // 16 * 16
    out = scratch(step, thread)
    first, last = first_share(op, step, slots, thread, threads)
    while first >= 0:
        for slot in range(first, last):
            row = get_i32(argument(op, _PACK.row_of_slot) + 4 * slot)
            if row >= 0:
                source = argument(op, _PACK.x) + row * argument(op, _PACK.stride)
                if argument(op, _PACK.weight) != 0:
                    norm_row(source, argument(op, _PACK.weight), k, padded, get_f32(argument(op, _PACK.epsilon)), out)
                    source = out
                if argument(op, _PACK.weight_of_choice) != 0:
                    _weigh_row(op, row, slot, source, padded, out)
                    source = out
                pack_row(source, 0, k, k, argument(op, _PACK.forms), width, slot, argument(op, _PACK.packed))
        first, last = next_share(op, step, slots, thread, threads)


def _combine_samples() -> Iterator[Sample]:
    s = Sample(rows=3)
    slots, weights = s.array(s.random.integers(0, 8, 6), np.int32), s.normal(6)
    for fresh in (0, 1):
        yield s.arguments(s.normal(3, 48), 192, s.normal(8, 48), 192, 48, 2, slots, weights, fresh)


class Combine(Arguments):
    """Arguments of combine."""

    x: int  # rows of floats
    x_stride: int  # bytes from row to row
    y: int  # rows of floats, one per slot
    y_stride: int  # bytes from row to row
    k: int  # values of a row
    used: int  # experts that a row uses
    slot_of_choice: int  # int32 [row][used]
    weight_of_choice: int  # float [row][used]
    overwrites: int  # 1 to overwrite x instead of adding to it


_COMBINE = indices_of(Combine)


@kernel(Combine, _combine_samples)
def combine(op: int, step: int, thread: int, threads: int) -> None:
    """x[row] += sum over the row's choices of weight * y[slot], or x[row] = this sum."""
    rows, used = field(step, Step.ROWS), argument(op, _COMBINE.used)
    vectors = (argument(op, _COMBINE.k) + 15) // 16
    first, last = first_share(op, step, vectors, thread, threads)
    while first >= 0:
        for row in range(rows):
            x = argument(op, _COMBINE.x) + row * argument(op, _COMBINE.x_stride)
            for v in range(first, last):
                total = zero_f32()
                if argument(op, _COMBINE.overwrites) == 0:
                    total = load_f32(x + v * 64)
                for i in range(used):
                    choice = 4 * (row * used + i)
                    y = argument(op, _COMBINE.y) + get_i32(argument(op, _COMBINE.slot_of_choice) + choice) * argument(
                        op, _COMBINE.y_stride
                    )
                    total = fma(
                        load_f32(y + v * 64),
                        splat_f32(get_f32(argument(op, _COMBINE.weight_of_choice) + choice)),
                        total,
                    )
                store_f32(x + v * 64, total)
        first, last = next_share(op, step, vectors, thread, threads)
