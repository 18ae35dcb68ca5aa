"""Chooses a token from logits: the filters that narrow the candidates, temperature, and the draw, in one call.

Candidates are tokens in ascending order: an array of their logits, all finite, and one of their ids (none as long as
all tokens are candidates). A filter writes those that it keeps one after the other. Probabilities are double precision.

Most filters keep the first candidates of an order, until they have a share of the mass. Sorting a vocabulary would take
longer than a small model's whole step, so only the last of these candidates is searched (`_border`): a sample of the
candidates shows about where it is, one pass over all sums up what comes before and lists what may be it, and bisection
leaves few enough to sort. Any sample gives the same result. What is kept is then an interval of logits (`_interval`).

Only the candidates that are listed have weights in double precision (`_near`). The mass of those that are certainly
kept, and of those that are certainly not, is summed up in single precision, and its error is bounded. Where the error
could change what is kept, the filter starts again with all candidates, in double precision. The draw and XTC sum up
weights in the same way.
"""

import math
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np

from cpu_kernels.arguments import Arguments, indices_of
from cpu_kernels.declarations import inner
from cpu_kernels.isa import POLICY
from cpu_kernels.kernel import kernel
from cpu_kernels.records import argument, scratch
from cpu_kernels.self_check import Sample
from cpu_kernels.simd.arithmetic import (
    ROUNDER,
    add_f32,
    add_i32,
    largest_f32,
    largest_magnitude,
    magnitude,
    max_f32,
    max_i32,
    mul_f32,
    neg_f32,
    or_i32,
    power_f32,
    prefetch_lines,
    sub_f32,
    sum_i32,
)
from cpu_kernels.simd.doubles import (
    above_f32,
    above_f64,
    above_i32,
    add_f64,
    and_i32,
    append_f32,
    append_i32,
    before,
    count_lanes,
    count_up,
    distance_f64,
    equal_f32,
    get_f64,
    load_f64,
    load_first,
    load_mask,
    multiply_f64,
    narrow_f64,
    nearness_f64,
    not_above_f32,
    not_above_f64,
    or_zero_f32,
    power_f64,
    put_f64,
    splat_f64,
    squares_f64,
    store_f64,
    sum_f64,
    where_f32,
    where_f64,
    widen_f64,
    without,
    zero_f64,
)
from cpu_kernels.simd.vectors import (
    get_f32,
    get_i32,
    load_f32,
    load_i32,
    put_f32,
    put_i32,
    splat_f32,
    splat_i32,
    store_f32,
    store_i32,
    zero_f32,
    zero_i32,
)

_INFINITY = np.float32(math.inf)
# Candidates whose weights are summed together: the draw searches these sums first.
_PART = 256
# Floats whose highest ones are noted: blocks with none that counts are not read again.
_BLOCK = 256
# How far ahead logits are prefetched, in bytes: from memory, reading them takes up to a quarter less. Behind a row are
# the next one's.
_AHEAD = 8192
# From this many candidates on, a sample of about _SAMPLED vectors is looked at first.
MANY = 8192
_SAMPLED = 512
# For so many first candidates at most, groups tell about where the last one is: their range is halved so often.
_MOST_FIRST, _HALVINGS = 128.0, 20
_BINS = 512
# Lists up to this long are sorted.
_SHORT = 48
# Used where entropy scaling gives temperature 0: unless logits are equal, the highest one then always wins.
_COLDEST = 1e-9
# Lower temperatures change nothing: already here, all but the highest of different float32 logits have no chance.
_LEAST_TEMPERATURE = 1e-200
# Whether appending is one instruction, faster than asking whether there is something to append.
_COMPRESSES = POLICY.vector_parts == 1
_COUNTED, _WEIGHED, _COUNTED_BY_WEIGHT = 0, 1, 2
_LOG2E = 1.0 / math.log(2.0)
# Logits this far below the highest have probability 0 in double precision.
_IMPOSSIBLE = 745.13
# Surprises that differ by less are equal.
_ROUNDING = 1e-16
# Standard deviations around a sample's guess.
_DEVIATIONS = 3.0
# Candidates are near if at most one of so many is.
_FEW = 8
# Those further away count as if they were here.
_FARTHEST = 80.0
# Relative errors of what is known of far candidates: of masses and of moments; and of sums in double precision.
_FAR_ERROR, _MOMENT_ERROR, _SUM_ERROR = 3e-7, 4.5e-7, 1e-12
# The relative error of weights in single precision, four of which are summed. Larger powers of 2 have a larger one.
_ROUGH, _LARGEST_POWER = 2.4e-7, 8000.0
# What is known of far candidates: the mass of those before all others, and of those behind; a middle, the sums of their
# mass times logit minus middle, and times its square; and the logits that bound them, see _window. There are none.
_NONE_FAR = (0.0, 0.0, 0.0, 0.0, 0.0, -math.inf, math.inf, -math.inf, math.inf)


# Instead of a number of candidates.
_UNSURE, _ELSEWHERE = -1, -2


class Rule(IntEnum):
    """Indices of doubles that say how a token is chosen; names and neutral values are llama.cpp's.

    MIN_P: the logarithm of the share, minus infinity for none. XTC: the threshold if the coin says to apply it, else a
    number above 1. MIROSTAT: the bound of the surprise in bits, 0 for none. UNIFORM: a random number in [0, 1). TOTAL:
    1 to get Choice.TOTAL.
    """

    TEMPERATURE = 0
    DYNATEMP_RANGE = 1
    DYNATEMP_EXPONENT = 2
    TOP_N_SIGMA = 3
    TOP_K = 4
    TYPICAL_P = 5
    TOP_P = 6
    MIN_P = 7
    XTC = 8
    MIN_KEEP = 9
    MIROSTAT = 10
    UNIFORM = 11
    TOTAL = 12
    SIZE = 13


class Choice(IntEnum):
    """Indices of doubles that the kernel returns.

    HIGHEST: the highest logit, NaN if any is NaN. TOKEN: -1 if none is possible. Above temperature 0 also KEPT: from
    how many candidates it was drawn; TOP and FACTOR: their weights are 2 ** ((logit - TOP) * FACTOR). TOTAL, if asked
    for: the sum of exp(logit - HIGHEST) of all candidates, before any filter, with a relative error of about 1e-7.
    """

    HIGHEST = 0
    TOKEN = 1
    KEPT = 2
    TOP = 3
    FACTOR = 4
    TOTAL = 5
    SIZE = 6


class Choose(Arguments):
    """Arguments of choose."""

    logits: int  # floats, not modified
    count: int  # of them
    allowed: int  # a byte for each token, 0 where it is not allowed; or 0
    rules: int  # doubles, see Rule
    choice: int  # doubles, see Choice


_CHOOSE = indices_of(Choose)


@inner
def _room(count: int) -> int:
    """Candidates that arrays have room for: appending a vector may write sixteen more, and short lists are copied."""
    return (count + 47 + 2 * _SHORT) // 16 * 16


