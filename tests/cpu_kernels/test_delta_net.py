"""Gated delta networks against NumPy, token by token in double precision, with a slot per page or one for all."""

import numpy as np
import pytest

from cpu_kernels.delta_net import Shape, delta_net, head_floats
from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.records import Step
from tests.cpu_kernels.kernel_harness import (
    address,
    aligned,
    check_any_pieces,
    copied,
    operation,
    record,
    run_on_threads,
)

GROUP, PLACES, EPSILON = 2, 6, 1e-5
TABLE = [7, 0, 1, 6]  # in groups of two pages that take six place numbers each
LENGTH = len(TABLE) * PAGE_TOKENS
SCRATCH = 1 << 18


class Network:
    """A sequence of random rows through one layer, whose slots are initialised with noise."""

    def __init__(self, groups: int, heads: int, size: int, reach: int, *, together: bool, slots: list[int]) -> None:
        random = np.random.default_rng(size)
        self.groups, self.heads, self.size, self.reach = groups, heads, size, reach
        self.padded = -(-size // 16) * 16
        self.across, self.between = (heads, 1) if together else (1, groups)

        def padded_heads(*shape: int) -> np.ndarray:
            values = np.zeros((*shape, self.padded), np.float32)
            values[..., :size] = random.standard_normal((*shape, size))
            return values

        self.rows = padded_heads(LENGTH, groups, 2 + heads)
        self.gates = padded_heads(LENGTH, groups, heads)
        self.beta, self.alpha = (random.standard_normal((LENGTH, groups * heads)).astype(np.float32) for _ in range(2))
        self.weights, self.norm = padded_heads(reach, groups, 2 + heads), padded_heads()
        self.constants = np.stack([random.standard_normal(groups * heads), -random.random(groups * heads)], axis=1)
        self.table, self.slots = aligned(len(TABLE), np.int32), aligned(2 * GROUP, np.int32)
        self.table[:] = TABLE
        pages = [place // PLACES * GROUP + place % PLACES for place in TABLE]
        self.slots[pages] = slots
        self.bytes = 4 * groups * head_floats(heads, self.padded, reach)
        self.states = aligned((max(slots) + 1) * self.bytes // 4, np.float32)
        self.states[:] = np.nan

    def append(self, start: int, stop: int, threads: int = 3) -> np.ndarray:
        """Compute rows start..stop-1 in one step: [row][head in the file's order][value]."""
        count, values = stop - start, self.groups * self.heads
        arrays = {name: copied(getattr(self, name)[start:stop]) for name in ("rows", "gates", "beta", "alpha")}
        weights, norm, constants = copied(self.weights), copied(self.norm), copied(self.constants)
        scales = copied(np.array([EPSILON, self.size**-0.5, EPSILON]))
        segment, shape, scratch = aligned(4, np.int64), aligned(Shape.COUNT, np.int64), aligned(threads * SCRATCH)
        segment[:] = (0, count, start, address(self.table))
        sizes = (self.groups, self.heads, self.padded, self.size, self.reach, self.across, self.between)
        shape[:] = (*sizes, GROUP, PLACES, self.bytes, self.bytes // self.groups)
        out = aligned(count * values * self.size, np.float32)
        fields = {Step.SEGMENTS: address(segment), Step.SEGMENT_COUNT: 1}
        fields |= {Step.SCRATCH: address(scratch), Step.SCRATCH_STRIDE: SCRATCH}
        step = record(Step.SIZE, {int(field): value for field, value in fields.items()})
        arguments = (
            *(address(shape), address(self.states), address(self.slots), address(arrays["rows"])),
            *(address(arrays["gates"]), 4 * values * self.padded, address(arrays["beta"]), address(arrays["alpha"])),
            *(4 * values, address(constants), address(weights), address(norm), address(scales)),
            *(address(out), 4 * values * self.size, 4 * self.rows[0].size),
        )
        run_on_threads(delta_net, operation(*arguments), step, threads)
        return out.reshape(count, values, self.size).copy()

    def expected(self) -> np.ndarray:
        """The expected result of all rows, by the recurrence."""
        size, out = self.size, np.zeros((LENGTH, self.groups * self.heads, self.size))
        rows = np.concatenate([np.zeros((self.reach - 1, *self.rows.shape[1:])), self.rows.astype(np.float64)])
        mixed = sum(self.weights[i] * rows[i : i + LENGTH] for i in range(self.reach))
        mixed = (mixed / (1 + np.exp(-mixed)))[..., :size]
        unit = mixed / np.sqrt((mixed**2).sum(-1, keepdims=True) + EPSILON)
        added, factors = self.constants.astype(np.float32).T.reshape(2, self.groups, self.heads).astype(np.float64)
        by_head = (LENGTH, self.groups, self.heads)
        fade = np.exp2(factors * np.log1p(np.exp(self.alpha.reshape(by_head) + added)))
        beta = 1 / (1 + np.exp(-self.beta.reshape(by_head).astype(np.float64)))
        for h in range(self.groups):
            for r in range(self.heads):
                state = np.zeros((size, size))
                for t in range(LENGTH):
                    query, key = unit[t, h, 0] * size**-0.5, unit[t, h, 1]
                    state = fade[t, h, r] * state
                    state = state + np.outer(key, beta[t, h, r] * (mixed[t, h, 2 + r] - key @ state))
                    found, gate = query @ state, self.gates[t, h, r, :size].astype(np.float64)
                    found = found / np.sqrt((found**2).mean() + EPSILON) * self.norm[:size]
                    out[t, h * self.across + r * self.between] = found * gate / (1 + np.exp(-gate))
        return out


@pytest.mark.parametrize(
    ("groups", "heads", "size", "reach"), [(4, 1, 32, 4), (2, 3, 24, 3), (1, 2, 16, 17), (3, 2, 48, 2)]
)
@pytest.mark.parametrize("together", [False, True])
def test_rows_are_the_same_in_any_pieces(groups: int, heads: int, size: int, reach: int, together: bool) -> None:
    check_any_pieces(lambda slots: Network(groups, heads, size, reach, together=together, slots=slots))


def test_a_slot_serves_every_row_of_its_page() -> None:
    """Recomputing rows over others, from any row of a page on, gives the same results."""
    network = Network(2, 2, 32, 4, together=False, slots=[0, 1, 2, 3])
    result = network.append(0, LENGTH)
    other = network.rows[40:].copy()
    network.rows[40:] = other[::-1]
    network.append(40, LENGTH)
    network.rows[40:] = other
    for start in (40, 33, 47, 48, 63):
        np.testing.assert_array_equal(network.append(start, LENGTH), result[start:]) if start <= 40 else None
        np.testing.assert_array_equal(network.append(start, start + 1), result[start : start + 1])
