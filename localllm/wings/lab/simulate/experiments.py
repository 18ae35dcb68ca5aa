"""Seven textbook experiments on serving, on any model and machine, with expected and simulated results.

Loads are relative to the simulated server's capacity, so that each experiment shows the same on a laptop and on a
server. Expectations follow from localllm.wings.lab.formulas.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from localllm.slo import Slo
from localllm.text import table
from localllm.wings.lab.formulas import memory, serving, speculation
from localllm.wings.lab.latency import Outcome, Percentiles, Summary
from localllm.wings.lab.loadtest.report import Row
from localllm.wings.lab.loadtest.trial import ClosedLoop, Load, OpenLoop
from localllm.wings.lab.simulate.costs import StepTimes, roofline, scaled, shared_by
from localllm.wings.lab.simulate.machines import Link, Machine
from localllm.wings.lab.simulate.runner import PAGE
from localllm.wings.lab.simulate.shape import StepShape, llama_3_8b, llama_3_70b
from localllm.wings.lab.simulate.simulation import Batching, Setup, Simulated, SimulatedDraft, simulate
from localllm.wings.lab.workload.requests import Lengths, RequestShape, WorkloadRequest, poisson

_USUAL = RequestShape(Lengths(128, 384), Lengths(32, 96))
_UNBOUNDED = 100_000
_DRAFT_COST = 0.1
_ATTAINED = 0.9


@dataclass(frozen=True, slots=True)
class SimulatedServer:
    """What experiments run on. setup: the user's; each experiment varies the fields that it is about."""

    shape: StepShape
    machine: Machine
    link: Link
    setup: Setup
    seed: str

    def play(self, requests: Sequence[WorkloadRequest], load: Load, **changed: object) -> Simulated:
        """Simulate with some fields of the setup changed."""
        return simulate(replace(self.setup, **changed), requests, load, self.seed)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Finding:
    """An experiment's result. rows: a table with its headings."""

    name: str
    title: str
    expected: str
    rows: tuple[Row, ...]
    found: str


def baseline(server: SimulatedServer) -> Finding:
    """One request at a time."""
    requests = _USUAL.requests(100, server.seed)
    times = [each.e2e for each in _answered(server.play(requests, ClosedLoop(1), batching=Batching.NONE))]
    service, variation = fmean(times), pstdev(times) / fmean(times)
    rows: list[Row] = [("BUSY", "RATE/S", "WAIT S", "EXPECTED S", "TTFT P50 S", "TTFT P99 S")]
    waits = []
    for busy in (0.3, 0.5, 0.7, 0.9):
        rate = busy / service
        played = server.play(
            poisson(requests, rate, server.seed), OpenLoop(rate), batching=Batching.NONE, queue=_UNBOUNDED
        )
        ttft = _of(played).ttft
        waits.append(fmean(each.e2e for each in _answered(played)) - service)
        expected = serving.wait_seconds(rate, service, variation)
        assert ttft is not None
        rows.append((f"{busy:.0%}", f"{rate:.3g}", *map(_seconds, (waits[-1], expected, ttft.p50, ttft.p99))))
    return Finding(
        "baseline",
        "Baseline: one request at a time",
        "Requests queue behind each other, and waits grow with utilisation: "
        "busy x S x (1 + c^2) / (2 (1 - busy)) on average (Pollaczek and Khinchine), "
        f"with S = {_seconds(service)} s a request and c = {variation:.2f}.",
        tuple(rows),
        f"At 90 % a request waits {waits[-1] / service:.1f} times as long as it takes; at 30 %, "
        f"{waits[0] / service:.2f} times. {len(requests)} requests are one sample of what the formula averages.",
    )


def batching(server: SimulatedServer) -> Finding:
    """Throughput with batches."""
    requests = _USUAL.requests(96, server.seed)
    rows: list[Row] = [("BATCHING", "TOK/S", "TIMES", "TPOT P50 MS", "E2E P50 S", "ROWS/STEP")]
    speeds: dict[Batching, float] = {}
    for way in (Batching.NONE, Batching.STATIC, Batching.CONTINUOUS):
        load = ClosedLoop(1 if way is Batching.NONE else server.setup.slots * 2)
        played = server.play(requests, load, batching=way, queue=_UNBOUNDED)
        summary = _of(played)
        speeds[way] = summary.token_rate
        rows.append(
            (
                str(way),
                f"{summary.token_rate:.3g}",
                f"{speeds[way] / speeds[Batching.NONE]:.2f}",
                _milliseconds(summary.tpot),
                _seconds(summary.e2e.p50 if summary.e2e else 0.0),
                f"{played.rows_per_step:.1f}",
            )
        )
    gain = speeds[Batching.CONTINUOUS] / speeds[Batching.NONE]
    return Finding(
        "batching",
        "Continuous batching",
        "Weights are read once for the whole batch: published throughput gains are 2 to 23 times. "
        "Static batches leave slots empty when answers differ in length.",
        tuple(rows),
        f"{gain:.1f} times the throughput with {server.setup.slots} slots, "
        f"{speeds[Batching.CONTINUOUS] / speeds[Batching.STATIC]:.2f} times static batches.",
    )


