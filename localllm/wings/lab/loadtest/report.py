"""A load test's result as rows of a table, sentences, charts and plain data."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from localllm.slo import Slo
from localllm.wings.lab.charts import Chart, Series
from localllm.wings.lab.latency import Outcome, Percentiles, Summary
from localllm.wings.lab.loadtest.session import ATTAINED, Knee, LoadTest
from localllm.wings.lab.loadtest.trial import ClosedLoop, OpenLoop, Trial

Row = tuple[str, ...]
_LATENCIES = (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("E2E", "e2e"))
_MOST_ERRORS = 3
_FEW_TOKENS = 1.1  # in a piece; servers hold back text that ends within a character
_LATE_S = 0.1  # below this a request counts as sent on time


def rows(trials: Sequence[Trial], slo: Slo | None) -> list[Row]:
    """A table with its headings: of percentiles for one trial, of trials for several."""
    summaries = [trial.summary(slo) for trial in trials]
    if len(summaries) == 1:
        found = [(name, getattr(summaries[0], field)) for name, field in _LATENCIES]
        return [("MS", "P50", "P95", "P99", "MEAN"), *((name, *_milliseconds(one)) for name, one in found)]
    heads = ("LOAD", "ANSWERED", "REQ/S", "TOK/S", *(f"{name} MS" for name, _ in _LATENCIES))
    table: list[Row] = [(*heads, *(("GOODPUT/S", "SLO MET") if slo else ()))]
    for trial, summary in sorted(zip(trials, summaries, strict=True), key=lambda pair: _size(pair[0])):
        latencies = (" / ".join(_milliseconds(getattr(summary, field))[:3]) for _, field in _LATENCIES)
        rates = (f"{summary.request_rate:.2f}", f"{summary.token_rate:.1f}")
        good = (f"{summary.goodput:.2f}", f"{summary.attained:.0%}") if slo else ()
        table.append((str(trial.load), f"{summary.answered} of {trial.planned}", *rates, *latencies, *good))
    return table


def _size(trial: Trial) -> float:
    """A trial's load, to sort by: a search does not try loads in ascending order."""
    load = trial.load
    return float(load.clients) if isinstance(load, ClosedLoop) else load.rate or 0.0


def _milliseconds(found: Percentiles | None) -> Row:
    if found is None:
        return ("-",) * 4
    return tuple(_number(1e3 * value) for value in (found.p50, found.p95, found.p99, found.mean))


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def head(session: LoadTest) -> str:
    """The model and server, and the latency of one request alone."""
    text = f"{session.model} at {session.plan.target.url} ({session.api})"
    if session.alone is not None:
        tpot = "" if session.alone.tpot is None else f", TPOT {_number(1e3 * session.alone.tpot)} ms"
        text += f"; one request alone: TTFT {_number(1e3 * session.alone.ttft)} ms{tpot}"
    return text


def sentences(session: LoadTest) -> list[str]:
    """Sentences below the table: throughput of a single trial, the knee, failures, and caveats."""
    slo = session.plan.slo
    lines = throughput(session.trials, slo)
    if session.knee is not None and slo is not None:
        lines.append(_knee(session.knee, slo))
    for trial in sorted(session.trials, key=_size):
        lines += failures(trial)
    lines += _reservations(session.trials)
    return [*lines, *session.notes, f"--seed {session.source.seed} repeats these requests."]


def throughput(trials: Sequence[Trial], slo: Slo | None) -> list[str]:
    """Throughput and goodput of a single trial; for several, how to read the table's latencies."""
    if len(trials) != 1:
        return ["Latencies are p50 / p95 / p99."] if trials else []
    trial, summary = trials[0], trials[0].summary(slo)
    cached = "" if summary.cached_share is None else f", {summary.cached_share:.0%} of them cached"
    lines = [
        f"{trial.load}: {summary.answered} of {trial.planned} requests answered in {summary.seconds:.1f} s, "
        f"{summary.request_rate:.2f} requests/s, {summary.token_rate:.1f} generated tokens/s, "
        f"{summary.prompt_rate:.1f} prompt tokens/s{cached}."
    ]
    if slo is not None:
        lines.append(f"Goodput at {slo}: {summary.goodput:.2f} requests/s ({summary.attained:.0%} of the requests).")
    return lines


def _knee(knee: Knee, slo: Slo) -> str:
    share = f"{ATTAINED:.0%} of the requests met {slo}"
    if knee.met is None:
        return f"No tested rate met the goal ({share}); the lowest was {knee.missed:.3g}/s."
    if knee.missed is None:
        return f"Every tested rate met the goal ({share}); the highest was {knee.met:.3g}/s."
    return f"The knee: {share} up to {knee.met:.3g} requests/s, but not at {knee.missed:.3g}."


