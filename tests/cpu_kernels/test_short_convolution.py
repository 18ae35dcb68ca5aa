"""Short convolutions against NumPy, with previous rows in the step, in the same page, or in the page before."""

from itertools import pairwise

import numpy as np
import pytest

from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.records import Step
from cpu_kernels.short_convolution import short_convolution
from tests.cpu_kernels.kernel_harness import address, aligned, operation, record, run_on_threads

WIDTH, GROUP, PLACES, KEPT = 64, 2, 6, 8
TABLE = [7, 0, 1, 6]  # in groups of two pages that take six place numbers each


class Convolution:
    """A sequence of random rows b, c, x, whose pages are initialised with noise."""

    def __init__(self, reach: int, length: int) -> None:
        random = np.random.default_rng(reach)
        self.reach, self.rows = reach, random.standard_normal((length, 3, WIDTH)).astype(np.float32)
        self.weights, self.table = aligned(reach * WIDTH, np.float32), aligned(len(TABLE), np.int32)
        self.weights[:] = random.standard_normal(reach * WIDTH)
        self.table[:] = TABLE
        self.pages = aligned(2 * GROUP * (reach - 1) * WIDTH, np.float32)
        self.pages[:] = np.nan
        self.states = aligned(KEPT * (reach - 1) * WIDTH, np.float32)

    def append(self, start: int, stop: int, threads: int = 3) -> np.ndarray:
        """Compute rows start..stop-1 in one step."""
        buffer = aligned((stop - start) * 3 * WIDTH, np.float32)
        buffer[:] = self.rows[start:stop].ravel()
        segment = aligned(4, np.int64)
        segment[:] = (0, stop - start, start, address(self.table))
        step = record(Step.SIZE, {int(Step.SEGMENTS): address(segment), int(Step.SEGMENT_COUNT): 1})
        page = 4 * (self.reach - 1) * WIDTH
        sizes = (12 * WIDTH, 4 * WIDTH, address(self.weights), self.reach, WIDTH // 16)
        places = (address(self.pages), page, GROUP * page, PLACES, address(self.states), KEPT)
        run_on_threads(short_convolution, operation(address(buffer), *sizes, *places), step, threads)
        return buffer.reshape(-1, 3, WIDTH)[:, 0].copy()

    def expected(self) -> np.ndarray:
        """The expected result of all rows, in double precision."""
        b, c, x = self.rows.astype(np.float64).transpose(1, 0, 2)
        added = np.concatenate([np.zeros((self.reach - 1, WIDTH)), b * x])
        weights = self.weights.reshape(self.reach, WIDTH)
        return c * sum(weights[i] * added[i : i + len(b)] for i in range(self.reach))


@pytest.mark.parametrize("reach", [2, 3, 4, PAGE_TOKENS + 1])
def test_rows_are_added_up_the_same_in_any_pieces(reach: int) -> None:
    length = len(TABLE) * PAGE_TOKENS
    whole = Convolution(reach, length)
    result = whole.append(0, length)
    np.testing.assert_allclose(result, whole.expected(), rtol=1e-4, atol=1e-4)
    for cuts in (range(length + 1), (0, 1, 15, 16, 18, 33, 48, 63, 64), (0, 31, 47, 64)):
        parts = Convolution(reach, length)
        pieces = [parts.append(first, last, 1 + first % 5) for first, last in pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(pieces), result)
        np.testing.assert_array_equal(parts.pages, whole.pages)


def test_states_after_rows_are_those_that_a_page_would_keep() -> None:
    whole, short = Convolution(3, 64), Convolution(3, 64)
    whole.append(0, 21)
    whole.states[:] = 0
    whole.append(21, 26)
    states = whole.states.reshape(KEPT, 2, WIDTH)
    short.append(0, 21)
    for row in range(4):
        short.append(21 + row, 22 + row)
        page = short.pages.reshape(2 * GROUP, 2, WIDTH)[0]  # place 0 of the table
        np.testing.assert_array_equal(states[row], page)
    assert not states[4:].any()
