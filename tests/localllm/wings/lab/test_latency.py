"""Request times, percentiles and goodput, on cases computed by hand."""

import pytest

from localllm.errors import RequestError
from localllm.slo import Slo
from localllm.wings.lab.latency import Outcome, Percentiles, Summary

# Due at 1, sent at 1.5, text at 2, 2.5 and 4, complete at 4.25.
ANSWER = Outcome(1.0, 1.5, (2.0, 2.5, 4.0), 4.25, prompt_tokens=10, cached_tokens=4, generated_tokens=5)
FAILED = Outcome(1.0, 1.0, (), 3.0, error="refused")


def test_times_count_from_when_a_request_was_due() -> None:
    assert ANSWER.ttft == 1.0
    assert ANSWER.e2e == 3.25
    assert ANSWER.itl == (0.5, 1.5)
    # Four tokens came after the first, in the 2 seconds between the first text and the last.
    assert ANSWER.tpot == 0.5
    assert ANSWER.tokens == 5


def test_without_counts_a_piece_is_a_token() -> None:
    outcome = Outcome(0.0, 0.0, (1.0, 2.0, 5.0), 5.0)
    assert (outcome.tokens, outcome.tpot) == (3, 2.0)


def test_unknown_values_are_none() -> None:
    assert Outcome(0.0, 0.0, (1.0,), 1.0, generated_tokens=8).tpot is None
    empty = Outcome(1.0, 1.0, (), 3.0, generated_tokens=0)
    assert (empty.ttft, empty.tpot, empty.itl) == (2.0, None, ())


def test_percentiles_of_a_hundred() -> None:
    found = Percentiles.of(range(101))
    assert found == Percentiles(50, 95, 99, 50)
    assert Percentiles.of([]) is None


def test_an_slo_is_read_and_written() -> None:
    slo = Slo.parse("ttft=2s, tpot=100ms,e2e=30,itl=500us")
    assert (slo.ttft, slo.tpot, slo.e2e, slo.itl) == (2.0, 0.1, 30.0, 0.0005)
    assert Slo.parse(str(slo)) == slo


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=fast", "ttft=1h", "latency=1s", "ttft=1s,ttft=2s", "ttft=-1"]
)
def test_other_bounds_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"The SLO has .*ttft, tpot, itl, e2e"):
        Slo.parse(text)


@pytest.mark.parametrize(
    ("bounds", "met"),
    [
        ({"ttft": 1.0}, True),
        ({"ttft": 0.9}, False),
        ({"tpot": 0.5}, True),
        ({"tpot": 0.4}, False),
        ({"itl": 1.5}, True),
        ({"itl": 1.4}, False),
        ({"e2e": 3.25}, True),
        ({"e2e": 3.0}, False),
        ({"ttft": 9.0, "e2e": 3.0}, False),
        ({}, True),
    ],
)
def test_all_bounds_of_an_slo_must_hold(bounds: dict[str, float], met: bool) -> None:
    assert ANSWER.meets(Slo(**bounds)) is met
    assert not FAILED.meets(Slo(**bounds))


def test_a_summary_counts_failures_as_missed() -> None:
    summary = Summary.of([ANSWER, FAILED], Slo(ttft=1.0))
    assert (summary.requests, summary.answered, summary.good) == (2, 1, 1)
    assert summary.seconds == 3.25
    assert summary.attained == 0.5
    assert summary.goodput == pytest.approx(1 / 3.25)
    assert summary.request_rate == pytest.approx(1 / 3.25)
    assert summary.token_rate == pytest.approx(5 / 3.25)
    assert summary.prompt_rate == pytest.approx(10 / 3.25)
    assert summary.cached_share == 0.4
    assert summary.late == 0.5
    assert summary.ttft == Percentiles(1, 1, 1, 1)
    assert summary.counted


def test_a_summary_of_nothing() -> None:
    summary = Summary.of([], Slo(ttft=1))
    assert (summary.requests, summary.request_rate, summary.goodput, summary.attained) == (0, 0, 0, 0)
    assert summary.ttft is None
    assert Summary.of([]).goodput is None
