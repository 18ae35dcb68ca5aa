"""Tables of rotary embeddings: their values at any position, and that far positions only cost what is used."""

import numpy as np
import psutil
import pytest

from models.layer_sizes import Heads
from models.rope_config import QueryGrowth
from models.rope_tables import RopeTable

RADIANS = np.exp(-np.arange(24) / 5.0)

HEADS = Heads(queries=1, keys=1, size=64, rope_size=48)


def table(growth: QueryGrowth | None = None) -> RopeTable:
    return RopeTable(HEADS, RADIANS, 1.25, growth)


def rows(found: RopeTable, first: int, last: int) -> np.ndarray:
    """The table's rows in memory."""
    return np.asarray(found._table[first : last + 1], np.float32)


@pytest.mark.parametrize(
    "spans", [[(0, 0)], [(255, 256)], [(100_000, 100_511)], [(5, 9), (70_000, 70_000), (300, 301)]]
)
@pytest.mark.parametrize("growth", [None, QueryGrowth(0.1, 64)])
def test_entries_are_cosines_and_sines_of_their_positions(
    spans: list[tuple[int, int]], growth: QueryGrowth | None
) -> None:
    found = table(growth)
    found.cover([(3, 3)])
    found.cover(spans)
    for first, last in spans:
        positions = np.arange(first, last + 1)[:, None]
        expected = np.zeros((last + 1 - first, 2, 32))
        expected[:, 0, 24:] = 1.0
        expected[:, 0, :24], expected[:, 1, :24] = (
            1.25 * np.cos(positions * RADIANS),
            1.25 * np.sin(positions * RADIANS),
        )
        if growth is not None:
            expected *= (1 + growth.scale * np.log1p(positions // growth.length))[:, :, None]
        np.testing.assert_allclose(rows(found, first, last), expected, rtol=1e-6, atol=1e-6)


def test_far_positions_take_the_memory_of_what_is_used() -> None:
    """A table of all earlier positions would take 256 MiB."""
    before = psutil.Process().memory_info().rss
    found = table()
    found.cover([(1 << 20, (1 << 20) + 511)])
    assert psutil.Process().memory_info().rss - before < 16 << 20
    assert found.address % 64 == 0
