"""Kimi delta attention against NumPy, token by token in double precision, with a slot per page or one for all."""

import numpy as np
import pytest

from cpu_kernels.kda import KdaShape, head_floats, kda
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


class Layer:
    """A sequence of random rows through one layer, whose slots are initialised with noise."""

    def __init__(self, heads: int, size: int, reach: int, slots: list[int], fast: float = 1.0) -> None:
        """fast: how much states forget."""
        random = np.random.default_rng(size)
        self.heads, self.size, self.reach = heads, size, reach
        self.padded = -(-size // 16) * 16

        def padded_heads(*shape: int) -> np.ndarray:
            values = np.zeros((*shape, self.padded), np.float32)
            values[..., :size] = random.standard_normal((*shape, size))
            return values

        self.rows, self.gates = padded_heads(LENGTH, 3, heads), padded_heads(LENGTH, heads)
        self.decay, self.biases = padded_heads(LENGTH, heads), padded_heads(heads)
        self.beta = random.standard_normal((LENGTH, heads)).astype(np.float32)
        self.rates = (-fast * random.random(heads)).astype(np.float32)
        self.weights, self.norm = padded_heads(heads, reach, 3), padded_heads()
        self.table, self.slots = aligned(len(TABLE), np.int32), aligned(2 * GROUP, np.int32)
        self.table[:] = TABLE
        self.slots[[place // PLACES * GROUP + place % PLACES for place in TABLE]] = slots
        self.bytes = 4 * heads * head_floats(self.padded, reach)
        self.states = aligned((max(slots) + 1) * self.bytes // 4, np.float32)
        self.states[:] = np.nan

    def append(self, start: int, stop: int, threads: int = 3) -> np.ndarray:
        """Compute rows start..stop-1 in one step: [row][head][value]."""
        count, width = stop - start, 4 * self.heads * self.padded
        rows, decay, gates, beta = (
            copied(getattr(self, name)[start:stop]) for name in ("rows", "decay", "gates", "beta")
        )
        biases, rates, weights, norm = map(copied, (self.biases, self.rates, self.weights, self.norm))
        factors = copied(np.array([EPSILON, self.size**-0.5, EPSILON]))
        segment, shape, scratch = aligned(4, np.int64), aligned(KdaShape.COUNT, np.int64), aligned(threads * SCRATCH)
        segment[:] = (0, count, start, address(self.table))
        sizes = (self.heads, self.padded, self.size, self.reach, 0, 0, 0)
        shape[:] = (*sizes, GROUP, PLACES, self.bytes, self.bytes // self.heads)
        out = aligned(count * self.heads * self.size, np.float32)
        fields = {Step.SEGMENTS: address(segment), Step.SEGMENT_COUNT: 1}
        fields |= {Step.SCRATCH: address(scratch), Step.SCRATCH_STRIDE: SCRATCH}
        step = record(Step.SIZE, {int(field): value for field, value in fields.items()})
        arguments = (
            *(address(shape), address(self.states), address(self.slots), address(rows), 3 * width, width),
            *(address(decay), width, address(gates), width, address(beta), 4 * self.heads),
            *(address(biases), address(rates), address(weights), address(norm), address(factors)),
            *(address(out), 4 * self.heads * self.size),
        )
        run_on_threads(kda, operation(*arguments), step, threads)
        return out.reshape(count, self.heads, self.size).copy()

    def expected(self) -> np.ndarray:
        """The expected result of all rows, by the recurrence."""
        size, out = self.size, np.zeros((LENGTH, self.heads, self.size))
        rows = np.concatenate([np.zeros((self.reach - 1, *self.rows.shape[1:])), self.rows.astype(np.float64)])
        weights = self.weights.transpose(1, 2, 0, 3)
        mixed = sum(weights[i] * rows[i : i + LENGTH] for i in range(self.reach))
        queries, keys, values = (mixed / (1 + np.exp(-mixed)))[..., :size].swapaxes(0, 1)
        queries, keys = (one / np.sqrt((one**2).sum(-1, keepdims=True) + EPSILON) for one in (queries, keys))
        grown = np.log1p(np.exp((self.decay + self.biases).astype(np.float64)))[..., :size]
        fade = np.exp2(self.rates[:, None].astype(np.float64) * grown)
        beta = 1 / (1 + np.exp(-self.beta.astype(np.float64)))
        for h in range(self.heads):
            state = np.zeros((size, size))
            for t in range(LENGTH):
                state = fade[t, h][:, None] * state
                key = keys[t, h]
                state = state + np.outer(key, beta[t, h] * (values[t, h] - key @ state))
                found = queries[t, h] * size**-0.5 @ state
                found = found / np.sqrt((found**2).mean() + EPSILON) * self.norm[:size]
                out[t, h] = found / (1 + np.exp(-self.gates[t, h, :size].astype(np.float64)))
        return out


@pytest.mark.parametrize(("heads", "size", "reach"), [(4, 32, 4), (3, 24, 3), (2, 16, 17), (3, 48, 2)])
def test_rows_are_the_same_in_any_pieces(heads: int, size: int, reach: int) -> None:
    check_any_pieces(lambda slots: Layer(heads, size, reach, slots))


def test_states_that_forget_at_once_stay_finite() -> None:
    """A page's decays together are far beyond what single precision can invert."""
    check_any_pieces(lambda slots: Layer(2, 32, 4, slots, fast=60.0))


def test_a_slot_serves_every_row_of_its_page() -> None:
    """Recomputing rows over others, from the middle of a page on, gives the same results."""
    layer = Layer(2, 32, 4, [0, 1, 2, 3])
    result = layer.append(0, LENGTH)
    other = layer.rows[40:].copy()
    layer.rows[40:] = other[::-1]
    assert not np.array_equal(layer.append(40, LENGTH), result[40:])
    layer.rows[40:] = other
    np.testing.assert_array_equal(layer.append(40, LENGTH), result[40:])
