"""The tile width of a step's products, by the time that steps took with each width."""

import math
from collections.abc import Mapping

import pytest

from cpu_kernels import program
from cpu_kernels.isa import POLICIES, Isa

# Milliseconds of processor time by rows, of Qwen 2.5 Coder 1.5B in Q4_K_M on one thread of a Zen 5, 2026-11-28, for
# tiles of 2, 4, 8 and 12 tokens, on AVX2 and AVX-VNNI of 2, 3 and 4. There 50 rows are of the 0.5B, without 3.
MEASURED: Mapping[Isa, Mapping[int, tuple[float, ...]]] = {
    Isa.AVX512_VNNI: {
        3: (38.3, 27.4, 35.0, 50.1),
        5: (50.2, 43.3, 36.4, 51.1),
        6: (50.1, 43.0, 35.8, 51.4),
        7: (64.3, 42.7, 36.8, 53.3),
        9: (81.2, 62.2, 70.1, 51.8),
        10: (73.9, 59.5, 69.1, 50.8),
        13: (95.4, 77.5, 68.7, 98.7),
        17: (118.0, 94.5, 101.7, 98.0),
        20: (132.6, 96.2, 102.7, 99.7),
        22: (143.0, 113.7, 104.2, 100.9),
        26: (167.2, 133.5, 138.9, 156.2),
        34: (213.0, 169.3, 176.1, 153.4),
        50: (311.5, 246.9, 244.4, 253.5),
        96: (585.8, 449.2, 417.7, 407.3),
    },
    Isa.AVX512: {
        5: (49.5, 47.3, 41.6, 60.5),
        9: (74.2, 69.4, 80.8, 60.7),
        13: (99.3, 92.4, 82.6, 121.1),
        24: (163.2, 135.2, 124.4, 122.1),
        96: (612.3, 532.6, 490.2, 490.0),
    },
    Isa.AVX_VNNI: {
        3: (48.6, 33.0, 39.9),
        4: (49.7, 65.1, 39.7),
        5: (66.2, 65.6, 82.8),
        6: (67.8, 65.8, 83.5),
        7: (85.2, 90.0, 82.4),
        8: (84.7, 90.7, 82.1),
        9: (100.8, 89.2, 115.6),
        10: (100.4, 117.1, 117.2),
        12: (118.1, 117.3, 119.3),
        14: (134.4, 140.0, 149.6),
        16: (150.1, 162.9, 150.0),
        50: (170.2, math.inf, 144.6),
    },
    Isa.AVX2: {
        3: (53.1, 39.3, 48.6),
        4: (52.9, 68.8, 48.7),
        5: (71.0, 68.6, 87.4),
        6: (71.9, 68.5, 86.6),
        7: (87.3, 94.2, 84.7),
        8: (87.4, 97.5, 87.4),
        9: (106.5, 97.7, 123.5),
        10: (106.2, 123.3, 126.2),
        12: (123.3, 124.4, 123.8),
        14: (143.8, 149.0, 155.6),
        16: (161.1, 179.4, 157.7),
        50: (237.7, math.inf, 219.1),
    },
}


@pytest.mark.parametrize("isa", POLICIES)
def test_the_width_is_about_the_fastest_that_was_measured(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "POLICY", POLICIES[isa])
    monkeypatch.setattr(program, "TILE_WIDTHS", POLICIES[isa].tile_widths)
    assert program.choose_width(1) == 1
    for rows in range(2, 200):
        width = program.choose_width(rows)
        assert width in POLICIES[isa].tile_widths[1:]
        assert width < 2 * rows
    for rows, times in MEASURED.get(isa, {}).items():
        chosen = times[POLICIES[isa].tile_widths.index(program.choose_width(rows)) - 1]
        assert chosen <= 1.05 * min(times), (rows, program.choose_width(rows))
