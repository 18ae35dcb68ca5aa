"""A simulation's results, with what a load test cannot report: queue, use of KV pages, and rows per step."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from localllm.measure.charts import Chart, Series
from localllm.measure.latency import Slo, Summary
from localllm.measure.loadtest import report
from localllm.measure.loadtest.trial import Load, Trial
from localllm.measure.simulate.simulation import Simulated

_POINTS = 200


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated trial."""

    load: Load
    planned: int
    simulated: Simulated

    @property
    def trial(self) -> Trial:
        """The run as a load test's trial."""
        return Trial(self.load, self.planned, list(self.simulated.outcomes), complete=True)


def rows(runs: Sequence[Run]) -> list[report.Row]:
    """The server's statistics as a table with headings: a row for each run."""
    heads = ("LOAD", "BUSY", "ROWS/STEP", "QUEUE MEAN/PEAK", "KV MEAN/PEAK", "CACHED", "PREEMPTED", "DRAFTS RIGHT")
    found: list[report.Row] = [heads]
    for run in runs:
        played, stats = run.simulated, run.simulated.stats
        cached = Summary.of(played.outcomes).cached_share
        found.append(
            (
                str(run.load),
                f"{played.busy:.0%}",
                f"{played.rows_per_step:.1f}",
                f"{played.queue_mean:.1f} / {played.queue_peak}",
                f"{played.kv_mean:.0%} / {played.use.kv_peak:.0%}",
                "-" if cached is None else f"{cached:.0%}",
                str(stats.preemptions),
                f"{stats.accepted_tokens} of {stats.drafted_tokens}",
            )
        )
    return found


def sentences(runs: Sequence[Run], slo: Slo | None) -> list[str]:
    """Throughput, goodput and failures."""
    trials = [run.trial for run in runs]
    return [*report.throughput(trials, slo), *(line for trial in trials for line in report.failures(trial))]


def charts(name: str, runs: Sequence[Run]) -> list[Chart]:
    """TTFT and TPOT as in a load test's charts; for a single run also the queue over time."""
    drawn = report.charts(name, [run.trial for run in runs])
    if len(runs) == 1:
        queue = runs[0].simulated.queue
        points = tuple((at, float(waiting)) for at, waiting in queue[:: max(1, len(queue) // _POINTS)])
        drawn.append(Chart(f"{name}, {runs[0].load}", "s", "waiting", (Series("waiting", points),)))
    return drawn


def as_data(run: Run, slo: Slo | None) -> dict[str, Any]:
    """Plain data: a load test's, plus what only a simulation knows."""
    played = run.simulated
    return {
        **report.trial_data(run.trial, slo),
        "busy": played.busy,
        "steps": played.use.steps,
        "rows_per_step": played.rows_per_step,
        "queue_mean": played.queue_mean,
        "queue_peak": played.queue_peak,
        "kv_mean": played.kv_mean,
        "kv_peak": played.use.kv_peak,
        "engine": asdict(played.stats),
    }