def prefix(server: SimulatedServer) -> Finding:
    """A long prefix that prompts share."""
    longest = min(1024, server.setup.context // 4)
    rows: list[Row] = [("SHARED", "CACHE", "TTFT P50 MS", "CACHED", "TTFT SAVED", "EXPECTED")]
    last = 0.0
    for shared in (longest // 4, longest // 2, longest):
        requests = RequestShape(Lengths(shared + 64, shared + 64), Lengths(16, 16), shared, 1).requests(24, server.seed)
        ttft: dict[bool, float] = {}
        for cached in (False, True):
            summary = _of(server.play(requests, ClosedLoop(1), prefix_cache=cached))
            assert summary.ttft is not None
            ttft[cached] = summary.ttft.p50
            saved = 1 - ttft[cached] / ttft[False]
            expected = f"{shared / (shared + 64):.0%}" if cached else "-"
            share = f"{summary.cached_share or 0:.0%}"
            name, state = f"{shared} of {shared + 64}", "on" if cached else "off"
            rows.append((name, state, f"{1e3 * ttft[cached]:.3g}", share, f"{saved:.0%}" if cached else "-", expected))
            last = saved
    return Finding(
        "prefix",
        "Prefix caching",
        "A cached prefix is not computed again: TTFT falls by the cached share of the prompt if prefill is "
        "compute-bound, and by less if the rest is bound by reading the weights.",
        tuple(rows),
        f"With {longest} of {longest + 64} tokens shared, TTFT falls by {last:.0%}.",
    )


def speculate(server: SimulatedServer) -> Finding:
    """Speculative decoding with a draft model, at several acceptance rates and numbers of clients."""
    setup = server.setup
    drafting = scaled(setup.times, _DRAFT_COST)
    requests = RequestShape(Lengths(64, 64), Lengths(128, 128)).requests(16, server.seed)
    rows: list[Row] = [("CLIENTS", "ACCEPTANCE", "TPOT MS", "FASTER", "ACCEPTED/DRAFTED", "EXPECTED AT BEST")]
    gains: dict[int, float] = {}
    for clients in (1, setup.slots):
        plain = _tpot(server.play(requests, ClosedLoop(clients), draft=None))
        rows.append((str(clients), "no draft", f"{1e3 * plain:.3g}", "1.00", "-", "-"))
        for alpha in (0.5, 0.7, 0.9):
            played = server.play(requests, ClosedLoop(clients), draft=SimulatedDraft(drafting, alpha))
            faster = plain / _tpot(played)
            gains[clients] = faster
            drafted = f"{played.stats.accepted_tokens} of {played.stats.drafted_tokens}"
            best = f"{_best_speedup(setup.times, alpha, clients):.2f}"
            rows.append((str(clients), f"{alpha}", f"{1e3 * plain / faster:.3g}", f"{faster:.2f}", drafted, best))
    return Finding(
        "speculation",
        "Speculative decoding",
        "A draft of gamma tokens gives (1 - a^(gamma+1)) / (1 - a) tokens a step. Decoding is that many times faster, "
        f"divided by gamma x {_DRAFT_COST} for drafting and the cost of checking. The engine chooses gamma by itself.",
        tuple(rows),
        f"With an acceptance rate of 0.9: one client {gains[1]:.2f} times, {setup.slots} clients "
        f"{gains[setup.slots]:.2f}. TPOT includes the draft model's prefill.",
    )


def devices(server: SimulatedServer) -> Finding:
    """Several devices: a stated model."""
    setup = server.setup
    requests = _USUAL.requests(48, server.seed)
    rows: list[Row] = [("DEVICES", "TPOT MS", "FASTER", "TOK/S IN A BATCH", "TIMES", "KV TOKENS")]
    first_tpot = first_rate = 0.0
    for count in (1, 2, 4, 8):
        times = shared_by(setup.times, count, server.shape, server.link)
        pages = server.shape.pages(server.machine.memory * count, PAGE)
        one = _tpot(server.play(requests[:4], ClosedLoop(1), times=times, pages=pages))
        rate = _of(server.play(requests, ClosedLoop(setup.slots), times=times, pages=pages)).token_rate
        first_tpot, first_rate = first_tpot or one, first_rate or rate
        faster, more = first_tpot / one, rate / first_rate
        rows.append((str(count), f"{1e3 * one:.3g}", f"{faster:.2f}", f"{rate:.4g}", f"{more:.2f}", str(pages * PAGE)))
    link = server.link
    return Finding(
        "devices",
        "More devices",
        "n devices divide the work by n and add two all-reduces of activations per layer, so the speedup "
        "stays below n. A model of tensor parallelism, not a measurement: no overlap, link of "
        f"{link.bandwidth / 1e9:g} GB/s and {1e6 * link.latency:g} us.",
        tuple(rows),
        f"8 devices: one sequence {rows[-1][2]} times as fast, a batch {rows[-1][4]} times.",
    )


def breaking(server: SimulatedServer) -> Finding:
    """Increasing load."""
    setup = server.setup
    requests = _USUAL.requests(100, server.seed)
    capacity = _of(server.play(requests, ClosedLoop(setup.slots))).request_rate
    (alone,) = server.play(_USUAL.requests(1, server.seed), ClosedLoop(1)).outcomes
    slo = Slo(ttft=10 * alone.ttft, tpot=4 * (alone.tpot or 0.0))
    rows: list[Row] = [("LOAD", "RATE/S", "TTFT P50 S", "TTFT P99 S", "QUEUE PEAK", "REFUSED", "SLO MET", "GOODPUT/S")]
    met = 0.0
    for load in (0.4, 0.7, 0.8, 0.9, 1.0, 1.5):
        rate = load * capacity
        played = server.play(poisson(requests, rate, server.seed), OpenLoop(rate))
        summary = Summary.of(played.outcomes, slo)
        attained, goodput = summary.attained or 0.0, summary.goodput or 0.0
        met = max(met, load) if attained >= _ATTAINED else met
        assert summary.ttft is not None
        latencies = map(_seconds, (summary.ttft.p50, summary.ttft.p99))
        refused = str(summary.requests - summary.answered)
        rest = (str(played.queue_peak), refused, f"{attained:.0%}", f"{goodput:.3g}")
        rows.append((f"{load:.0%}", f"{rate:.3g}", *latencies, *rest))
    return Finding(
        "breaking",
        "The breaking point",
        f"Latency hardly grows up to some load; beyond 100 % the queue grows without bound ({capacity:.3g} "
        "requests/s with all slots busy). Plan for 70 to 80 %.",
        tuple(rows),
        f"{_ATTAINED:.0%} of the requests meet {slo} up to {met:.0%} of the capacity, among the loads tried.",
    )


def size(server: SimulatedServer) -> Finding:
    """Models that are too large."""
    machine = server.machine
    shapes = [llama_3_8b(), llama_3_8b(16), llama_3_70b(), llama_3_70b(16)]
    if server.shape.name not in {shape.name for shape in shapes}:
        shapes.insert(0, server.shape)
    rows: list[Row] = [("MODEL", "WEIGHTS GB", "KV TOKENS", "DEVICES NEEDED", "TPOT MS", "LEAST MS")]
    for shape in shapes:
        need = math.ceil((shape.weights + shape.kv_bytes_per_token * shape.context) / machine.memory)
        times = shared_by(roofline(shape, machine), need, shape, server.link)
        pages = shape.pages(need * machine.memory, PAGE)
        played = server.play(_USUAL.requests(2, server.seed), ClosedLoop(1), times=times, pages=pages, draft=None)
        least = shape.read_bytes(1) / (machine.bandwidth * need)
        rows.append(
            (
                shape.name,
                f"{shape.weights / 1e9:.1f}",
                str(pages * PAGE),
                str(need),
                f"{1e3 * _tpot(played):.3g}",
                f"{1e3 * least:.3g}",
            )
        )
    kv = memory.kv_bytes(llama_3_70b().kv_bytes_per_token, 4096)
    return Finding(
        "size",
        "Limits of model size",
        f"Weights and one whole context must fit into {machine.memory / 1e9:.0f} GB, else the model needs more "
        "devices; a token takes bytes of weights / bandwidth at least (not twice that, as some texts have it).",
        tuple(rows),
        f"KV of Llama-3-70B at 4096 tokens: {kv:.0f} bytes (1.25 GiB), not the 1.07 GB of some texts.",
    )


EXPERIMENTS: dict[str, Callable[[SimulatedServer], Finding]] = {
    "baseline": baseline,
    "batching": batching,
    "prefix": prefix,
    "speculation": speculate,
    "devices": devices,
    "breaking": breaking,
    "size": size,
}


def as_text(finding: Finding) -> str:
    """A finding as text for display."""
    return f"{finding.title}\nExpected: {finding.expected}\n\n{table(finding.rows)}\nFound: {finding.found}\n"


def _best_speedup(times: StepTimes, alpha: float, clients: int) -> float:
    """The largest speedup over all draft lengths, with this server's own cost of a step's rows."""

    def cost(rows: int) -> float:
        return times.seconds(((1, 1),) * rows, rows)

    plain = cost(clients)
    draft = scaled(times, _DRAFT_COST).seconds(((1, 1),) * clients, clients) / plain
    return max(
        speculation.speedup(alpha, gamma, draft, cost(clients * (gamma + 1)) / plain) if gamma else 1.0
        for gamma in range(16)
    )


def _answered(played: Simulated) -> list[Outcome]:
    return [outcome for outcome in played.outcomes if outcome.error is None]


def _of(played: Simulated) -> Summary:
    return Summary.of(played.outcomes)


def _tpot(played: Simulated) -> float:
    return fmean(outcome.tpot for outcome in _answered(played) if outcome.tpot is not None)


def _seconds(value: float) -> str:
    return f"{value:.3g}"


def _milliseconds(found: Percentiles | None) -> str:
    return "-" if found is None else f"{1e3 * found.p50:.3g}"
