"""The probes do the work they count: every byte is read, every thread multiplies."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cpu_kernels import roofline
from cpu_kernels.cores import largest_cache
from cpu_kernels.memory import aligned_zeros
from cpu_kernels.threads import ThreadTeam


@pytest.fixture(params=[1, 2])
def team(request: pytest.FixtureRequest) -> Iterator[ThreadTeam]:
    team = ThreadTeam(request.param)
    yield team
    team.close()


def test_reading_adds_up_every_integer_once(team: ThreadTeam) -> None:
    blocks = 13
    buffer = aligned_zeros((blocks * 64,), np.int32)
    buffer[:] = np.arange(len(buffer))
    results = aligned_zeros((2 * 1024,), np.int32)
    arguments = roofline.Buffer256(buffer=buffer.ctypes.data, blocks=blocks, results=results.ctypes.data)
    roofline.Probe(team, roofline.read, 0, arguments, keep=[buffer, results]).run()
    assert int(results.sum()) == int(buffer.sum())


def test_the_buffer_is_touched_before_it_is_read(team: ThreadTeam) -> None:
    buffer = aligned_zeros((7 * 256,), np.uint8)
    buffer[:] = 1
    arguments = roofline.Buffer256(buffer=buffer.ctypes.data, blocks=7, results=0)
    roofline.Probe(team, roofline.fill, 0, arguments, keep=[buffer]).run()
    assert not buffer.any()
    assert roofline.read_probe(team, 1000).amount == 768


def test_amounts_grow_with_the_threads(team: ThreadTeam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_TURNS", 10)
    int8, floats = roofline.int8_probes(team), roofline.float_probes(team)
    # iterations x accumulators x sixteen lanes (of four bytes) x 2
    assert [probe.amount for probe in int8] == [10 * width * 16 * 4 * 2 * team.threads for width in (6, 12)]
    assert [probe.amount for probe in floats] == [10 * width * 16 * 2 * team.threads for width in (4, 12)]
    for probe in [*int8, *floats]:
        probe.run()


def test_the_largest_cache_is_found(tmp_path: Path) -> None:
    for index, size in enumerate(["32K", "512K", "32768K", "garbage"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert largest_cache(tmp_path) == 32 << 20
    (tmp_path / "index2" / "size").write_text("96M\n")
    assert largest_cache(tmp_path) == 96 << 20
    assert largest_cache(tmp_path / "nowhere") == 32 << 20