def failures(trial: Trial) -> list[str]:
    """Requests that were not answered, and why."""
    found = Counter(outcome.error for outcome in trial.outcomes if outcome.error is not None)
    lines = [f"{trial.load}: {count} failed: {error}." for error, count in found.most_common(_MOST_ERRORS)]
    if len(found) > _MOST_ERRORS:
        others = found.total() - sum(count for _, count in found.most_common(_MOST_ERRORS))
        lines.append(f"{trial.load}: {others} failed in other ways; --json has them.")
    if trial.note:
        lines.append(f"{trial.load}: {trial.note}.")
    return lines


def _reservations(trials: Sequence[Trial]) -> list[str]:
    """Caveats for reading the figures of all trials."""
    summary = Summary.of([outcome for trial in trials for outcome in trial.outcomes])
    lines = []
    if summary.late > _LATE_S:
        lines.append(
            f"Requests waited up to {summary.late:.1f} s for a connection or this program, which counts as latency; "
            "raise --connections, or run the test on an idle core."
        )
    if not summary.counted:
        lines.append("The server does not count generated tokens; each piece of text counts as one.")
    pieces = sum(len(outcome.pieces) for trial in trials for outcome in trial.outcomes if outcome.error is None)
    if pieces and summary.generated_tokens > _FEW_TOKENS * pieces:
        lines.append(
            f"{summary.generated_tokens / pieces:.1f} tokens arrived per piece of text on average; ITL is the time "
            "between pieces."
        )
    return lines


def charts(name: str, trials: Sequence[Trial]) -> list[Chart]:
    """TTFT and TPOT over the load; for a single trial, over the share of its requests. name: begins the titles."""
    pairs = (("TTFT", "ttft"), ("TPOT", "tpot"))
    if len(trials) == 1:
        outcomes = [outcome for outcome in trials[0].outcomes if outcome.error is None]
        title = f"{name}, {trials[0].load}"
        return [
            Chart(title, "% of requests", f"{head} ms", (Series(head, _quantiles(outcomes, field)),))
            for head, field in pairs
        ]
    x_label = "clients" if isinstance(trials[0].load, ClosedLoop) else "requests/s"
    ordered = sorted(trials, key=_size)
    ranks = ("p50", "p95", "p99")
    return [
        Chart(name, x_label, f"{head} ms", tuple(_line(ordered, field, rank) for rank in ranks))
        for head, field in pairs
    ]


def _quantiles(outcomes: Sequence[Outcome], field: str) -> tuple[tuple[float, float], ...]:
    values = sorted(value for outcome in outcomes if (value := getattr(outcome, field)) is not None)
    return tuple((100 * number / len(values), 1e3 * value) for number, value in enumerate(values, 1))


def _line(trials: Sequence[Trial], field: str, rank: str) -> Series:
    points = []
    for trial in trials:
        found: Percentiles | None = getattr(trial.summary(None), field)
        if found is not None:
            points.append((_size(trial), 1e3 * getattr(found, rank)))
    return Series(rank, tuple(points))


def as_data(session: LoadTest) -> dict[str, Any]:
    """Plain data: times in seconds, rates a second, shares from 0 to 1, null for what is not known."""
    slo = session.plan.slo
    return {
        "url": session.plan.target.url,
        "api": session.api,
        "model": session.model,
        "seed": session.source.seed,
        "slo": None if slo is None else asdict(slo),
        "alone": None if session.alone is None else _request(session.alone, slo),
        "trials": [trial_data(trial, slo) for trial in session.trials],
        "knee": None if session.knee is None else {**asdict(session.knee), "attained": ATTAINED},
        "notes": session.notes,
    }


def trial_data(trial: Trial, slo: Slo | None) -> dict[str, Any]:
    """A trial as plain data, including every request."""
    summary = trial.summary(slo)
    load = trial.load
    return {
        "load": "open" if isinstance(load, OpenLoop) else "closed",
        "rate": load.rate if isinstance(load, OpenLoop) else None,
        "clients": load.clients if isinstance(load, ClosedLoop) else None,
        "planned": trial.planned,
        "complete": trial.complete,
        **asdict(summary),
        "request_rate": summary.request_rate,
        "token_rate": summary.token_rate,
        "prompt_rate": summary.prompt_rate,
        "goodput": summary.goodput,
        "attained": summary.attained,
        "outcomes": [_request(outcome, slo) for outcome in trial.outcomes],
    }


def _request(outcome: Outcome, slo: Slo | None) -> dict[str, Any]:
    return {
        "due": outcome.due,
        "sent": outcome.sent,
        "ttft": outcome.ttft if outcome.pieces else None,
        "tpot": outcome.tpot,
        "longest_gap": max(outcome.itl, default=None),
        "e2e": outcome.e2e,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "generated_tokens": outcome.generated_tokens,
        "pieces": len(outcome.pieces),
        "error": outcome.error,
        "met_slo": None if slo is None else outcome.meets(slo),
    }
