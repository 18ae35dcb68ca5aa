"""Metrics of answers: histograms, the SLO, and the dashboard."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from localllm.answer.event import AnswerEvent
from localllm.engine.engine import Engine
from localllm.engine.request import Counts, FinishReason, Timings
from localllm.server.metrics import Metrics
from localllm.slo import Slo
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.fake_vocabulary import FakeVocabulary

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana.json"
USER = "0123456789abcdef"


def samples(metrics: Metrics) -> dict[str, float]:
    """Values by name and labels, without buckets and creation times."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                labels = ",".join(sample.labels[name] for name in sorted(sample.labels))
                found[f"{sample.name}({labels})"] = sample.value
    return found


def answer(metrics: Metrics, *steps: tuple[int, float], ttft: float = 0.5, cached: int = 0) -> None:
    """An answer whose events arrive at these token counts, this long after the first."""
    meter = metrics.meter("tiny", USER)
    for number, (generated, decode_s) in enumerate(steps, 1):
        last = FinishReason.STOP if number == len(steps) else None
        counts = Counts(prompt=100, cached_memory=cached, generated=generated)
        meter.add(AnswerEvent(counts=counts, timings=Timings(0.1, 0.4, decode_s, ttft), finish_reason=last))


def test_each_gap_between_tokens_counts_and_tokens_that_come_together_share_theirs() -> None:
    metrics = Metrics()
    answer(metrics, (1, 0.0), (2, 0.1), (5, 0.4), (5, 0.4), cached=25)
    found = samples(metrics)
    assert found["localllm_itl_seconds_count(tiny,01234567)"] == 4
    assert found["localllm_itl_seconds_sum(tiny,01234567)"] == pytest.approx(0.4)
    assert found["localllm_ttft_seconds_sum(tiny,01234567)"] == 0.5
    assert found["localllm_e2e_seconds_sum(tiny,01234567)"] == pytest.approx(0.9)
    assert found["localllm_queue_seconds_sum(tiny,01234567)"] == 0.1
    assert found["localllm_cached_share_sum(tiny,01234567)"] == 0.25
    assert not any("slo" in name for name in found)


def test_an_answer_without_a_token_has_no_latency() -> None:
    metrics = Metrics(Slo(ttft=1.0))
    answer(metrics, (0, 0.0))
    found = samples(metrics)
    assert found["localllm_queue_seconds_count(tiny,01234567)"] == 1
    assert not any(name.startswith(("localllm_ttft", "localllm_slo")) for name in found)


def test_answers_are_held_to_the_slo() -> None:
    metrics = Metrics(Slo(ttft=1.0, itl=0.2, e2e=3.0))
    answer(metrics, (1, 0.0), (2, 0.1))
    answer(metrics, (1, 0.0), (2, 0.3))
    answer(metrics, (1, 0.0), ttft=4.0)
    found = {name: value for name, value in samples(metrics).items() if "slo" in name}
    assert found == {
        "localllm_slo_met_total(tiny,01234567)": 1,
        "localllm_slo_violations_total(itl,tiny,01234567)": 1,
        "localllm_slo_violations_total(ttft,tiny,01234567)": 1,
        "localllm_slo_violations_total(e2e,tiny,01234567)": 1,
    }


async def shown(metrics: Metrics) -> str:
    return metrics.text().decode()


def test_the_dashboard_shows_metrics_that_exist() -> None:
    metrics = Metrics(Slo(ttft=1.0, itl=0.2))
    metrics.watch(lambda: {"tiny": Engine(FakeRunner(pages=4), FakeVocabulary()).stats()})
    metrics.requests.labels("/", "200").inc()
    answer(metrics, (1, 0.0), (2, 0.1))
    answer(metrics, (1, 0.0), ttft=4.0)
    families = text_string_to_metric_families(asyncio.run(shown(metrics)))
    known = {sample.name for family in families for sample in family.samples}
    queries = [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]
    used = {name for query in queries for name in re.findall(r"localllm_\w+", query)}
    assert len(queries) > 20 and used <= known
