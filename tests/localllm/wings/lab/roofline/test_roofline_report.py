"""The arithmetic and the units of a report, on given seconds."""

import json

import jsonschema
import pytest

from cpu_kernels.recorded_step import Products
from localllm.speed.work import TokenWork, Work
from localllm.wings.lab.roofline.decode_step import DecodeStep
from localllm.wings.lab.roofline.limits import Limits, MeasuredSpread
from localllm.wings.lab.roofline.report import BenchReport, Measure, ThreadReport, as_data, as_text

LIMITS = Limits(
    MeasuredSpread(20e9, 19e9, 21e9), MeasuredSpread(200e9, 200e9, 200e9), MeasuredSpread(100e9, 100e9, 100e9)
)

SPREAD = {
    "type": "object",
    "required": ["median", "lowest", "highest"],
    "additionalProperties": {"type": "number", "minimum": 0},
}
SCHEMA = {
    "type": "object",
    "required": ["model", "architecture", "backend", "instruction_set", "rounds", "other_programs_cores", "runs"],
    "properties": {
        "rounds": {"type": "integer"},
        "other_programs_cores": {"type": "number"},
        "runs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["threads", "limits", "measures", "decode_steps"],
                "properties": {
                    "limits": {
                        "type": ["object", "null"],
                        "required": ["read_gb_s", "int8_gop_s", "f32_gop_s"],
                        "additionalProperties": SPREAD,
                    },
                    "measures": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "measure": {"type": "string"},
                                "tokens": {"type": "integer"},
                                "depth": {"type": "integer"},
                                "tokens_per_s": SPREAD,
                                **{
                                    name: {"type": ["number", "null"]}
                                    for name in (
                                        "bytes_per_token",
                                        "operations_per_token",
                                        "read_gb_s",
                                        "gop_s",
                                        "of_read_limit",
                                        "of_compute_limit",
                                    )
                                },
                            },
                        },
                    },
                    "decode_steps": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["depth", "seconds", "shares"],
                            "properties": {"shares": {"additionalProperties": {"minimum": 0, "maximum": 1}}},
                        },
                    },
                },
            },
        },
    },
}


def measure(work: Work | None, seconds: tuple[float, ...] = (5.0, 4.0, 4.0)) -> Measure:
    return Measure("decode at 0", 40, 0, seconds, work)


def report(work: Work | None, seconds: tuple[float, ...] = (5.0, 4.0, 4.0)) -> BenchReport:
    step = DecodeStep(0, 0.1, {"matrix products": 0.08, "Python": 0.02})
    native = work is not None
    run = ThreadReport(2, LIMITS if native else None, (measure(work, seconds),), (step,) if native else ())
    return BenchReport("m.gguf", "llama", "native" if native else "llama.cpp", "avx2", len(seconds), 0.25, (run,))


def test_a_spread_has_the_middle_and_the_ends() -> None:
    spread = MeasuredSpread.of([3.0, 1.0, 2.0, 10.0])
    assert (spread.median, spread.lowest, spread.highest) == (2.5, 1.0, 10.0)
    assert spread.deviation == pytest.approx(4.5 / 2.5)
    assert MeasuredSpread.of([0.0]).deviation == 0
    with pytest.raises(ValueError, match="nothing"):
        MeasuredSpread.of([])


def test_rates_are_the_work_of_a_token_times_tokens_a_second() -> None:
    one = measure(Work(read=1e9, int8=4e9, floats=1e9))
    assert one.speed == MeasuredSpread(10.0, 8.0, 10.0)
    assert one.read_rate == 1e10
    assert one.compute_rate == 5e10
    assert one.of_read(LIMITS) == pytest.approx(0.5)
    # 4e9 / 200e9 + 1e9 / 100e9 = 0.03 s at least, of 0.1 s that a token took
    assert one.of_compute(LIMITS) == pytest.approx(0.3)


def test_without_counted_work_there_are_not_any_shares() -> None:
    one = measure(None)
    assert [one.read_rate, one.compute_rate, one.of_read(LIMITS), one.of_compute(LIMITS)] == [None] * 4
    assert measure(Work(1.0, 1.0, 1.0)).of_read(None) is None


@pytest.mark.parametrize("work", [Work(1e9, 4e9, 0.0), None])
def test_the_data_keeps_its_schema_and_units(work: Work | None) -> None:
    data = json.loads(json.dumps(as_data(report(work))))
    jsonschema.validate(data, SCHEMA)
    found = data["runs"][0]["measures"][0]
    assert found["tokens_per_s"]["median"] == 10
    if work is None:
        assert data["runs"][0]["limits"] is None
        assert found["read_gb_s"] is None
    else:
        assert data["runs"][0]["limits"]["read_gb_s"] == {"median": 20.0, "lowest": 19.0, "highest": 21.0}
        assert (found["read_gb_s"], found["gop_s"]) == (10.0, 40.0)
        assert data["runs"][0]["decode_steps"][0]["shares"] == pytest.approx({"matrix products": 0.8, "Python": 0.2})


def test_the_text_has_aligned_columns_and_says_what_disturbs() -> None:
    lines = as_text(report(Work(1e9, 4e9, 0.0))).splitlines()
    assert lines[0] == "m.gguf: llama on native (avx2)"
    assert lines[2].split() == ["threads", "measure", "tok/s", "±", "GB/s", "of", "read", "GOP/s", "of", "multiply"]
    assert lines[3].split() == ["2", "decode", "at", "0", "10.0", "10%", "10.0", "50%", "40.0", "20%"]
    assert lines[2].index("tok/s") + len("tok/s") == lines[3].index("10.0") + len("10.0")
    text = "\n".join(lines)
    assert "limits, 2 threads: read 20.0 GB/s (±5%), int8 200.0 GOP/s (±0%), f32 100.0 GOP/s (±0%)" in text
    assert "100.00 ms: matrix products 80.0%, Python 20.0%" in text
    assert "0.2 cores busy" in text
    assert "differ" not in text
    assert "differ by more than 10 %" in as_text(report(None, (4.0, 8.0)))


def test_the_text_of_another_backend_has_no_limits() -> None:
    text = as_text(report(None))
    assert "limits" not in text
    assert text.splitlines()[3].split() == ["2", "decode", "at", "0", "10.0", "10%", "-", "-", "-", "-"]


def test_work_of_a_token() -> None:
    model = TokenWork(Products(1000, 400, 40), Products(100, 20, 2), ((float("inf"), 4), (4.0, 4)))
    # Two tokens after 9: the layers see 10 and 11 tokens, and 4.
    assert model.decode(9, 2) == Work(1100 + 8 * (14 + 15) / 2 / 2, 420, 42)
    # Ten tokens, four at a time: three passes, which end at 4, 8 and 10 tokens.
    stored = 8 * (4 + 4 + 8 + 4 + 10 + 4) / 2
    assert model.prefill(10, 4) == Work((3 * 1000 + 100 + stored) / 10, (4000 + 20) / 10, (400 + 2) / 10)
