"""Selective scans against NumPy, token by token in double precision, with a slot per page or one for all."""

import numpy as np
import pytest

from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.norms import norm_groups_pack
from cpu_kernels.records import Act, Form, Step
from cpu_kernels.selective_scan import ScanShape, selective_scan, unit_floats
from tests.cpu_kernels.kernel_harness import (
    address,
    aligned,
    check_any_pieces,
    copied,
    operation,
    record,
    run_on_threads,
)

GROUP, PLACES = 2, 6
TABLE = [7, 0, 1, 6]  # in groups of two pages that take six place numbers each
LENGTH = len(TABLE) * PAGE_TOKENS
SCRATCH = 1 << 18


def padded(size: int) -> int:
    return -(-size // 16) * 16


class Scan:
    """A sequence of random rows through one layer, whose slots are initialised with noise."""

    def __init__(
        self, groups: int, group_units: int, heads: int, size: int, state: int, reach: int, slots: list[int]
    ) -> None:
        """heads: of a unit."""
        random = np.random.default_rng(size)
        self.groups, self.group_units, self.heads, self.size, self.state = groups, group_units, heads, size, state
        self.units, self.reach = groups * group_units, reach
        self.all_heads = self.units * heads

        def of(count: int, parts: int, length: int) -> np.ndarray:
            values = np.zeros((count, parts, padded(length)), np.float32)
            values[..., :length] = random.standard_normal((count, parts, length))
            return values

        self.of_groups, self.x, self.gates = (
            of(LENGTH, 2 * groups, state),
            of(LENGTH, self.all_heads, size),
            of(LENGTH, self.all_heads, size),
        )
        self.weights = of(reach + 1, 2 * groups, state), of(reach + 1, self.all_heads, size)
        self.times = random.standard_normal((LENGTH, self.all_heads)).astype(np.float32)
        self.constants = np.zeros((self.all_heads, 4), np.float32)
        self.constants[:, 0], self.constants[:, 2] = random.standard_normal((2, self.all_heads))
        self.constants[:, 1] = -random.random(self.all_heads)
        self.table, self.slots = aligned(len(TABLE), np.int32), aligned(2 * GROUP, np.int32)
        self.table[:] = TABLE
        self.slots[[place // PLACES * GROUP + place % PLACES for place in TABLE]] = slots
        self.bytes = 4 * self.units * unit_floats(heads, padded(state), padded(size), reach)
        self.states = aligned((max(slots) + 1) * self.bytes // 4, np.float32)
        self.states[:] = np.nan

    def append(self, start: int, stop: int, threads: int = 3) -> np.ndarray:
        """Compute rows start..stop-1 in one step: [row][head][value]."""
        count = stop - start
        parts = [values.reshape(LENGTH, -1) for values in (self.of_groups, self.x, self.gates, self.times)]
        together = np.concatenate(parts, axis=1)[start:stop]
        weights = np.concatenate([values.reshape(self.reach + 1, -1) for values in self.weights], axis=1)
        convolved, width = weights.shape[1], together.shape[1]
        rows, weights, constants = copied(together), copied(weights), copied(self.constants)
        gates = address(rows) + 4 * convolved
        segment, shape, scratch = aligned(4, np.int64), aligned(ScanShape.COUNT, np.int64), aligned(threads * SCRATCH)
        segment[:] = (0, count, start, address(self.table))
        sizes = (self.units, self.heads, self.group_units, padded(self.state), padded(self.size), self.size, self.reach)
        shape[:] = (*sizes, GROUP, PLACES, self.bytes, self.bytes // self.units)
        out = aligned(count * self.all_heads * self.size, np.float32)
        fields = {Step.SEGMENTS: address(segment), Step.SEGMENT_COUNT: 1}
        fields |= {Step.SCRATCH: address(scratch), Step.SCRATCH_STRIDE: SCRATCH}
        step = record(Step.SIZE, {int(field): value for field, value in fields.items()})
        arguments = (
            *(address(shape), address(self.states), address(self.slots), address(rows), 4 * width),
            *(gates, gates + 4 * self.gates[0].size, address(constants), address(weights), 4 * convolved),
            *(address(out), 4 * self.all_heads * self.size),
        )
        run_on_threads(selective_scan, operation(*arguments), step, threads)
        return out.reshape(count, self.all_heads, self.size).copy()

    def expected(self) -> np.ndarray:
        """The expected result of all rows, by the recurrence."""
        out = np.zeros((LENGTH, self.all_heads, self.size))
        mixed = []
        for values, weights in zip((self.of_groups, self.x), self.weights, strict=True):
            rows = np.concatenate([np.zeros((self.reach - 1, *values.shape[1:])), values.astype(np.float64)])
            total = sum(weights[i] * rows[i : i + LENGTH] for i in range(self.reach)) + weights[self.reach]
            mixed.append(total / (1 + np.exp(-total)))
        both = mixed[0].reshape(LENGTH, self.groups, 2, -1)[..., : self.state]
        dt = np.log1p(np.exp(self.times.astype(np.float64) + self.constants[:, 0]))
        for head in range(self.all_heads):
            state, group = np.zeros((self.state, self.size)), head // (self.heads * self.group_units)
            for t in range(LENGTH):
                x, gate = mixed[1][t, head, : self.size], self.gates[t, head, : self.size].astype(np.float64)
                state = np.exp2(dt[t, head] * self.constants[head, 1]) * state
                state = state + np.outer(both[t, group, 0], dt[t, head] * x)
                found = both[t, group, 1] @ state + self.constants[head, 2] * x
                out[t, head] = found * gate / (1 + np.exp(-gate))
        return out


SIZES = [(1, 3, 2, 32, 48, 4), (2, 1, 3, 24, 20, 3), (3, 2, 1, 16, 16, 17), (1, 1, 1, 8, 64, 2)]


@pytest.mark.parametrize(("groups", "group_units", "heads", "size", "state", "reach"), SIZES)
def test_rows_are_the_same_in_any_pieces(
    groups: int, group_units: int, heads: int, size: int, state: int, reach: int
) -> None:
    check_any_pieces(lambda slots: Scan(groups, group_units, heads, size, state, reach, slots))


def test_a_slot_serves_every_row_of_its_page() -> None:
    """Recomputing rows over others, from any row of a page on, gives the same results."""
    scan = Scan(2, 2, 2, 32, 32, 4, [0, 1, 2, 3])
    result = scan.append(0, LENGTH)
    x, other = scan.x.copy(), scan.x[40:][::-1].copy()
    scan.x[40:] = other
    scan.append(40, LENGTH)
    scan.x = x
    np.testing.assert_array_equal(scan.append(40, LENGTH), result[40:])
    for start in (33, 47, 48, 63):
        np.testing.assert_array_equal(scan.append(start, start + 1), result[start : start + 1])


@pytest.mark.parametrize(("size", "parts", "rows"), [(24, 3, 5), (64, 1, 1), (40, 2, 1), (16, 4, 9)])
def test_parts_of_a_row_are_normalised_apart(size: int, parts: int, rows: int) -> None:
    random, epsilon, k = np.random.default_rng(3), 1e-5, size * parts
    x, weight = random.standard_normal((rows, k)).astype(np.float32), random.standard_normal(k).astype(np.float32)
    given, weights = aligned(rows * k + 16, np.float32), aligned(k + 16, np.float32)
    given[: rows * k], weights[:k] = x.ravel(), weight
    given[rows * k :] = np.nan
    epsilons, packed, scratch = copied(np.array([epsilon])), aligned(rows * k, np.float32), aligned(1 << 14)
    act = aligned(2 * Act.SIZE, np.int64)
    act[[Act.FLOATS, Act.SIZE + Act.FLOATS]] = address(packed)
    fields = {Step.ROWS: rows, Step.WIDTH: 1, Step.SCRATCH: address(scratch), Step.SCRATCH_STRIDE: 1 << 14}
    step = record(Step.SIZE, {int(field): value for field, value in fields.items()})
    arguments = (address(given), 4 * k, address(weights), size, parts, int(Form.FLOATS), address(act))
    run_on_threads(norm_groups_pack, operation(*arguments, address(epsilons)), step, 1)
    grouped = x.reshape(rows, parts, size).astype(np.float64)
    expected = grouped / np.sqrt((grouped**2).mean(-1, keepdims=True) + epsilon)
    np.testing.assert_allclose(packed.reshape(rows, k), expected.reshape(rows, k) * weight, rtol=1e-5)
