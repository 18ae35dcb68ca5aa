"""Prefetch distances: the chosen ones are stored, can be overridden, and change no result."""

import logging
import time
from pathlib import Path

import numpy as np
import pytest

from cpu_kernels import PrefetchError, tuning
from cpu_kernels.formats.table import WEIGHT_FORMATS
from cpu_kernels.isa import POLICY
from cpu_kernels.kernel_cache import CACHE_VARIABLE, cache_directory
from cpu_kernels.records import TILE_WIDTHS, Ahead, Step
from cpu_kernels.tuning import CANDIDATES, PREFETCH_VARIABLE, Prefetch, measure, prefetch
from tests.cpu_kernels import kernel_harness
from tests.cpu_kernels.kernel_harness import Matrix, random_weights

USUAL = Prefetch(POLICY.prefetch, "usual")
CHOSEN = next(distance for distance in CANDIDATES if distance not in POLICY.prefetch)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own without compiled kernels; returns the folder of measurements."""
    for name, width in tuning._MEASURED.values():
        assert WEIGHT_FORMATS[name].matmul[width].address
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv(PREFETCH_VARIABLE, raising=False)
    return cache_directory()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the distance CHOSEN takes half as long as all others; its clock is time.thread_time."""
    now = 0.0

    def run(_product: tuning._Product, distance: int) -> None:
        nonlocal now
        now += 0.001 if distance == CHOSEN else 0.002

    monkeypatch.setattr(tuning._Product, "run", run)
    monkeypatch.setattr(time, "thread_time", lambda: now)


def clock() -> float:
    return time.thread_time()


def test_the_fastest_is_chosen_and_kept(cache: Path, machine: None) -> None:
    assert prefetch() == USUAL and not tuning.is_measured()
    assert measure(clock).distances == (CHOSEN,) * len(Ahead)
    assert prefetch() == Prefetch((CHOSEN,) * len(Ahead), "measured") and tuning.is_measured()


def test_a_difference_like_that_of_two_timings_of_the_same_does_not_count(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def run(_product: tuning._Product, distance: int) -> None:
        nonlocal now
        now += 0.00099 if distance == CHOSEN else 0.001

    monkeypatch.setattr(tuning._Product, "run", run)
    assert measure(lambda: now).distances == USUAL.distances
    assert prefetch() == Prefetch(USUAL.distances, "measured")


def test_the_machine_itself(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LEAST_BYTES", "_MOST_BYTES"):
        monkeypatch.setattr(tuning, name, 4 << 20)
    found = measure()
    assert set(found.distances) <= {*CANDIDATES, *POLICY.prefetch}
    assert prefetch() == found


def test_the_variable_comes_first(cache: Path, machine: None) -> None:
    measure(clock)
    assert prefetch({PREFETCH_VARIABLE: "512"}) == Prefetch((512,) * 3, f"set by {PREFETCH_VARIABLE}")
    assert prefetch({PREFETCH_VARIABLE: "0, 1024,4096"}).distances == (0, 1024, 4096)


@pytest.mark.parametrize("text", ["far", "-1", "1,2", "1,2,3,4", "1,,2", "65537", "1e3", "²"])
def test_other_values_of_the_variable_are_refused(text: str) -> None:
    with pytest.raises(PrefetchError, match="give one whole number of bytes from 0 to 65536, or 3"):
        prefetch({PREFETCH_VARIABLE: text})


def test_a_damaged_file_is_ignored(cache: Path, machine: None, caplog: pytest.LogCaptureFixture) -> None:
    measure(clock)
    (kept,) = cache.glob("*.measured")
    kept.write_bytes(kept.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "localllm.kernels"):
        assert prefetch() == USUAL
    assert "is damaged; it counts as not measured" in caplog.text


def test_what_another_processor_measured_is_ignored(
    cache: Path, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(clock)
    monkeypatch.setattr(tuning, "processor_name", lambda: "another one")
    assert prefetch() == USUAL and not tuning.is_measured()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q4_K", "Q2_K", "IQ3_S", "F16"])
def test_no_result_depends_on_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    k = 512
    matrix = Matrix.pack(WEIGHT_FORMATS[name], random_weights(name, 96, k), k)
    x = np.random.default_rng(1).standard_normal((50, k)).astype(np.float32)
    plain = kernel_harness.Activations.step
    for width in TILE_WIDTHS:
        results = []
        for distance in (0, 64, CANDIDATES[0], tuning.MOST):

            def step(act: kernel_harness.Activations, rows: int, width: int, distance: int = distance) -> np.ndarray:
                record = plain(act, rows, width)
                record[Step.AHEAD : Step.AHEAD + len(Ahead)] = distance
                return record

            monkeypatch.setattr(kernel_harness.Activations, "step", step)
            results.append(matrix.multiply(x[: 2 if width == 1 else len(x)], width).tobytes())
        assert len(set(results)) == 1
