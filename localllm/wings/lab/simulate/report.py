"""A simulation's results, with what a load test cannot report: queue, use of KV pages, and rows per step."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from localllm.slo import Slo
from localllm.wings.lab.charts import Chart, Series
from localllm.wings.lab.latency import Summary
from localllm.wings.lab.loadtest import report
from localllm.wings.lab.simulate.simulation import Simulated

_POINTS = 200


def rows(runs: Sequence[Simulated]) -> list[report.Row]:
    """The server's statistics as a table with headings: a row for each run."""
    heads = ("LOAD", "BUSY", "ROWS/STEP", "QUEUE MEAN/PEAK", "KV MEAN/PEAK", "CACHED", "PREEMPTED", "DRAFTS RIGHT")
    found: list[report.Row] = [heads]
    for run in runs:
        cached, stats = Summary.of(run.outcomes).cached_share, run.stats
        found.append(
            (
                str(run.load),
                f"{run.busy:.0%}",
                f"{run.rows_per_step:.1f}",
                f"{run.queue_mean:.1f} / {run.queue_peak}",
                f"{run.kv_mean:.0%} / {run.use.kv_peak:.0%}",
                "-" if cached is None else f"{cached:.0%}",
                str(stats.preemptions),
                f"{stats.accepted_tokens} of {stats.drafted_tokens}",
            )
        )
    return found


def sentences(runs: Sequence[Simulated], slo: Slo | None) -> list[str]:
    """Throughput, goodput and failures."""
    trials = [run.trial for run in runs]
    return [*report.throughput(trials, slo), *(line for trial in trials for line in report.failures(trial))]


def charts(name: str, runs: Sequence[Simulated]) -> list[Chart]:
    """TTFT and TPOT as in a load test's charts; for a single run also the queue over time."""
    drawn = report.charts(name, [run.trial for run in runs])
    if len(runs) == 1:
        queue = runs[0].queue
        points = tuple((at, float(waiting)) for at, waiting in queue[:: max(1, len(queue) // _POINTS)])
        drawn.append(Chart(f"{name}, {runs[0].load}", "s", "waiting", (Series("waiting", points),)))
    return drawn


def as_data(run: Simulated, slo: Slo | None) -> dict[str, Any]:
    """Plain data: a load test's, plus what only a simulation knows."""
    return {
        **report.trial_data(run.trial, slo),
        "busy": run.busy,
        "steps": run.use.steps,
        "rows_per_step": run.rows_per_step,
        "queue_mean": run.queue_mean,
        "queue_peak": run.queue_peak,
        "kv_mean": run.kv_mean,
        "kv_peak": run.use.kv_peak,
        "engine": asdict(run.stats),
    }