@inner
def _places(memory: int, count: int) -> Any:
    """Addresses: candidates' logits, ids; those of a list; parts, bins; near candidates' logits and ids.

    A list has positions, logits, keys, weights and exact keys.
    """
    room = _room(count)
    parts = memory + 36 * room
    bins = parts + 8 * (room // _PART + 1)
    near = bins + 16 * _BINS
    listed = (memory + 8 * room, memory + 12 * room, memory + 16 * room, memory + 20 * room, memory + 28 * room)
    return memory, memory + 4 * room, listed, parts, bins, (near, near + 4 * room)


def memory_bytes(count: int) -> int:
    """Bytes of memory to choose from `count` logits, a multiple of 64."""
    return (int(_places(0, count)[-1][1]) + 4 * _room(count) + 63) // 64 * 64


def kept_places(memory: int, count: int) -> tuple[int, int]:
    """Addresses of the candidates' logits and ids (int32), unless all tokens were kept."""
    places = _places(memory, count)
    return places[0], places[1]


@inner
def _block(x: int, n: int, i: int) -> Any:
    """Sixteen of n floats from index i on, minus infinity behind the last."""
    if n - i >= 16:
        return load_f32(x + 4 * i)
    return load_first(x + 4 * i, n - i)


@inner
def _eight(at: int) -> Any:
    """The highest floats and the largest magnitudes of eight vectors; those that come later are prefetched."""
    prefetch_lines(at + _AHEAD, 8)
    a, b, c, d = load_f32(at), load_f32(at + 64), load_f32(at + 128), load_f32(at + 192)
    e, f, g, h = load_f32(at + 256), load_f32(at + 320), load_f32(at + 384), load_f32(at + 448)
    large = max_i32(max_i32(magnitude(a), magnitude(b)), max_i32(magnitude(c), magnitude(d)))
    larger = max_i32(max_i32(magnitude(e), magnitude(f)), max_i32(magnitude(g), magnitude(h)))
    high = max_f32(max_f32(max_f32(a, b), max_f32(c, d)), max_f32(max_f32(e, f), max_f32(g, h)))
    return high, max_i32(large, larger)


@inner
def _extremes(x: int, n: int, blocks: int) -> Any:
    """The highest of n floats, NaN if any is NaN, and the largest magnitude, NaN or infinite if any float is.

    For each block of floats, the highest in each of 16 columns are written to `blocks`.
    """
    bits, high = zero_i32(), splat_f32(-_INFINITY)
    whole = n // _BLOCK * _BLOCK
    for begin in range(0, whole, _BLOCK):
        block, large = _eight(x + 4 * begin)
        for i in range(begin + 128, begin + _BLOCK, 128):
            eight, larger = _eight(x + 4 * i)
            block, large = max_f32(eight, block), max_i32(larger, large)
        bits, high = max_i32(bits, large), max_f32(block, high)
        store_f32(blocks + begin // _BLOCK * 64, block)
    last = splat_f32(-_INFINITY)
    for i in range(whole, n, 16):
        values = _block(x, n, i)
        last = max_f32(values, last)
        bits = max_i32(bits, magnitude(or_zero_f32(before(n - i), values)))
    store_f32(blocks + whole // _BLOCK * 64, last)
    highest, largest = largest_f32(max_f32(last, high)), largest_magnitude(bits)
    return largest if math.isnan(largest) else highest, largest


@inner
def _rank(value: Any, memory: int) -> int:
    """An integer for a float, in the same order; neighbouring floats have neighbouring ones. Uses 4 bytes of memory."""
    put_f32(memory, np.float32(value))
    bits = get_i32(memory)
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


@inner
def _ranked(rank: int, memory: int) -> Any:
    """The float of an integer of _rank."""
    put_i32(memory, rank if rank >= 0 else 0x80000000 - rank)
    return get_f32(memory)


@inner
def _append(x: int, ids: int, n: int, i: int, mask: Any, kept: int, places: Any) -> int:
    """Append candidates of the vector at index i to the first `kept` of the memory; returns how many there are."""
    mask = and_i32(mask, before(n - i))
    some = count_lanes(mask)
    if _COMPRESSES or some > 0:
        values, others = _block(x, n, i), count_up(i) if ids == 0 else load_i32(ids + 4 * i)
        if _COMPRESSES or some < 16:
            append_f32(places[0] + 4 * kept, values, mask)
            append_i32(places[1] + 4 * kept, others, mask)
        else:
            store_f32(places[0] + 4 * kept, values)
            store_i32(places[1] + 4 * kept, others)
    return kept + some


@inner
def _keep_allowed(x: int, n: int, allowed: int, places: Any) -> int:
    """Keep the possible ones of all tokens. allowed: a byte for each, or 0. Returns how many."""
    kept, lowest = 0, splat_f32(-_INFINITY)
    for i in range(0, n, 16):
        mask = above_f32(_block(x, n, i), lowest)
        if allowed != 0:
            mask = and_i32(mask, load_mask(allowed + i, n - i))
        kept = _append(x, 0, n, i, mask, kept, places)
    return kept


@inner
def _keep_above(x: int, ids: int, n: int, bound: float, blocks: int, places: Any) -> int:
    """Keep logits that are at least a double; returns how many. blocks: of _extremes of the same logits, or 0.

    Blocks without any are not read.
    """
    least: Any = np.float32(bound)
    if float(least) < bound:
        least = _ranked(_rank(least, places[4]) + 1, places[4])
    kept, value, found, listed = 0, splat_f32(least), 0, places[5][1]
    for block in range((n + _BLOCK - 1) // _BLOCK):
        put_i32(listed + 4 * found, block)
        found += 1 if blocks == 0 else min(count_lanes(not_above_f32(value, load_f32(blocks + 64 * block))), 1)
    for j in range(found):
        begin = get_i32(listed + 4 * j) * _BLOCK
        for i in range(begin, min(begin + _BLOCK, n), 16):
            kept = _append(x, ids, n, i, not_above_f32(value, _block(x, n, i)), kept, places)
    return kept


@inner
def _keep_likely(x: int, ids: int, n: int, first: float, blocks: int, places: Any) -> int:
    """Keep the `first` highest of many logits and some more, after _extremes; returns how many.

    As many of the highest logits of 256 groups are not below the bound, so that at least as many logits are not.
    Neighbours are in different groups: those of high logits are often high, too.
    """
    groups, count = places[4], (n + _BLOCK - 1) // _BLOCK
    for i in range(16):
        group = load_f32(blocks + 64 * i)
        for block in range(i + 16, count, 16):
            group = max_f32(load_f32(blocks + 64 * block), group)
        store_f32(groups + 64 * i, group)
    above, bound = _range(groups, 256)
    for _ in range(_HALVINGS):
        middle = np.float32(0.5 * (above + bound))
        found, value = 0, splat_f32(middle)
        for i in range(0, 1024, 64):
            found += count_lanes(not_above_f32(value, load_f32(groups + i)))
        if found >= first:
            bound = float(middle)
        else:
            above = float(middle)
        if found == first:
            break
    return _keep_above(x, ids, n, bound, blocks, places)


@inner
def _keep_first(x: int, ids: int, n: int, first: int, places: Any) -> int:
    """Keep the `first` highest of a few logits; of equal ones, those at lower positions. Returns how many."""
    kept, ranks = 0, places[2][2]
    for i in range(0, n, 16):
        values, rank = _block(x, n, i), zero_i32()
        for j in range(n):
            other = splat_f32(get_f32(x + 4 * j))
            earlier = and_i32(not_above_f32(values, other), without(before(j - i + 1)))
            rank = add_i32(rank, or_i32(above_f32(other, values), earlier))
        store_i32(ranks + 4 * i, rank)
    for i in range(0, n, 16):
        kept = _append(x, ids, n, i, above_i32(load_i32(ranks + 4 * i), splat_i32(-first)), kept, places)
    return kept


@inner
def _within(values: Any, low: Any, high: Any) -> Any:
    """A mask of logits that are between two floats or equal to one of them."""
    return and_i32(not_above_f32(splat_f32(low), values), not_above_f32(values, splat_f32(high)))


@inner
def _keep_within(x: int, ids: int, n: int, kept: Any, places: Any) -> int:
    """Keep the logits in an interval of two floats at positions up to a number, and in one inside it at later ones."""
    low, high, later_low, later_high, last = kept
    count, same = 0, low == later_low and high == later_high
    for i in range(0, n, 16):
        values = _block(x, n, i)
        mask = _within(values, low, high)
        if not same:
            mask = and_i32(mask, or_i32(before(last + 1 - i), _within(values, later_low, later_high)))
        count = _append(x, ids, n, i, mask, count, places)
    return count


@inner
def _weigh(x: int, n: int, top: float, factor: float, parts: int) -> float:
    """Sum up the weights, 2 ** ((logit - top) * factor), of each part of the candidates; returns the whole sum."""
    total = 0.0
    for begin in range(0, n, _PART):
        part = zero_f64()
        for i in range(begin, min(n, begin + _PART), 16):
            part = add_f64(part, power_f64(_block(x, n, i), top, factor))
        of_part = sum_f64(part)
        put_f64(parts + begin // _PART * 8, of_part)
        total += of_part
    return total


@inner
def _scale(top: float, factor: float) -> Any:
    """How to compute weights in single precision: numbers for _rough, and what its results are to be multiplied by.

    The last, a double, is 0 if numbers are too large.
    """
    if not abs(top) * factor < _LARGEST_POWER:
        nothing = np.float32(0.0)
        return (nothing, nothing, nothing, nothing), 0.0
    shift, single = int(top * factor), np.float32(factor)
    rounder, least = np.float32(ROUNDER - shift), np.float32((shift - 125.0) / factor)
    return (single, np.float32(factor - float(single)), rounder, least), math.exp((shift - top * factor) / _LOG2E)


@inner
def _rough(values: Any, scale: Any) -> Any:
    """The weights of sixteen logits in single precision and in units of _scale. Those far too small are 2 ** -125."""
    return power_f32(max_f32(values, splat_f32(scale[3])), scale[0], scale[1], scale[2])


@inner
def _weigh_roughly(x: int, n: int, top: float, factor: float, parts: int) -> Any:
    """As _weigh, in single precision if there are many candidates.

    Returns the sum, and the bound of the relative error of the parts that any candidates have in the sums.
    """
    scale, unit = _scale(top, factor)
    if n < MANY or unit == 0.0:
        return _weigh(x, n, top, factor, parts), 0.0
    total = 0.0
    for begin in range(0, n, _PART):
        end, part = min(n, begin + _PART), zero_f64()
        whole = begin + (end - begin) // 64 * 64
        for i in range(begin, whole, 64):
            two = add_f32(_rough(load_f32(x + 4 * i), scale), _rough(load_f32(x + 4 * i + 64), scale))
            more = add_f32(_rough(load_f32(x + 4 * i + 128), scale), _rough(load_f32(x + 4 * i + 192), scale))
            part = add_f64(part, widen_f64(add_f32(two, more)))
        for i in range(whole, end, 16):
            part = add_f64(part, widen_f64(_rough(_block(x, n, i), scale)))
        of_part = unit * sum_f64(part)
        put_f64(parts + begin // _PART * 8, of_part)
        total += of_part
    return total, _ROUGH


@inner
def _mean_distance(x: int, n: int, top: float) -> Any:
    """The mean of top - logit by the weights at temperature 1, and their sum."""
    found, total = zero_f64(), zero_f64()
    for i in range(0, n, 16):
        values, some = _block(x, n, i), before(n - i)
        weights = where_f64(some, power_f64(values, top, _LOG2E))
        found = add_f64(found, where_f64(some, multiply_f64(distance_f64(values, top), weights)))
        total = add_f64(total, weights)
    whole = sum_f64(total)
    return sum_f64(found) / whole, whole


# How candidates are ordered and counted is a tuple: whether keys are the logits (0) or how near the distance from the
# highest logit is to a middle (1); one of the three values below; the highest logit; the middle.
# Close keys of logits are ordered by their weights, which may be equal, except where they are just counted.


@inner
def _keys(values: Any, how: Any) -> Any:
    """The keys of sixteen logits, larger for those that come first; the same for all that have no weight."""
    if how[0] == 0:
        return values if how[1] == _COUNTED else max_f32(values, splat_f32(np.float32(how[2] - _IMPOSSIBLE)))
    return narrow_f64(nearness_f64(distance_f64(values, how[2]), how[3]))


@inner
def _reached(mass: float, goal: float, beyond: int) -> bool:
    return mass > goal if beyond != 0 else mass >= goal


@inner
def _list(x: int, n: int, how: Any, upper: Any, lower: Any, listed: Any) -> int:
    """List the candidates with keys above `lower`, but not above `upper`; returns how many."""
    positions, logits = listed[0], listed[1]
    high, low, found = splat_f32(upper), splat_f32(lower), 0
    for i in range(0, n, 16):
        values = _block(x, n, i)
        some = _keys(values, how)
        mask = and_i32(and_i32(above_f32(some, low), not_above_f32(some, high)), before(n - i))
        inside = count_lanes(mask)
        if inside > 0:
            append_i32(positions + 4 * found, count_up(i), mask)
            append_f32(logits + 4 * found, values, mask)
            found += inside
    _describe(logits, found, how, (listed[2], listed[3], listed[4]))
    return found


@inner
def _describe(logits: int, count: int, how: Any, to: Any) -> None:
    """Write the keys, weights and exact keys of listed logits."""
    for j in range(0, count, 16):
        values = load_f32(logits + 4 * j)
        store_f32(to[0] + 4 * j, _keys(values, how))
        weights = power_f64(values, how[2], _LOG2E)
        store_f64(to[1] + 8 * j, weights if how[1] == _WEIGHED else splat_f64(1.0))
        if how[1] == _COUNTED:
            store_f64(to[2] + 8 * j, widen_f64(values))
        else:
            store_f64(to[2] + 8 * j, weights if how[0] == 0 else nearness_f64(distance_f64(values, how[2]), how[3]))


@inner
def _guess(x: int, n: int, how: Any, share: float, listed: Any, bins: int) -> Any:
    """Two keys, the higher one first, between which a sample of n candidates suggests the border to be."""
    vectors = n // 16
    step, count = vectors // _SAMPLED, 0
    for v in range(0, vectors, step):
        store_f32(listed[1] + 4 * count, load_f32(x + 64 * v))
        count += 16
    _describe(listed[1], count, how, (listed[2], listed[3], listed[4]))
    top, bottom = _range(listed[2], count)
    upper, lower = _INFINITY, -_INFINITY
    if top > bottom:
        scale, total, squares = (_BINS - 1) / (top - bottom), 0.0, 0.0
        for slot in range(2 * _BINS):
            put_f64(bins + 8 * slot, 0.0)
        for j in range(count):
            place, weight = bins + 16 * int((top - get_f32(listed[2] + 4 * j)) * scale), get_f64(listed[3] + 8 * j)
            put_f64(place, get_f64(place) + weight)
            put_f64(place + 8, get_f64(place + 8) + weight * weight)
            total += weight
            squares += weight * weight
        mass, inside, slot = 0.0, 0.0, 0
        while slot < _BINS:
            mass += get_f64(bins + 16 * slot)
            inside += get_f64(bins + 16 * slot + 8)
            slot += 1
            # Three standard deviations of the mass's share of the total.
            found = mass / total
            rest = 1.0 - found
            spread = _DEVIATIONS * math.sqrt(inside * rest * rest + (squares - inside) * found * found) / total
            key = np.float32(top - slot / scale)
            if found + spread < share:
                upper = key
            if found - spread >= share:
                lower, slot = key, _BINS
    return upper, lower


@inner
def _range(keys: int, count: int) -> Any:
    """The highest and the lowest of some keys."""
    high, low = splat_f32(-_INFINITY), splat_f32(-_INFINITY)
    for j in range(0, count, 16):
        values = load_f32(keys + 4 * j)
        some = before(count - j)
        high, low = max_f32(where_f32(some, values), high), max_f32(where_f32(some, neg_f32(values)), low)
    return float(largest_f32(high)), -float(largest_f32(low))


@inner
def _masses(x: int, n: int, how: Any, upper: Any, lower: Any) -> Any:
    """The mass above each of two keys, and the total that shares refer to."""
    high, low = splat_f32(upper), splat_f32(lower)
    if how[1] != _WEIGHED:  # counted: a number is the share of 1
        counted, counted_low = zero_i32(), zero_i32()
        for i in range(0, n, 16):
            values = _keys(_block(x, n, i), how)
            counted = add_i32(counted, above_f32(values, high))
            counted_low = add_i32(counted_low, above_f32(values, low))
        return float(-sum_i32(counted)), float(-sum_i32(counted_low)), 1.0
    first, second, whole = zero_f64(), zero_f64(), zero_f64()
    for i in range(0, n, 16):
        values = _block(x, n, i)
        weights, keys = power_f64(values, how[2], _LOG2E), _keys(values, how)
        first = add_f64(first, where_f64(above_f32(keys, high), weights))
        second = add_f64(second, where_f64(above_f32(keys, low), weights))
        whole = add_f64(whole, weights)
    return sum_f64(first), sum_f64(second), sum_f64(whole)


@inner
def _copy_entry(listed: Any, source: int, to: int) -> None:
    """Copy an entry of a list."""
    put_i32(listed[0] + 4 * to, get_i32(listed[0] + 4 * source))
    put_f32(listed[1] + 4 * to, get_f32(listed[1] + 4 * source))
    put_f64(listed[3] + 8 * to, get_f64(listed[3] + 8 * source))
    put_f64(listed[4] + 8 * to, get_f64(listed[4] + 8 * source))


@inner
def _narrow(count: int, how: Any, goal: float, beyond: int, base: float, listed: Any, memory: int) -> Any:
    """Narrow a list to some entries with the border among them; returns how many, and the mass before them.

    They are all candidates with keys in some range, and stay in the order of their positions.
    """
    positions, logits, keys, weights = listed[0], listed[1], listed[2], listed[3]
    if count <= _SHORT:
        return count, base
    highest, lowest = _range(keys, count)
    upper, lower, above, more, mass = _rank(highest, memory), _rank(lowest, memory) - 1, 0, count, 0.0
    while more - above > _SHORT and upper - lower > 1:
        middle = lower + (upper - lower) // 2
        bound, found, sums = splat_f32(_ranked(middle, memory)), zero_i32(), zero_f64()
        for j in range(0, count, 16):
            some = and_i32(above_f32(load_f32(keys + 4 * j), bound), before(count - j))
            found, sums = add_i32(found, some), add_f64(sums, where_f64(some, load_f64(weights + 8 * j)))
        if _reached(base + sum_f64(sums), goal, beyond):
            lower, more = middle, -sum_i32(found)
        else:
            upper, above, mass = middle, -sum_i32(found), sum_f64(sums)
    low, high, left = splat_f32(_ranked(lower, memory)), splat_f32(_ranked(upper, memory)), 0
    for j in range(0, count, 16):
        some, places, values = load_f32(keys + 4 * j), load_i32(positions + 4 * j), load_f32(logits + 4 * j)
        mask = and_i32(and_i32(above_f32(some, low), not_above_f32(some, high)), before(count - j))
        append_i32(positions + 4 * left, places, mask)
        append_f32(logits + 4 * left, values, mask)
        left += count_lanes(mask)
    _describe(logits, left, how, (keys, weights, listed[4]))
    return left, base + mass


@inner
def _sort_few(count: int, listed: Any) -> None:
    """As _sort, for a short list, without branches that processors cannot foresee. Keys are overwritten."""
    exact, ranks = listed[4], listed[2]
    for j in range(0, count, 16):
        own, rank = load_f64(exact + 8 * j), zero_i32()
        for i in range(count):
            other = splat_f64(get_f64(exact + 8 * i))
            earlier = and_i32(not_above_f64(own, other), without(before(i - j + 1)))
            rank = add_i32(rank, or_i32(above_f64(other, own), earlier))
        store_i32(ranks + 4 * j, rank)
    for j in range(count):
        _copy_entry(listed, j, _SHORT - get_i32(ranks + 4 * j))
    for j in range(0, count, 16):
        store_i32(listed[0] + 4 * j, load_i32(listed[0] + 4 * (_SHORT + j)))
        store_f32(listed[1] + 4 * j, load_f32(listed[1] + 4 * (_SHORT + j)))
        store_f64(listed[3] + 8 * j, load_f64(listed[3] + 8 * (_SHORT + j)))
        store_f64(listed[4] + 8 * j, load_f64(listed[4] + 8 * (_SHORT + j)))


@inner
def _sort(count: int, listed: Any) -> None:
    """Sort a list by falling exact keys, then by position (Shell's sort). The place behind it is used, too."""
    positions, exact, differs = listed[0], listed[4], False
    for j in range(1, count):
        differs |= get_f64(exact + 8 * j) != get_f64(exact)
    if differs and count <= _SHORT:
        _sort_few(count, listed)
        differs = False
    gap = 1
    while gap * 9 < count * 4:
        gap = gap * 9 // 4 + 1
    while differs and gap > 0:
        for j in range(gap, count):
            _copy_entry(listed, j, count)
            value, position, at, moving = get_f64(exact + 8 * j), get_i32(positions + 4 * j), j, True
            while moving and at >= gap:
                others = get_f64(exact + 8 * (at - gap))
                moving = others < value or (others == value and get_i32(positions + 4 * (at - gap)) > position)
                if moving:
                    _copy_entry(listed, at - gap, at)
                    at -= gap
            _copy_entry(listed, count, at)
        gap = gap * 4 // 9


@inner
def _border(x: int, n: int, how: Any, share: Any, far: Any, places: Any) -> Any:
    """Find the first candidates in falling order of keys that have a share of the mass, or are as many as asked.

    share: the share or number, and 1 if it must be exceeded. Equal candidates are in the order of position. The result
    is a key and two numbers: candidates above the key are kept, and the first that many of the list, which has the
    second number of entries; all candidates with keys that are not above are in the list or are not kept.
    far: what is known of candidates that are not among these (see _NONE_FAR). The first number is _ELSEWHERE if the
    border is among those, and _UNSURE if the error of what is known may change which are kept.
    """
    listed, bins = places[2], places[4]
    part, beyond = share
    upper, lower, base = _INFINITY, -_INFINITY, far[0]
    if n >= MANY and far[0] + far[1] == 0.0:
        upper, lower = _guess(x, n, how, part / n if how[1] != _WEIGHED else part, listed, bins)
    above, more, total = _masses(x, n, how, upper, lower)
    total += far[0] + far[1]
    goal = part * total
    if above > 0.0 and _reached(base + above, goal, beyond):
        upper, lower, above = _INFINITY, upper, 0.0
    elif lower > -_INFINITY and not _reached(base + more, goal, beyond):
        upper, lower, above = lower, -_INFINITY, more
    count = _list(x, n, how, upper, lower, listed)
    count, above = _narrow(count, how, goal, beyond, base + above, listed, bins)
    key = np.float32(_range(listed[2], count)[0])
    _sort(count, listed)
    less = found = above / total
    j = 0
    while j < count:
        less = found
        found += get_f64(listed[3] + 8 * j) / total
        j += 1
        if _reached(found, part, beyond):
            break
    if far[0] + far[1] > 0.0:
        doubt = _FAR_ERROR * (far[0] * (1.0 - part) + far[1] * part) / total + _SUM_ERROR
        unsure = less + doubt >= part or found - doubt <= part
        if _reached(base, goal, beyond) or not _reached(base + more, goal, beyond):
            j = _ELSEWHERE
        elif unsure or (how[0] != 0 and _may_move(x, n, j - 1, how, far, total, listed)):
            j = _UNSURE
    return key, j, count


@inner
def _may_move(x: int, n: int, entry: int, how: Any, far: Any, total: float, listed: Any) -> bool:
    """Whether the error of the middle may change which candidates are kept. entry: of the list, the last that is.

    Candidates on one side of the middle are in the same order, wherever exactly it is.
    """
    some, middle, last = far[0] + far[1], how[2] - how[3], get_f64(listed[4] + 8 * entry)
    error = math.sqrt(some * far[4]) + abs(middle - far[2]) * some
    move = 2.0 * (_MOMENT_ERROR * error / total + _SUM_ERROR * (1.0 + how[3]))
    opposite = 2.0 * middle - float(get_f32(listed[1] + 4 * entry))
    if _count_above(x, n, opposite - move) > _count_above(x, n, opposite + move):
        return True
    low, inner_low, inner_high, high = far[5:]
    least = max(middle - inner_low, inner_high - middle) if inner_low < inner_high else 0.0
    return least - move >= -last or min(middle - low, high - middle) + last <= move


@inner
def _interval(x: int, n: int, how: Any, border: Any, far: Any, listed: Any, memory: int) -> Any:
    """The logits that are kept, for _keep_within. border: see _border."""
    key, some, count = border
    bound, lows, highs = splat_f32(key), splat_f32(-_INFINITY), splat_f32(-_INFINITY)
    for i in range(0, n, 16):
        values = _block(x, n, i)
        mask = and_i32(above_f32(_keys(values, how), bound), before(n - i))
        lows, highs = max_f32(where_f32(mask, neg_f32(values)), lows), max_f32(where_f32(mask, values), highs)
    low, high = -largest_f32(lows), largest_f32(highs)
    if far[6] < far[7]:
        low = min(low, _ranked(_rank(far[6], memory) + 1, memory))
        high = max(high, _ranked(_rank(far[7], memory) - 1, memory))
    last = get_f64(listed[4] + 8 * (some - 1))
    for j in range(count):
        if get_f64(listed[4] + 8 * j) > last:
            low, high = min(low, get_f32(listed[1] + 4 * j)), max(high, get_f32(listed[1] + 4 * j))
    wide_low, wide_high = low, high
    for j in range(some):
        wide_low, wide_high = min(wide_low, get_f32(listed[1] + 4 * j)), max(wide_high, get_f32(listed[1] + 4 * j))
    if some == count or get_f64(listed[4] + 8 * some) < last:  # no equal ones are left out
        low, high = wide_low, wide_high
    return wide_low, wide_high, low, high, get_i32(listed[0] + 4 * (some - 1))


@inner
def _keep_share(x: int, ids: int, n: int, how: Any, share: Any, min_keep: int, places: Any) -> int:
    """Keep the first candidates until they have a share, and at least min_keep; returns how many. See _border."""
    border = _border(x, n, how, share, _NONE_FAR, places)
    if min_keep > 1:
        counting = (how[0], _COUNTED_BY_WEIGHT, how[2], how[3])
        if _masses(x, n, counting, border[0], border[0])[0] + border[1] < min_keep:
            border = _border(x, n, counting, (float(min(min_keep, n)), 0), _NONE_FAR, places)
    return _keep_within(x, ids, n, _interval(x, n, how, border, _NONE_FAR, places[2], places[4]), places)


@inner
def _keep_mass(x: int, ids: int, n: int, top: float, share: float, typical: int, min_keep: int, places: Any) -> int:
    """Keep the most probable (top-p, arXiv:1904.09751), or those with a surprise near the entropy (arXiv:2202.00666).

    Returns how many. Where single precision cannot decide, all is computed in double precision.
    """
    if n >= MANY and min_keep <= 1:
        # A few candidates may have much of the mass. If the first sample misses them, or has one, its sums tell.
        kept, sampled_share, middle = _keep_roughly(x, ids, n, top, (share, share, -1.0), typical, places)
        if kept == _ELSEWHERE:
            kept = _keep_roughly(x, ids, n, top, (share, sampled_share, middle), typical, places)[0]
        if kept >= 0:
            return kept
    middle = 0.0
    if typical != 0:
        if _count_above(x, n, top - _IMPOSSIBLE) < n:
            n = _keep_above(x, ids, n, top - _IMPOSSIBLE, 0, places)
            x, ids = places[0], places[1]
        middle = _mean_distance(x, n, top)[0]
    return _keep_share(x, ids, n, (typical, _WEIGHED, top, middle), (share, typical), min_keep, places)


@inner
def _keep_roughly(x: int, ids: int, n: int, top: float, goal: Any, typical: int, places: Any) -> Any:
    """As _keep_mass for many candidates: weights of those that are certainly kept, or not, are in single precision.

    goal: the share, the share of a sample that is looked at, and the middle if it is known, else -1. Returns how many
    are kept, or _UNSURE if the error may change which are kept, or _ELSEWHERE if the sample misled; nothing is kept
    then. With that come the numbers for another attempt.
    """
    share, sampled_share, middle = goal
    center, window, sampled = _window(x, n, top, (sampled_share, middle), typical, places)
    scale = _scale(top, _LOG2E)
    if window[0] <= top - _FARTHEST or scale[1] == 0.0:
        return _UNSURE, 0.0, 0.0
    if typical != 0:
        some, far = _near(x, ids, n, scale, window, center, places)
    else:
        some, far = _near(x, ids, n, scale, window, None, places)
    if some == 0:
        return _ELSEWHERE, share, -1.0
    near, near_ids = places[5]
    rest = far[0] + far[1]
    mean, mass = _mean_distance(near, some, top)
    whole = mass + rest
    middle = (mean * mass + (top - far[2]) * rest - far[3]) / whole
    how = (typical, _WEIGHED, top, middle)
    border = _border(near, some, how, (share, typical), far, places)
    if border[1] < 0:
        return border[1], 1.0 - (1.0 - share) * whole / sampled, middle
    low, high, later_low, later_high, last = _interval(near, some, how, border, far, places[2], places[4])
    if far[6] < far[7]:
        last = get_i32(near_ids + 4 * last)
        kept = _keep_within(x, ids, n, (low, high, later_low, later_high, last), places)
    else:
        kept = _keep_within(near, near_ids, some, (low, high, later_low, later_high, last), places)
    return kept, 0.0, 0.0


@inner
def _window(x: int, n: int, top: float, goal: Any, typical: int, places: Any) -> Any:
    """Where a sample of many candidates suggests that the last that is kept may be.

    goal: the share of the sample, and the middle if it is known. Returns a middle and two intervals of logits: those
    inside the inner one come first, and those outside the outer one last. The inner one is empty where few are inside
    the outer one. The last result is about the mass of all candidates.
    """
    listed, bins = places[2], places[4]
    step = n // 16 // _SAMPLED
    sampled = n // 16 // step * 16
    share, middle = goal
    upper, lower = _guess(x, n, (0, _WEIGHED, top, 0.0), (1.0 + share) / 2.0 if typical != 0 else share, listed, bins)
    mean, spread, mass = _sampled_middle(listed[1], listed[3], sampled, top)
    mass, low, inner_low, inner_high, high = mass * step, float(lower), math.inf, -math.inf, math.inf
    if _count_above(listed[1], sampled, low) * _FEW <= sampled:
        return low, (low, inner_low, inner_high, high), mass
    if typical == 0:
        return low, (low, float(upper), high, high), mass
    if middle < 0.0:
        middle, spread = mean, _DEVIATIONS * spread
    else:
        spread = 0.0
    upper, lower = _guess(x, n, (1, _WEIGHED, top, middle), share, listed, bins)
    near, far, middle = -float(upper) - spread, spread - float(lower), top - middle
    low, high = float(np.float32(middle - far)), float(np.float32(middle + far))
    if near > 0.0:
        inner_low, inner_high = float(np.float32(middle - near)), float(np.float32(middle + near))
    return middle, (low, inner_low, inner_high, high), mass


@inner
def _sampled_middle(logits: int, weights: int, n: int, top: float) -> Any:
    """The mean distance of a sample's logits from the highest one, by weights; its standard deviation; their sum."""
    total, first, squares, crossed, second = zero_f64(), zero_f64(), zero_f64(), zero_f64(), zero_f64()
    for i in range(0, n, 16):
        weight, distance = load_f64(weights + 8 * i), distance_f64(load_f32(logits + 4 * i), top)
        product = multiply_f64(weight, distance)
        total, first = add_f64(total, weight), add_f64(first, product)
        squares = add_f64(squares, multiply_f64(weight, weight))
        crossed = add_f64(crossed, multiply_f64(weight, product))
        second = add_f64(second, multiply_f64(product, product))
    whole = sum_f64(total)
    mean = sum_f64(first) / whole
    spread = sum_f64(second) - 2.0 * mean * sum_f64(crossed) + mean * mean * sum_f64(squares)
    return mean, math.sqrt(max(spread, 0.0)) / whole, whole


@inner
def _near(x: int, ids: int, n: int, how: Any, window: Any, center: Any, places: Any) -> Any:
    """Copy the candidates between the two intervals of a window, and sum up what is known of all others.

    Returns how many there are, and what _NONE_FAR has. how: two results of _scale. center: see _NONE_FAR, or None if
    moments are not needed. Copied with the logits are ids, or positions if some candidates are inside the inner
    interval.
    """
    scale, unit = how
    low, inner_low, inner_high, high = window
    lows = (splat_f32(np.float32(low)), splat_f32(np.float32(inner_low)))
    bounds = (*lows, splat_f32(np.float32(inner_high)), splat_f32(np.float32(high)))
    if inner_low < inner_high:
        ids = 0
    near, inside, outside, moment, second = 0, zero_f64(), zero_f64(), zero_f64(), zero_f64()
    about = np.float32(0.0 if center is None else center)
    middle, least = splat_f32(about), splat_f32(scale[3])
    whole = n // 128 * 128
    for begin in range(0, whole, 128):
        insides, outsides, moments, seconds = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        for i in range(begin, begin + 128, 64):
            a, b = load_f32(x + 4 * i), load_f32(x + 4 * i + 64)
            c, d = load_f32(x + 4 * i + 128), load_f32(x + 4 * i + 192)
            near, a_in, a_out = _split(a, i, ids, near, bounds, scale, center, places)
            near, b_in, b_out = _split(b, i + 16, ids, near, bounds, scale, center, places)
            near, c_in, c_out = _split(c, i + 32, ids, near, bounds, scale, center, places)
            near, d_in, d_out = _split(d, i + 48, ids, near, bounds, scale, center, places)
            insides = add_f32(insides, add_f32(add_f32(a_in, b_in), add_f32(c_in, d_in)))
            outsides = add_f32(outsides, add_f32(add_f32(a_out, b_out), add_f32(c_out, d_out)))
            if center is not None:
                a_one, a_two = _moments(a, a_in, a_out, middle, least)
                b_one, b_two = _moments(b, b_in, b_out, middle, least)
                c_one, c_two = _moments(c, c_in, c_out, middle, least)
                d_one, d_two = _moments(d, d_in, d_out, middle, least)
                moments = add_f32(moments, add_f32(add_f32(a_one, b_one), add_f32(c_one, d_one)))
                seconds = add_f32(seconds, add_f32(add_f32(a_two, b_two), add_f32(c_two, d_two)))
        inside, outside = add_f64(inside, widen_f64(insides)), add_f64(outside, widen_f64(outsides))
        if center is not None:
            moment, second = add_f64(moment, widen_f64(moments)), add_f64(second, widen_f64(seconds))
    for i in range(whole, n, 16):
        a = _block(x, n, i)
        near, a_in, a_out = _split(a, i, ids, near, bounds, scale, center, places)
        inside, outside = add_f64(inside, widen_f64(a_in)), add_f64(outside, widen_f64(a_out))
        a_one, a_two = _moments(a, a_in, a_out, middle, least)
        moment, second = add_f64(moment, widen_f64(a_one)), add_f64(second, widen_f64(a_two))
    sums = (unit * sum_f64(inside), unit * sum_f64(outside), float(about))
    return near, (*sums, unit * sum_f64(moment), unit * sum_f64(second), low, inner_low, inner_high, high)


@inner
def _split(values: Any, i: int, ids: int, near: int, bounds: Any, scale: Any, center: Any, places: Any) -> Any:
    """Copy those of sixteen candidates that are between two intervals; returns how many were copied so far.

    Also returns the weights, in units of _scale, of those inside the inner interval and of those outside the outer one.
    center: None if intervals are open above.
    """
    some, inner_ones = above_f32(values, bounds[0]), above_f32(values, bounds[1])
    if center is not None:
        some, inner_ones = (
            and_i32(some, above_f32(bounds[3], values)),
            and_i32(inner_ones, above_f32(bounds[2], values)),
        )
    mask = and_i32(some, without(inner_ones))
    found = count_lanes(mask)
    if _COMPRESSES or found > 0:
        append_f32(places[5][0] + 4 * near, values, mask)
        append_i32(places[5][1] + 4 * near, count_up(i) if ids == 0 else load_i32(ids + 4 * i), mask)
    weights = _rough(values, scale)
    return near + found, or_zero_f32(inner_ones, weights), or_zero_f32(without(some), weights)


@inner
def _moments(values: Any, inside: Any, outside: Any, middle: Any, least: Any) -> Any:
    """The weights times the logits' distances from the middle, and times their squares. least: see _rough."""
    distances = sub_f32(max_f32(values, least), middle)
    product = mul_f32(add_f32(inside, outside), distances)
    return product, mul_f32(product, distances)


@inner
def _exclude_top(x: int, ids: int, n: int, top: float, threshold: float, min_keep: int, places: Any) -> Any:
    """Drop all tokens that reach the threshold, except the least probable of them.

    XTC, "exclude top choices" (text-generation-webui pull request 6335). Returns how many are left, and the highest.
    """
    listed, how = places[2], (0, _WEIGHED, top, 0.0)
    total, doubt = _weigh_roughly(x, n, top, _LOG2E, places[3])
    lower = top - 1e-3 + math.log(threshold * total) if threshold > 0.0 else -math.inf
    count = _list(x, n, how, _INFINITY, np.float32(lower - 1e-6 * abs(lower)), listed)
    for j in range(count):
        if doubt > 0.0 and abs(get_f64(listed[3] + 8 * j) - threshold * total) <= doubt * threshold * total:
            total, doubt = _weigh(x, n, top, _LOG2E, places[3]), 0.0
    reaching, least, last, lowest = 0, 2.0, -1, _INFINITY
    for j in range(count):
        weight = get_f64(listed[3] + 8 * j)
        if weight / total >= threshold:
            reaching += 1
            lowest = min(lowest, get_f32(listed[1] + 4 * j))
            if weight <= least:
                least, last = weight, j
    if reaching < 2 or n - reaching + 1 < min_keep:
        return n, top
    highest, spared, kept = float(get_f32(listed[1] + 4 * last)), get_i32(listed[0] + 4 * last), 0
    dropped = splat_f32(lowest)
    for i in range(0, n, 16):
        mask = above_f32(dropped, _block(x, n, i))
        if i <= spared < i + 16:
            mask = or_i32(mask, and_i32(before(spared + 1 - i), without(before(spared - i))))
        kept = _append(x, ids, n, i, mask, kept, places)
    return kept, highest


@inner
def _deviation(x: int, n: int, top: float) -> float:
    """The standard deviation of n logits."""
    found, squares = zero_f64(), zero_f64()
    for i in range(0, n, 16):
        found = add_f64(found, where_f64(before(n - i), distance_f64(_block(x, n, i), top)))
    middle = top - sum_f64(found) / n
    for i in range(0, n, 16):
        squares = add_f64(squares, where_f64(before(n - i), squares_f64(_block(x, n, i), middle)))
    return math.sqrt(sum_f64(squares) / n)


@inner
def _temperature(x: int, n: int, top: float, rules: int) -> float:
    """The temperature, which may depend on the entropy (arXiv:2309.02772)."""
    given, spread = get_f64(rules + 8 * Rule.TEMPERATURE), get_f64(rules + 8 * Rule.DYNATEMP_RANGE)
    if spread > 0.0 and n > 1:
        distance, total = _mean_distance(x, n, top)
        entropy = math.log(total) + distance
        share, exponent = max(0.0, entropy / math.log(float(n))), get_f64(rules + 8 * Rule.DYNATEMP_EXPONENT)
        power = math.exp(exponent * math.log(share)) if share > 0.0 else (1.0 if exponent == 0.0 else 0.0)
        low = max(0.0, given - spread)
        given = max(_COLDEST, low + (given + spread - low) * power)
    return max(given, _LEAST_TEMPERATURE)


@inner
def _first_of(x: int, n: int, value: Any, blocks: int) -> int:
    """The first position of a value. blocks: of _extremes."""
    same, i = splat_f32(value), 0
    while i < n - _BLOCK and count_lanes(equal_f32(load_f32(blocks + i // _BLOCK * 64), same)) == 0:
        i += _BLOCK
    while i < n - 16 and count_lanes(equal_f32(load_f32(x + 4 * i), same)) == 0:
        i += 16
    while i < n - 1 and get_f32(x + 4 * i) != value:
        i += 1
    return i


@inner
def _find(x: int, n: int, how: Any, goal: float, places: Any) -> Any:
    """The position where the cumulative sum of weights passes the goal; never one with weight 0.

    how: the highest logit, and the factor. Also returns how far the sums before and after it are from the goal. If the
    parts' sums are rough, the position may be -1.
    """
    weights, parts, part, mass, found, last = places[2][3], places[3], 0, 0.0, -1, 0.0
    while part < (n - 1) // _PART and mass + get_f64(parts + 8 * part) <= goal:
        mass += get_f64(parts + 8 * part)
        part += 1
    while found < 0 and part >= 0:
        begin = part * _PART
        end = min(n, begin + _PART)
        for i in range(begin, end, 16):
            store_f64(weights + 8 * (i - begin), power_f64(_block(x, n, i), how[0], how[1]))
        i = begin
        while i < end and (found < 0 or mass <= goal):
            weight = get_f64(weights + 8 * (i - begin))
            if weight > 0.0:
                mass += weight
                found, last = i, weight
            i += 1
        part -= 1  # if sums were rounded down, the last that is possible lies in an earlier part
    return found, goal - mass + last, mass - goal


@inner
def _draw(x: int, n: int, how: Any, uniform: float, places: Any) -> int:
    """The position that a number in [0, 1) stands for."""
    total, doubt = _weigh_roughly(x, n, how[0], how[1], places[3])
    found, before_it, after_it = _find(x, n, how, uniform * total, places)
    if doubt > 0.0 and min(before_it, after_it) <= (2.0 * doubt * uniform * (1.0 - uniform) + _SUM_ERROR) * total:
        total = _weigh(x, n, how[0], how[1], places[3])
        found = _find(x, n, how, uniform * total, places)[0]
    return found


@inner
def _filtered(x: int, ids: int, n: int, highest: Any, rules: int, places: Any) -> Any:
    """Apply the filters in llama.cpp's order; returns the logits, ids, number and highest logit of the candidates."""
    top, min_keep = float(highest), int(get_f64(rules + 8 * Rule.MIN_KEEP))
    own, own_ids = places[0], places[1]
    sigmas, top_k = get_f64(rules + 8 * Rule.TOP_N_SIGMA), get_f64(rules + 8 * Rule.TOP_K)
    typical_p, top_p = get_f64(rules + 8 * Rule.TYPICAL_P), get_f64(rules + 8 * Rule.TOP_P)
    min_p, xtc = get_f64(rules + 8 * Rule.MIN_P), get_f64(rules + 8 * Rule.XTC)
    blocks = places[5][0]
    if sigmas > 0.0:  # arXiv:2411.07641
        n = _keep_above(x, ids, n, top - sigmas * _deviation(x, n, top), blocks, places)
        x, ids, blocks = own, own_ids, 0
    if blocks != 0 and n >= MANY and 0.0 < top_k <= _MOST_FIRST:
        n = _keep_likely(x, ids, n, top_k, blocks, places)
        x, ids, blocks = own, own_ids, 0
    if top_k > 0.0 and top_k < n:
        if n >= MANY:
            likely = _guess(x, n, (0, _COUNTED, top, 0.0), top_k / n, places[2], places[4])[1]
            if _count_above(x, n, float(likely)) >= top_k:
                n = _keep_above(x, ids, n, float(likely), blocks, places)
                x, ids = own, own_ids
        if n <= _SHORT:
            n = _keep_first(x, ids, n, int(top_k), places)
        else:
            n = _keep_share(x, ids, n, (0, _COUNTED, top, 0.0), (top_k, 0), 1, places)
        x, ids, blocks = own, own_ids, 0
    if typical_p < 1.0:
        n = _keep_mass(x, ids, n, top, typical_p, 1, min_keep, places)
        x, ids, blocks = own, own_ids, places[5][0]
        top = float(_extremes(x, n, blocks)[0])
    if top_p < 1.0:
        n = _keep_mass(x, ids, n, top, top_p, 0, min_keep, places)
        x, ids, blocks = own, own_ids, 0
    if min_p > -math.inf:  # arXiv:2407.01082
        bound = top + min_p
        if min_keep > 1 and _count_above(x, n, bound) < min_keep:
            counting = (0, _COUNTED, top, 0.0)
            n = _keep_share(x, ids, n, counting, (float(min(min_keep, n)), 0), 1, places)
        else:
            n = _keep_above(x, ids, n, bound, blocks, places)
        x, ids = own, own_ids
    if xtc <= 1.0:
        kept, top = _exclude_top(x, ids, n, top, xtc, min_keep, places)
        if kept < n:
            n, x, ids = kept, own, own_ids
    return x, ids, n, top


@inner
def _count_above(x: int, n: int, bound: float) -> int:
    """How many logits are at least a double."""
    found, value = 0, splat_f64(bound)
    for i in range(0, n, 16):
        found += count_lanes(and_i32(not_above_f64(value, widen_f64(_block(x, n, i))), before(n - i)))
    return found


@inner
def _choose(x: int, ids: int, n: int, highest: Any, rules: int, choice: int, places: Any) -> None:
    """Choose among possible candidates and write the choice."""
    mu, top = get_f64(rules + 8 * Rule.MIROSTAT), float(highest)
    if get_f64(rules + 8 * Rule.TEMPERATURE) == 0.0:
        position = _first_of(x, n, highest, places[5][0])
    else:
        if get_f64(rules + 8 * Rule.TOTAL) != 0.0:
            put_f64(choice + 8 * Choice.TOTAL, _weigh_roughly(x, n, top, _LOG2E, places[3])[0])
        if mu == 0.0:
            x, ids, n, top = _filtered(x, ids, n, highest, rules, places)
        factor = _LOG2E / _temperature(x, n, top, rules)
        if mu != 0.0:  # Mirostat 2 (arXiv:2007.14966)
            surprise = _LOG2E * math.log(_weigh(x, n, top, factor, places[3]))
            if surprise <= mu:
                n = _keep_above(x, ids, n, top + (surprise - mu - _ROUNDING) / factor, places[5][0], places)
            else:
                first = _first_of(x, n, highest, places[5][0])
                put_i32(places[1], first if ids == 0 else get_i32(ids + 4 * first))
                put_f32(places[0], highest)
                n = 1
            x, ids = places[0], places[1]
        position = _draw(x, n, (top, factor), get_f64(rules + 8 * Rule.UNIFORM), places)
        put_f64(choice + 8 * Choice.KEPT, float(n))
        put_f64(choice + 8 * Choice.TOP, top)
        put_f64(choice + 8 * Choice.FACTOR, factor)
    put_f64(choice + 8 * Choice.TOKEN, float(position if ids == 0 else get_i32(ids + 4 * position)))


_NEUTRAL = [0.8, 0, 1, 0, 0, 1, 1, -math.inf, 2, 1, 0, 0.6, 0]


def _choose_samples() -> Iterator[Sample]:
    changes: list[dict[Rule, float]] = [
        {},
        {Rule.TEMPERATURE: 0},
        {Rule.TOP_K: 5, Rule.TOP_P: 0.9, Rule.MIN_P: -2.0},
        {Rule.TOP_P: 0.7, Rule.MIN_KEEP: 3},
        {Rule.TYPICAL_P: 0.6},
        {Rule.XTC: 0.02, Rule.DYNATEMP_RANGE: 0.2},
        {Rule.TOP_N_SIGMA: 1.0},
        {Rule.MIROSTAT: 5.0},
    ]
    many: list[dict[Rule, float]] = [
        {Rule.TOP_P: 0.9},
        {Rule.TYPICAL_P: 0.8},
        {Rule.TYPICAL_P: 0.9},
        {Rule.TOP_K: 20},
        {Rule.XTC: 0.001, Rule.TOTAL: 1},
    ]
    for number, change in enumerate([*changes, *many]):
        count = 70 if number < len(changes) else MANY + 5
        s = Sample(scratch=memory_bytes(count))
        rules = [change.get(Rule(i), value) for i, value in enumerate(_NEUTRAL)]
        allowed = s.array(s.random.integers(0, 3, count), np.uint8) if change == {} else 0
        peaked = change.get(Rule.TYPICAL_P) in (0.6, 0.9)
        logits = s.array((4 if peaked else 1) * s.random.normal(size=count))
        choice = s.zeros(int(Choice.SIZE), np.float64)
        yield s.arguments(logits, count, allowed, s.array(rules, np.float64), choice)


@kernel(Choose, _choose_samples)
def choose(op: int, step: int, thread: int, threads: int) -> None:
    """Choose a token, by the first thread.

    It needs memory_bytes(count) of scratch memory, where the candidates' logits and ids lie afterwards (kept_places).
    """
    if thread == 0:
        x, n, allowed = argument(op, _CHOOSE.logits), argument(op, _CHOOSE.count), argument(op, _CHOOSE.allowed)
        rules, choice = argument(op, _CHOOSE.rules), argument(op, _CHOOSE.choice)
        places = _places(scratch(step, thread), n)
        highest, largest = _extremes(x, n, places[5][0])
        put_f64(choice + 8 * Choice.HIGHEST, float(highest))
        put_f64(choice + 8 * Choice.TOKEN, -1.0)
        if highest < _INFINITY:
            if allowed != 0 or largest == _INFINITY:
                n = _keep_allowed(x, n, allowed, places)
                if n > 0:
                    highest, _ = _extremes(places[0], n, places[5][0])
                    _choose(places[0], places[1], n, highest, rules, choice, places)
            else:
                _choose(x, 0, n, highest, rules, choice, places)
