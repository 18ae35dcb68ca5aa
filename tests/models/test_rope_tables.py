"""Tables of rotary embeddings: their values at any position, and that far positions only cost what is used."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from gguf_io import open_model
from models.layers.rope import RopeTable
from models.native_runner import NativeRunner
from models.sizes.attention import Heads
from models.sizes.rope import QueryGrowth
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write

RADIANS = np.exp(-np.arange(24) / 5.0)

HEADS = Heads(queries=1, keys=1, size=64, rope_size=48)


def table(growth: QueryGrowth | None = None) -> RopeTable:
    return RopeTable(HEADS, RADIANS, 1.25, growth)


def rows(found: RopeTable, first: int, last: int) -> np.ndarray:
    """The table's rows in memory."""
    return np.asarray(found.table[first : last + 1], np.float32)


@pytest.mark.parametrize(
    "spans", [[(0, 0)], [(255, 256)], [(100_000, 100_511)], [(5, 9), (70_000, 70_000), (300, 301)]]
)
@pytest.mark.parametrize("growth", [None, QueryGrowth(0.1, 64), QueryGrowth(0.1, 64, offset=1)])
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
            expected *= (1 + growth.scale * np.log1p((positions + growth.offset) // growth.length))[:, :, None]
        np.testing.assert_allclose(rows(found, first, last), expected, rtol=1e-6, atol=1e-6)


def test_far_positions_take_the_memory_of_what_is_used() -> None:
    """A table of all earlier positions would take 256 MiB."""
    before = psutil.Process().memory_info().rss
    found = table()
    found.cover([(1 << 20, (1 << 20) + 511)])
    assert psutil.Process().memory_info().rss - before < 16 << 20
    assert found.address % 64 == 0


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("name", ["granite", "granitemoe"])
def test_a_file_says_whether_granite_rotates_heads(name: str, rotated: bool, tmp_path: Path) -> None:
    """Without rotation, and with one layer, the last token cannot know the order of those before it."""
    extra = {**MODELS[name].extra, "rope.scaling.finetuned": rotated}
    path = write(replace(MODELS[name], layers=1, extra=extra), tmp_path / "model.gguf")
    with open_model(path) as file:
        runner = NativeRunner(file, kv_bytes=1 << 20, threads=1)
    try:
        before = np.random.default_rng(4).permutation(MODELS[name].vocabulary)[:40].tolist()
        logits = []
        for order in (before, before[::-1]):
            sequence = runner.create_sequence()
            logits.append(runner.run([*order, 7], range(41), [sequence] * 41, [40])[0].copy())
        # Keys and values are rounded alike wherever they are stored.
        same = np.allclose(*logits, atol=1e-3 * logits[0].std())
    finally:
        runner.close()
    assert same is not rotated
