"""Chooses a token from logits: the filters that narrow the candidates, temperature, and the draw, in one call.

Candidates are tokens in ascending order: an array of their logits, all finite, and one of their ids (none as long as
all tokens are candidates). A filter writes those that it keeps one after the other. Probabilities are double precision.

Most filters keep the first candidates of an order, until they have a share of the mass. Sorting a vocabulary would take
longer than a small model's whole step, so only the last of these candidates is searched (`_border`): a sample of the
candidates shows about where it is, one pass over all sums up what comes before, and histograms divide what is left
until it is short enough to sort. Any sample gives the same result.

Where few candidates have most of the mass, as with trained models, filters look at these alone (`_near`). The mass of
the others is summed up in single precision, and its error is bounded. Where the error could change what is kept, the
filter starts again with all candidates, in double precision. The draw and XTC sum up weights in the same way.
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
    add_f32,
    add_i32,
    exp2_f32,
    fma,
    largest_f32,
    largest_magnitude,
    magnitude,
    max_f32,
    max_i32,
    min_f32,
    mul_f32,
    neg_f32,
    or_i32,
    sub_f32,
    sum_i32,
)
from cpu_kernels.simd.doubles import (
    above_f32,
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
    load_first,
    load_mask,
    multiply_f64,
    narrow_f64,
    nearness_f64,
    not_above_f32,
    not_above_f64,
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
    put_u8,
    splat_f32,
    store_f32,
    store_i32,
    zero_f32,
    zero_i32,
)

_INFINITY = np.float32(math.inf)
# Candidates whose weights are summed together: the draw searches these sums first.
_PART = 256
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
# Relative errors of sums in single precision, at distance 0 and more for each unit of it; and in double precision.
_ERROR, _ERROR_BY_DISTANCE, _SUM_ERROR = 2e-6, 2e-7, 1e-12
# The same of weights that are summed in groups, for each power of 2; powers and factors that single precision has.
_ROUGH, _ROUGH_BY_POWER, _LEAST_POWER, _LARGEST_FACTOR = 4e-7, 1.3e-7, np.float32(-126.0), 1e30
# Candidates whose weights are summed in single precision.
_GROUP = 64
# Relative error of keys in single precision and of a bound that they are compared with.
_KEY_ERROR = 2.5e-7
# What is known of far candidates: sums of mass, of mass times distance and times its square, and the least distance.
# There are none.
_NONE_FAR = (0.0, 0.0, 0.0, math.inf)


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
    """Candidates that arrays have room for: appending a vector may write sixteen more than there are."""
    return (count + 47) // 16 * 16


@inner
def _places(memory: int, count: int) -> Any:
    """Addresses: candidates' logits, ids; those of a list; marks, parts, bins; near candidates' logits and ids.

    A list has positions, logits, keys, weights and exact keys. Its positions are there twice; _narrow keeps the second.
    """
    room = _room(count)
    exact = memory + 28 * room
    marks = exact + 12 * room
    parts = marks + room
    bins = parts + 8 * (room // _PART + 1)
    near = bins + 16 * _BINS
    listed = (memory + 8 * room, memory + 12 * room, memory + 16 * room, memory + 20 * room, exact, exact + 8 * room)
    return memory, memory + 4 * room, listed, marks, parts, bins, (near, near + 4 * room)


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
def _extremes(x: int, n: int, groups: int) -> Any:
    """The highest of n floats, NaN if any is NaN, and how many are above minus infinity.

    Neighbours are in different groups: those of high logits are often high, too. The highest of each of 256 groups,
    without the last floats, are written to `groups`.
    """
    lowest, whole = splat_f32(-_INFINITY), n // 256 * 256
    bits, possible = zero_i32(), zero_i32()
    for i in range(0, 256, 16):
        store_f32(groups + 4 * i, lowest)
    for begin in range(0, whole, 256):
        for i in range(0, 256, 16):
            values, group = load_f32(x + 4 * (begin + i)), groups + 4 * i
            store_f32(group, max_f32(values, load_f32(group)))
            bits = max_i32(bits, magnitude(values))
            possible = add_i32(possible, above_f32(values, lowest))
    high = lowest
    for i in range(whole, n, 16):
        values = _block(x, n, i)
        high = max_f32(values, high)
        bits = max_i32(bits, magnitude(values))
        possible = add_i32(possible, above_f32(values, lowest))
    for i in range(0, 256, 16):
        high = max_f32(load_f32(groups + 4 * i), high)
    highest, largest = largest_f32(high), largest_magnitude(bits)
    return largest if math.isnan(largest) else highest, -sum_i32(possible)


@inner
def _append(x: int, ids: int, n: int, i: int, mask: Any, kept: int, places: Any) -> int:
    """Append candidates of the vector at index i to the first `kept` of the memory; returns how many there are."""
    mask = and_i32(mask, before(n - i))
    append_f32(places[0] + 4 * kept, _block(x, n, i), mask)
    append_i32(places[1] + 4 * kept, count_up(i) if ids == 0 else load_i32(ids + 4 * i), mask)
    return kept + count_lanes(mask)


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
def _keep_above(x: int, ids: int, n: int, bound: float, places: Any) -> int:
    """Keep logits that are at least a double; returns how many."""
    kept, value = 0, splat_f64(bound)
    for i in range(0, n, 16):
        kept = _append(x, ids, n, i, not_above_f64(value, widen_f64(_block(x, n, i))), kept, places)
    return kept


@inner
def _keep_likely(x: int, ids: int, n: int, first: float, places: Any) -> int:
    """Keep the `first` highest of many logits and some more, after _extremes; returns how many.

    As many of the highest logits of 256 groups are not below the bound, so that at least as many logits are not.
    """
    groups = places[2][1]
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
    kept, value, i = 0, splat_f32(np.float32(bound)), 0
    while i < n:
        if i + 64 <= n:  # most have none
            at = x + 4 * i
            lower, upper = max_f32(load_f32(at), load_f32(at + 64)), max_f32(load_f32(at + 128), load_f32(at + 192))
            if count_lanes(not_above_f32(value, max_f32(lower, upper))) == 0:
                i += 64
                continue
        for j in range(i, min(i + 64, n), 16):
            kept = _append(x, ids, n, j, not_above_f32(value, _block(x, n, j)), kept, places)
        i += 64
    return kept


@inner
def _keep_marked(x: int, ids: int, n: int, how: Any, bound: Any, mark: int, places: Any) -> int:
    """Keep candidates whose key is above a float or that have the mark, 0 or 1; returns how many."""
    kept, value, marks = 0, splat_f32(bound), places[3]
    for i in range(0, n, 16):
        marked = load_mask(marks + i, n - i)
        mask = or_i32(above_f32(_keys(_block(x, n, i), how), value), marked if mark != 0 else without(marked))
        kept = _append(x, ids, n, i, mask, kept, places)
    return kept


@inner
def _clear_marks(n: int, places: Any) -> None:
    for i in range(0, n, 64):
        store_i32(places[3] + i, zero_i32())


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
def _weigh_roughly(x: int, n: int, top: float, factor: float, parts: int) -> Any:
    """As _weigh, in single precision if there are many candidates; returns the sum, and the bound of its error."""
    if n < MANY or factor > _LARGEST_FACTOR:
        return _weigh(x, n, top, factor, parts), 0.0
    highest, scale, least = splat_f32(np.float32(top)), splat_f32(np.float32(-factor)), splat_f32(_LEAST_POWER)
    total, moment = 0.0, zero_f64()
    for begin in range(0, n, _PART):
        part, moments = zero_f64(), zero_f32()
        for group in range(begin, min(n, begin + _PART), _GROUP):
            weights = zero_f32()
            for i in range(group, min(n, group + _GROUP), 16):
                powers = max_f32(mul_f32(sub_f32(highest, _block(x, n, i)), scale), least)
                weight = exp2_f32(powers)
                weights, moments = add_f32(weights, weight), fma(weight, powers, moments)
            part = add_f64(part, widen_f64(weights))
        of_part = sum_f64(part)
        put_f64(parts + begin // _PART * 8, of_part)
        total += of_part
        moment = add_f64(moment, widen_f64(moments))
    return total, _ROUGH * total - _ROUGH_BY_POWER * sum_f64(moment)


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
    positions, logits, keys, weights, exact, again = listed
    high, low, found = splat_f32(upper), splat_f32(lower), 0
    for i in range(0, n, 16):
        values = _block(x, n, i)
        some = _keys(values, how)
        mask = and_i32(and_i32(above_f32(some, low), not_above_f32(some, high)), before(n - i))
        inside = count_lanes(mask)
        if _COMPRESSES or inside > 0:
            append_i32(positions + 4 * found, count_up(i), mask)
            append_i32(again + 4 * found, count_up(i), mask)
            append_f32(logits + 4 * found, values, mask)
            found += inside
    _describe(logits, found, how, (keys, weights, exact))
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
    """Copy an entry of a list, but for its logit, which is no longer needed."""
    put_i32(listed[0] + 4 * to, get_i32(listed[0] + 4 * source))
    put_f32(listed[2] + 4 * to, get_f32(listed[2] + 4 * source))
    put_f64(listed[3] + 8 * to, get_f64(listed[3] + 8 * source))
    put_f64(listed[4] + 8 * to, get_f64(listed[4] + 8 * source))


@inner
def _narrow(count: int, goal: float, beyond: int, base: float, listed: Any, bins: int) -> Any:
    """Narrow a list to some entries with the border among them; returns how many, and the mass before them.

    They are all candidates with keys in some range, and stay in the order of their positions.
    """
    keys, weights, different = listed[2], listed[3], True
    while different and count > _SHORT:
        top, bottom = _range(keys, count)
        different = top > bottom
        if different:
            scale = (_BINS - 1) / (top - bottom)
            last = int((top - bottom) * scale)
            for slot in range(_BINS):
                put_f64(bins + 8 * slot, 0.0)
            for j in range(count):
                place = bins + 8 * int((top - get_f32(keys + 4 * j)) * scale)
                put_f64(place, get_f64(place) + get_f64(weights + 8 * j))
            chosen = 0
            while chosen < last and not _reached(base + get_f64(bins + 8 * chosen), goal, beyond):
                base += get_f64(bins + 8 * chosen)
                chosen += 1
            left = 0
            for j in range(count):
                inside = int((top - get_f32(keys + 4 * j)) * scale) == chosen
                if inside:
                    _copy_entry(listed, j, left)
                    left += 1
            count = left
    return count, base


@inner
def _sort(count: int, listed: Any) -> None:
    """Sort a list by falling exact keys, then by position (Shell's sort). The place behind it is used, too."""
    positions, exact, differs = listed[0], listed[4], False
    for j in range(1, count):
        differs |= get_f64(exact + 8 * j) != get_f64(exact)
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
    is a key and a number: candidates above the key are kept, and that many of the list, which begins with them. All
    others of the list have no higher key. The third is how many were listed at first if all that are kept were, else 0.
    far: what is known of candidates that are not among these (_NONE_FAR). The number is -1 if its error may change
    which are kept.
    """
    listed, bins = places[2], places[5]
    part, beyond = share
    upper, lower, above = _INFINITY, -_INFINITY, 0.0
    if n >= MANY:
        upper, lower = _guess(x, n, how, part / n if how[1] != _WEIGHED else part, listed, bins)
    above, more, total = _masses(x, n, how, upper, lower)
    if how[1] == _WEIGHED:
        total += far[0]
    goal = part * total
    if above > 0.0 and _reached(above, goal, beyond):
        upper, lower, above = _INFINITY, upper, 0.0
    elif not _reached(more, goal, beyond):
        upper, lower, above = lower, -_INFINITY, more
    count = _list(x, n, how, upper, lower, listed)
    whole = count if upper == _INFINITY else 0
    count, above = _narrow(count, goal, beyond, above, listed, bins)
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
    if how[1] == _WEIGHED and far[0] > 0.0:
        doubt = _mass_error(far) / total + _SUM_ERROR
        unsure = less + doubt >= part or found - doubt <= part
        if how[0] != 0 and not unsure:
            unsure = _may_move(x, n, get_f64(listed[4] + 8 * (j - 1)), how, far, total)
        if unsure:
            j = -1
    return key, j, whole


@inner
def _mass_error(far: Any) -> float:
    """The bound of the error of far candidates' mass."""
    return _ERROR * far[0] + _ERROR_BY_DISTANCE * far[1]


@inner
def _may_move(x: int, n: int, last: float, how: Any, far: Any, total: float) -> bool:
    """Whether the error of the middle may change which candidates are kept. last: the key of the last of them."""
    error = _ERROR * far[1] + _ERROR_BY_DISTANCE * far[2] + _mass_error(far) * how[3]
    move = 4.0 * (error / total + _SUM_ERROR * how[3]) - _KEY_ERROR * last
    counted = (how[0], _COUNTED, how[2], how[3])
    above, more, _ = _masses(x, n, counted, np.float32(last + move), np.float32(last - move))
    return more - above != 1.0 or how[3] - last + move >= far[3]


@inner
def _keep_share(x: int, ids: int, n: int, how: Any, share: Any, min_keep: int, far: Any, places: Any) -> int:
    """Keep the first candidates until they have a share, and at least min_keep; returns how many. See _border.

    If far candidates may change which are kept, keeps nothing and returns -1.
    """
    key, some, whole = _border(x, n, how, share, far, places)
    if some < 0:
        return -1
    if min_keep > 1:
        counting = (how[0], _COUNTED_BY_WEIGHT, how[2], how[3])
        if _masses(x, n, counting, key, key)[0] + some < min_keep:
            key, some, whole = _border(x, n, counting, (float(min(min_keep, n)), 0), far, places)
    listed = places[2]
    if 0 < whole < n // 4:
        return _keep_listed(ids, whole, how, some, places)
    _clear_marks(n, places)
    for j in range(some):
        put_u8(places[3] + get_i32(listed[0] + 4 * j), 1)
    return _keep_marked(x, ids, n, how, key, 1, places)


@inner
def _keep_order(
    x: int, ids: int, n: int, top: float, share: float, typical: int, min_keep: int, far: Any, places: Any
) -> int:
    """Keep the most probable, or those with a surprise near the entropy; returns how many, or as _keep_share."""
    middle = 0.0
    if typical != 0:
        if _count_above(x, n, top - _IMPOSSIBLE) < n:
            n = _keep_above(x, ids, n, top - _IMPOSSIBLE, places)
            x, ids = places[0], places[1]
        mean, mass = _mean_distance(x, n, top)
        middle = (mean * mass + far[1]) / (mass + far[0])
    return _keep_share(x, ids, n, (typical, _WEIGHED, top, middle), (share, typical), min_keep, far, places)


@inner
def _keep_mass(x: int, ids: int, n: int, top: float, share: float, typical: int, min_keep: int, places: Any) -> int:
    """Top-p (arXiv:1904.09751), or typical-p (arXiv:2202.00666): returns how many are kept.

    Near candidates are looked at first, and all if those cannot decide.
    """
    near, far = _near(x, ids, n, top, (1.0 + share) / 2.0 if typical != 0 else share, min_keep, places)
    kept = -1
    if near > 0:
        kept = _keep_order(places[6][0], places[6][1], near, top, share, typical, 1, far, places)
    return kept if kept > 0 else _keep_order(x, ids, n, top, share, typical, min_keep, _NONE_FAR, places)


@inner
def _near(x: int, ids: int, n: int, top: float, share: float, min_keep: int, places: Any) -> Any:
    """Copy the candidates that have about a share of the mass, if they are few.

    Returns how many, and about the others what _NONE_FAR has, summed up in single precision. min_keep: more than 1 is
    not for near candidates alone.
    """
    sampled, bound = n // 16 // max(n // 16 // _SAMPLED, 1) * 16, -math.inf
    if n >= MANY and min_keep <= 1:
        bound = float(_guess(x, n, (0, _WEIGHED, top, 0.0), share, places[2], places[5])[1])
    if bound <= top - _FARTHEST or _count_above(places[2][1], sampled, bound) * _FEW > sampled:
        return 0, _NONE_FAR
    near, mass, moment, second = 0, zero_f64(), zero_f64(), zero_f64()
    highest, border = splat_f32(np.float32(top)), splat_f32(np.float32(bound))
    farthest, factor = splat_f32(np.float32(_FARTHEST)), splat_f32(np.float32(-_LOG2E))
    for begin in range(0, n, _PART):
        masses, moments, seconds = zero_f32(), zero_f32(), zero_f32()
        for i in range(begin, min(n, begin + _PART), 16):
            values = _block(x, n, i)
            far = not_above_f32(values, border)
            inside = 16 - count_lanes(far)
            if _COMPRESSES or inside > 0:
                append_f32(places[6][0] + 4 * near, values, without(far))
                append_i32(places[6][1] + 4 * near, count_up(i) if ids == 0 else load_i32(ids + 4 * i), without(far))
                near += inside
            distances = min_f32(sub_f32(highest, where_f32(far, values)), farthest)
            weight = exp2_f32(mul_f32(distances, factor))
            product = mul_f32(weight, distances)
            masses, moments = add_f32(masses, weight), add_f32(moments, product)
            seconds = fma(product, distances, seconds)
        mass, moment = add_f64(mass, widen_f64(masses)), add_f64(moment, widen_f64(moments))
        second = add_f64(second, widen_f64(seconds))
    return near, (sum_f64(mass), sum_f64(moment), sum_f64(second), top - bound)


@inner
def _keep_listed(ids: int, count: int, how: Any, some: int, places: Any) -> int:
    """Keep those of the first `count` listed that come no later than entry `some` of the narrowed list."""
    positions, logits, keys, weights, exact, again = places[2]
    border, last, kept = get_f64(exact + 8 * (some - 1)), get_i32(positions + 4 * (some - 1)), 0
    _describe(logits, count, how, (keys, weights, exact))
    for j in range(count):
        value, position = get_f64(exact + 8 * j), get_i32(again + 4 * j)
        if value > border or (value == border and position <= last):
            put_f32(places[0] + 4 * kept, get_f32(logits + 4 * j))
            put_i32(places[1] + 4 * kept, position if ids == 0 else get_i32(ids + 4 * position))
            kept += 1
    return kept


@inner
def _exclude_top(x: int, ids: int, n: int, top: float, threshold: float, min_keep: int, places: Any) -> Any:
    """Drop all tokens that reach the threshold, except the least probable of them.

    XTC, "exclude top choices" (text-generation-webui pull request 6335). Returns how many are left, and the highest.
    """
    listed, how = places[2], (0, _WEIGHED, top, 0.0)
    total, doubt = _weigh_roughly(x, n, top, _LOG2E, places[4])
    lower = top - 1e-3 + math.log(threshold * total) if threshold > 0.0 else -math.inf
    count = _list(x, n, how, _INFINITY, np.float32(lower - 1e-6 * abs(lower)), listed)
    for j in range(count):
        if abs(get_f64(listed[3] + 8 * j) - threshold * total) <= threshold * doubt and doubt > 0.0:
            total, doubt = _weigh(x, n, top, _LOG2E, places[4]), 0.0
    reaching, least, last = 0, 2.0, -1
    for j in range(count):
        weight = get_f64(listed[3] + 8 * j)
        if weight / total >= threshold:
            reaching += 1
            if weight <= least:
                least, last = weight, j
    if reaching < 2 or n - reaching + 1 < min_keep:
        return n, top
    _clear_marks(n, places)
    for j in range(count):
        if get_f64(listed[3] + 8 * j) / total >= threshold and j != last:
            put_u8(places[3] + get_i32(listed[0] + 4 * j), 1)
    highest = float(get_f32(listed[1] + 4 * last))
    return _keep_marked(x, ids, n, how, _INFINITY, 0, places), highest


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
def _first_of(x: int, n: int, value: Any) -> int:
    """The first position of a value."""
    same, i = splat_f32(value), 0
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
    weights, parts, part, mass, found, last = places[2][3], places[4], 0, 0.0, -1, 0.0
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
    total, doubt = _weigh_roughly(x, n, how[0], how[1], places[4])
    found, before_it, after_it = _find(x, n, how, uniform * total, places)
    if doubt > 0.0 and min(before_it, after_it) <= doubt * max(uniform, 1.0 - uniform):
        total = _weigh(x, n, how[0], how[1], places[4])
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
    if sigmas > 0.0:  # arXiv:2411.07641
        n = _keep_above(x, ids, n, top - sigmas * _deviation(x, n, top), places)
        x, ids = own, own_ids
    if n >= MANY and 0.0 < top_k <= _MOST_FIRST:
        n = _keep_likely(x, ids, n, top_k, places)
        x, ids = own, own_ids
    if top_k > 0.0 and top_k < n:
        n = _keep_share(x, ids, n, (0, _COUNTED, top, 0.0), (top_k, 0), 1, _NONE_FAR, places)
        x, ids = own, own_ids
    if typical_p < 1.0:
        n = _keep_mass(x, ids, n, top, typical_p, 1, min_keep, places)
        x, ids = own, own_ids
        top = float(_extremes(x, n, places[2][1])[0])
    if top_p < 1.0:
        n = _keep_mass(x, ids, n, top, top_p, 0, min_keep, places)
        x, ids = own, own_ids
    if min_p > -math.inf:  # arXiv:2407.01082
        bound = top + min_p
        if min_keep > 1 and _count_above(x, n, bound) < min_keep:
            counting = (0, _COUNTED, top, 0.0)
            n = _keep_share(x, ids, n, counting, (float(min(min_keep, n)), 0), 1, _NONE_FAR, places)
        else:
            n = _keep_above(x, ids, n, bound, places)
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
        position = _first_of(x, n, highest)
    else:
        if get_f64(rules + 8 * Rule.TOTAL) != 0.0:
            put_f64(choice + 8 * Choice.TOTAL, _weigh_roughly(x, n, top, _LOG2E, places[4])[0])
        if mu == 0.0:
            x, ids, n, top = _filtered(x, ids, n, highest, rules, places)
        factor = _LOG2E / _temperature(x, n, top, rules)
        if mu != 0.0:  # Mirostat 2 (arXiv:2007.14966)
            surprise = _LOG2E * math.log(_weigh(x, n, top, factor, places[4]))
            if surprise <= mu:
                n = _keep_above(x, ids, n, top + (surprise - mu - _ROUNDING) / factor, places)
            else:
                _clear_marks(n, places)
                put_u8(places[3] + _first_of(x, n, highest), 1)
                n = _keep_marked(x, ids, n, (0, _COUNTED, top, 0.0), _INFINITY, 1, places)
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
        {Rule.TYPICAL_P: 0.9},
        {Rule.TOP_K: 20},
        {Rule.XTC: 0.001, Rule.TOTAL: 1},
    ]
    for number, change in enumerate([*changes, *many]):
        count = 70 if number < len(changes) else MANY + 5
        s = Sample(scratch=memory_bytes(count))
        rules = [change.get(Rule(i), value) for i, value in enumerate(_NEUTRAL)]
        allowed = s.array(s.random.integers(0, 3, count), np.uint8) if change == {} else 0
        logits = s.normal(count) if Rule.TYPICAL_P not in change else s.array(4 * s.random.normal(size=count))
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
        highest, possible = _extremes(x, n, places[2][1])
        put_f64(choice + 8 * Choice.HIGHEST, float(highest))
        put_f64(choice + 8 * Choice.TOKEN, -1.0)
        if highest < _INFINITY:
            if allowed != 0 or possible < n:
                n = _keep_allowed(x, n, allowed, places)
                if n > 0:
                    highest, _ = _extremes(places[0], n, places[2][1])
                    _choose(places[0], places[1], n, highest, rules, choice, places)
            else:
                _choose(x, 0, n, highest, rules, choice, places)
