"""The tile width of a step's products, by the time that steps took with each width."""

from collections.abc import Mapping

import pytest

from cpu_kernels import program
from cpu_kernels.isa import POLICIES, Isa

# Milliseconds of processor time by rows, of Qwen 2.5 Coder 1.5B (AVX2 and AVX-VNNI: 0.5B) in Q4_K_M on one thread of a
# Zen 5, 2026-11-28, for tiles of 2, 4, 8 and 12 tokens.
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
        3: (19.1, 15.9),
        5: (25.5, 25.6),
        9: (38.7, 36.6),
        13: (51.6, 47.2),
        50: (170.2, 144.6),
    },
    Isa.AVX2: {
        3: (23.2, 19.9),
        5: (33.8, 36.9),
        7: (43.2, 37.2),
        9: (53.0, 56.7),
        13: (72.5, 72.2),
        22: (110.0, 104.0),
        50: (237.7, 219.1),
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
