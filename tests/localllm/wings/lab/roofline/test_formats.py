"""Rates by weight format: measured on one model, stored, and combined for another."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from gguf_io import open_model
from localllm.speed import expected
from localllm.speed.expected import expected_speed
from localllm.speed.formats import FormatRates, measure_formats
from localllm.speed.kept import KeptLimits, KeptSpeed, kept_limits
from localllm.speed.work import work_in_header
from localllm.wings.lab.roofline.limits import Limits, MeasuredSpread
from localllm.wings.lab.roofline.report import BenchReport, Measure, ThreadReport, keep
from models.native_runner import NativeRunner
from models.needs import native_needs
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write
from tests.systems import use_own_places

HERE = KeptLimits("this", "avx2", 1, "2026-11-23", 20e9, 200e9, 100e9)


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_places(tmp_path, monkeypatch)
    monkeypatch.setattr(expected, "LEAST_READ", 0)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    return write(MODELS["qwen3moe"], tmp_path / "small.gguf")


def test_a_speed_is_put_together_from_each_formats_rate(path: Path) -> None:
    with open_model(path) as file:
        needs = native_needs(file)
        formats = {*needs.row, *needs.logits}
        read = {name: 1e9 * (number + 1) for number, name in enumerate(sorted(formats))}
        compute = {name: 4e9 * (number + 1) for number, name in enumerate(sorted(formats))}
        rates = FormatRates(read, compute, step=2e-6, row=3e-9)
        model = KeptSpeed("other", "Q2_K", 5e9, 1.0, None, None, 0.02, rates)
        found = expected_speed(file, replace(HERE, models=(model,)))
    assert found is not None and found.basis == "the bench of other" and found.error == expected.ALIKE_ERROR
    weights = sum(part[name].weight_bytes / read[name] for part in (needs.row, needs.logits) for name in part)
    assert 1 / found.decode == pytest.approx(weights + needs.operations * 2e-6)
    products = sum((p.int8_operations + p.float_operations) / compute[name] for name, p in needs.row.items())
    values = MODELS["qwen3moe"].layers * MODELS["qwen3moe"].embedding
    logits = sum(cost.weight_bytes / read[name] for name, cost in needs.logits.items())
    assert 512 / found.prefill == pytest.approx(512 * (products + values * 3e-9) + logits)


def test_a_format_that_was_never_measured_leaves_it_to_the_model_most_alike(path: Path) -> None:
    rates = FormatRates({"Q2_K": 1e9}, {"Q2_K": 1e9}, 1e-6, 1e-9)
    model = KeptSpeed("other", "Q2_K", 5e9, 7e9, None, None, 0.02, rates)
    with open_model(path) as file:
        found = expected_speed(file, replace(HERE, models=(model,)))
        read = work_in_header(file).decode(0, 64).read
    assert found is not None and found.decode == pytest.approx(7e9 / read)
    assert found.error == expected.OTHER_ERROR


def test_the_nearest_model_that_has_a_format_gives_its_rate(path: Path) -> None:
    with open_model(path) as file:
        needs = native_needs(file)
        read = work_in_header(file).decode(0, 64).read
        formats = {*needs.row, *needs.logits}

        def measured(name: str, size: float, rate: float) -> KeptSpeed:
            rates = FormatRates(dict.fromkeys(formats, rate), dict.fromkeys(formats, rate), 0.0, 0.0)
            return KeptSpeed(name, "F16", size, 1.0, None, None, 0.0, rates)

        near, far = measured("near", 2 * read, 1e9), measured("far", 30 * read, 9e9)
        found = expected_speed(file, replace(HERE, models=(far, near)))
    assert found is not None and found.basis == "the bench of near"
    weights = sum(cost.weight_bytes for part in (needs.row, needs.logits) for cost in part.values())
    assert found.decode == pytest.approx(1e9 / weights)


def test_rates_are_measured_and_kept(path: Path) -> None:
    ticks = count()
    with open_model(path) as file:
        needs = native_needs(file, threads=1)
        runner = NativeRunner(file, kv_bytes=8 << 20, threads=1)
        work = work_in_header(file)
    try:
        rates = measure_formats(runner, needs, 1, lambda: float(next(ticks)))
    finally:
        runner.close()
    assert rates.read.keys() == {*needs.row, *needs.logits}
    assert rates.compute.keys() == needs.row.keys()
    assert min(*rates.read.values(), *rates.compute.values()) > 0
    spread = MeasuredSpread(1e9, 1e9, 1e9)
    measures = (Measure("decode at 0", 64, 0, (1.0,), work.decode(0, 64)),)
    run = ThreadReport(1, Limits(spread, spread, spread), measures, (), rates)
    keep(BenchReport("m", "qwen3moe", "native", "avx2", 1, 0.0, (run,)), "m", "F32")
    kept = kept_limits(1)
    assert kept is not None and kept.models[0].rates == rates
