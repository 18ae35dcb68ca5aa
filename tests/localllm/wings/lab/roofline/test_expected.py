"""What is stored of a benchmark, and the speeds derived from it."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from gguf_io import open_model
from localllm.speed import expected
from localllm.speed.expected import (
    AKIN_ERROR,
    ALIKE_ERROR,
    OTHER_ERROR,
    USUAL_DECODE,
    expect_decode,
    expected_decode,
    expected_speed,
    main_type,
)
from localllm.speed.kept import KeptLimits, KeptSpeed, all_kept, kept_limits, kept_path
from localllm.speed.work import work_in_header
from localllm.wings.lab.roofline.limits import Limits, MeasuredSpread
from localllm.wings.lab.roofline.report import BenchReport, Measure, ThreadReport, keep
from models.kv_layout import MAX_ROWS
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write
from tests.systems import use_own_places

READ, INT8, FLOATS = 20e9, 200e9, 100e9
LIMITS = Limits(*(MeasuredSpread(rate, rate, rate) for rate in (READ, INT8, FLOATS)))
HERE = KeptLimits("this", "avx2", 1, "2026-11-23", READ, INT8, FLOATS)


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_places(tmp_path, monkeypatch)
    monkeypatch.setattr(expected, "LEAST_READ", 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(MODELS["qwen3"], tmp_path / "small.gguf")


def kept_model(name: str, weights: str, read: float, read_rate: float = 10e9) -> KeptSpeed:
    return KeptSpeed(name, weights, read, read_rate, 100e9, 50e9, 0.01)


def measured(model: Path, decode_s: float, prefill_s: float, threads: int = 1) -> BenchReport:
    """A benchmark with these seconds for 64 decoded tokens and a prompt of 512."""
    with open_model(model) as file:
        work = work_in_header(file)
    measures = (
        Measure("prefill 512", 512, 0, (prefill_s,), work.prefill(512, MAX_ROWS)),
        Measure("decode at 0", 64, 0, (decode_s,), work.decode(0, 64)),
    )
    return BenchReport("m.gguf", "qwen3", "native", "avx2", 1, 0.0, (ThreadReport(threads, LIMITS, measures, ()),))


def test_a_model_that_was_measured_is_expected_to_be_as_fast(model: Path) -> None:
    assert kept_limits(1) is None
    keep(measured(model, 0.5, 2.0), "small", "F16")
    kept = kept_limits(1)
    assert kept is not None and (kept.read, kept.int8, kept.floats) == (READ, INT8, FLOATS)
    with open_model(model) as file:
        found = expected_speed(
            file, replace(kept, models=tuple(replace(m, format=main_type(file)) for m in kept.models))
        )
        assert expect_decode(1)(file) == pytest.approx(64 / 0.5)
    assert found is not None
    assert (found.decode, found.prefill) == (pytest.approx(64 / 0.5), pytest.approx(512 / 2.0))
    assert (found.error, found.basis) == (ALIKE_ERROR, "the bench of small")


def test_without_a_model_the_limits_tell(model: Path) -> None:
    twice = replace(HERE, read=2 * READ, int8=2 * INT8, floats=2 * FLOATS)
    with open_model(model) as file:
        first, second = expected_speed(file, HERE), expected_speed(file, twice)
        work = work_in_header(file)
    assert first is not None and second is not None
    assert first.decode == pytest.approx(USUAL_DECODE * READ / work.decode(0, 64).read)
    assert (second.decode, second.prefill) == (pytest.approx(2 * first.decode), pytest.approx(2 * first.prefill))


def test_keys_and_values_count_as_they_are_stored(model: Path) -> None:
    with open_model(model) as file:
        full, small = (expected_speed(file, HERE, types) for types in (("f16", "f16"), ("q4_0", "q4_0")))
        work = work_in_header(file, ("q4_0", "q4_0"))
    assert full is not None and small is not None
    assert small.decode == pytest.approx(USUAL_DECODE * READ / work.decode(0, 64).read) and small.decode > full.decode


def test_the_model_most_alike_counts() -> None:
    models = (
        kept_model("other type", "Q8_0", 1e9, 18e9),
        kept_model("large", "Q4_K", 8e9, 16e9),
        kept_model("near", "Q4_K", 2e9, 14e9),
    )
    kept = replace(HERE, models=models)
    assert expected_decode(1e9, "Q4_K", kept) == (pytest.approx(14.0), "the bench of near")
    assert expected_decode(6e9, "Q4_K", kept)[1] == "the bench of large"
    assert expected_decode(6e9, "IQ4_XS", kept)[1] == "the bench of large"
    assert expected_decode(1e9, "Q8_0", kept)[1] == "the bench of other type"
    assert expected_decode(1e9, "Q8_0", HERE) == (pytest.approx(USUAL_DECODE * READ / 1e9), "this machine's limits")


def test_the_error_says_how_much_alike(model: Path) -> None:
    with open_model(model) as file:
        read, weights = work_in_header(file).decode(0, 64).read, main_type(file)

        def error(*models: KeptSpeed) -> float:
            found = expected_speed(file, replace(HERE, models=models))
            assert found is not None
            return found.error

        assert error(kept_model("alike", weights, 1.4 * read)) == ALIKE_ERROR
        assert error(kept_model("akin", weights, read / 3)) == AKIN_ERROR
        assert error(kept_model("far", weights, 9 * read)) == OTHER_ERROR
        assert error(kept_model("other", "Q2_K", read)) == OTHER_ERROR
        assert error(replace(kept_model("noisy", weights, read), deviation=0.9)) == 0.9
        assert error() == OTHER_ERROR


def test_no_speed_is_expected_of_cached_or_foreign_computation(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(model.read_bytes().replace(b"qwen3", b"rwkv7"))
    with open_model(foreign) as file:
        assert expected_speed(file, HERE) is None
    monkeypatch.setattr(expected, "LEAST_READ", 1 << 40)
    with open_model(model) as file:
        assert expected_speed(file, HERE) is None


def test_what_is_kept_is_renewed_and_others_stay(model: Path) -> None:
    keep(measured(model, 0.5, 2.0), "one", "F16")
    keep(measured(model, 0.4, 2.0), "two", "Q8_0")
    keep(measured(model, 0.3, 2.0, threads=2), "one", "F16")
    keep(measured(model, 0.25, 2.0), "one", "F16")
    assert [kept.threads for kept in all_kept()] == [1, 2]
    first = all_kept()[0]
    assert [(kept.name, kept.format) for kept in first.models] == [("two", "Q8_0"), ("one", "F16")]
    assert first.models[1].read_rate == pytest.approx(first.models[0].read_rate * 0.4 / 0.25)
    keep(replace(measured(model, 1.0, 1.0), threads=(ThreadReport(1, LIMITS, (), ()),)), "", "")
    assert all_kept()[0].models == first.models  # limits alone keep stored models


def test_another_machine_expects_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(measured(model, 0.5, 2.0), "one", "F16")
    monkeypatch.setattr("localllm.speed.kept.processor_name", lambda: "another")
    assert kept_limits(1) is None and all_kept() == []
    keep(measured(model, 0.5, 2.0), "one", "F16")
    assert len(all_kept()) == 1
    assert len(json.loads(kept_path().read_text())["machines"]) == 2


@pytest.mark.parametrize("text", ["", "[]", '{"machines": [{}]}', '{"machines": 1}', "{" * 100_000])
def test_a_damaged_file_is_reported_and_replaced(model: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    kept_path().parent.mkdir(parents=True)
    kept_path().write_text(text)
    with caplog.at_level(logging.WARNING):
        assert kept_limits(1) is None
    assert "speeds.json cannot be used" in caplog.text
    keep(measured(model, 0.5, 2.0), "one", "F16")
    assert kept_limits(1) is not None
