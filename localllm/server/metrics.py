"""Prometheus metrics. They contain no text from prompts or answers."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.answer.event import AnswerEvent
from localllm.engine.engine import EngineStats
from localllm.slo import Slo

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_USER_DIGITS = 8
_RECENT_S, _FEWEST, _MOST_RECENT = 60.0, 3, 16
_LABELS = ("model", "user")

LoadedStats = Callable[[], Mapping[str, EngineStats]]


class Metrics:
    """A server's metrics. Not thread-safe: use them on the event loop.

    Answers are labelled by model and user: a prefix of the hash of the user's key, "" unless several users have keys.
    Times are the engine's, from submission; they exclude loading the model.
    """

    def __init__(self, slo: Slo | None = None) -> None:
        self.registry = CollectorRegistry()
        began = time.monotonic()
        uptime = Gauge("localllm_uptime_seconds", "How long the server has run.", registry=self.registry)
        uptime.set_function(lambda: time.monotonic() - began)
        self.requests = Counter(
            "localllm_requests", "HTTP requests by route and status.", ["route", "status"], registry=self.registry
        )
        self.semantic = Counter(
            "localllm_semantic_cache", "Questions to the semantic cache.", ["result"], registry=self.registry
        )
        self.slo = slo
        self.ttft = self._histogram("ttft_seconds", "Submission to first token.", _SECONDS)
        self.itl = self._histogram("itl_seconds", "Time between two tokens.", _TOKEN_SECONDS)
        self.e2e = self._histogram("e2e_seconds", "Submission to the end of the answer.", _SECONDS)
        self.queue = self._histogram("queue_seconds", "Time in the queue.", _SECONDS)
        self.cached = self._histogram("cached_share", "Share of the prompt that was cached.", _SHARES)
        self.recent: dict[str, deque[tuple[float, bool]]] = {}  # by model: when answers ended, whether within the SLO
        self.good = self._counter("slo_met", "Answers within the SLO; their rate is the goodput.")
        self.violations = self._counter("slo_violations", "Answers that exceeded a bound of the SLO.", "bound")

    def is_slow(self, model: str) -> bool:
        """Whether most of a model's answers of the last minute violated the SLO."""
        since = time.monotonic() - _RECENT_S
        recent = [good for ended, good in self.recent.get(model, ()) if ended > since]
        return len(recent) >= _FEWEST and 2 * sum(recent) < len(recent)

    def watch(self, loaded: LoadedStats) -> None:
        """Include the engines' statistics, read at each scrape."""
        self.registry.register(_Engines(loaded))

    def meter(self, model: str, namespace: str) -> "Meter":
        """A counter for one answer of a model to the user of a cache namespace."""
        return Meter(self, model, namespace[:_USER_DIGITS])

    def text(self) -> bytes:
        """All metrics in Prometheus' text format. Call it on the event loop."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"localllm_{name}", text, _LABELS, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"localllm_{name}", text, (*_LABELS, *labels), registry=self.registry)


class Meter:
    """Counts one answer, from its events."""

    def __init__(self, metrics: Metrics, *labels: str) -> None:
        self._metrics = metrics
        self._labels = labels
        self._itl = metrics.itl.labels(*labels)
        self._tokens = 0
        self._decode_s = 0.0
        self._longest: float | None = None

    def add(self, event: AnswerEvent) -> None:
        """Count an event. Tokens that arrive together share the time since the previous ones evenly."""
        tokens, decode_s = event.counts.generated, event.timings.decode_s
        if tokens > self._tokens:
            if self._tokens:
                gap = (decode_s - self._decode_s) / (tokens - self._tokens)
                self._longest = max(gap, self._longest or 0.0)
                for _ in range(tokens - self._tokens):
                    self._itl.observe(gap)
            self._tokens, self._decode_s = tokens, decode_s
        if event.finish_reason is not None:
            self._end(event)

    def _end(self, last: AnswerEvent) -> None:
        metrics, labels, counts, times = self._metrics, self._labels, last.counts, last.timings
        e2e = times.ttft_s + times.decode_s
        metrics.queue.labels(*labels).observe(times.queue_s)
        if counts.prompt:
            metrics.cached.labels(*labels).observe(counts.cached / counts.prompt)
        if not counts.generated:
            return
        metrics.ttft.labels(*labels).observe(times.ttft_s)
        metrics.e2e.labels(*labels).observe(e2e)
        if metrics.slo is None:
            return
        tpot = times.decode_s / (counts.generated - 1) if counts.generated > 1 else None
        exceeded = metrics.slo.violated(times.ttft_s, tpot, self._longest, e2e)
        for bound in exceeded:
            metrics.violations.labels(*labels, bound).inc()
        if not exceeded:
            metrics.good.labels(*labels).inc()
        metrics.recent.setdefault(labels[0], deque(maxlen=_MOST_RECENT)).append((time.monotonic(), not exceeded))


# Fields of EngineStats, the metrics' kinds, names and meanings.
_OF_ENGINES: tuple[tuple[str, type[GaugeMetricFamily | CounterMetricFamily], str, str], ...] = (
    ("running", GaugeMetricFamily, "running_requests", "Requests being computed."),
    ("waiting", GaugeMetricFamily, "waiting_requests", "Requests in the queue."),
    ("cached_prefixes", GaugeMetricFamily, "cached_prefixes", "Prefixes in the prefix cache."),
    ("cached_tokens", GaugeMetricFamily, "cached_tokens", "Tokens in the prefix cache."),
    ("pages_total", GaugeMetricFamily, "kv_pages", "KV pages in the budget."),
    ("pages_free", GaugeMetricFamily, "kv_pages_free", "KV pages that are free."),
    ("page_bytes", GaugeMetricFamily, "kv_page_bytes", "Bytes of a KV page."),
    ("window_pages", GaugeMetricFamily, "kv_window_pages", "What layers with a window take, in KV pages."),
    ("kept_window_pages", GaugeMetricFamily, "kv_kept_window_pages", "Windows kept while there is room, in KV pages."),
    ("prompt_tokens", CounterMetricFamily, "prompt_tokens", "Prompt tokens processed, cached ones included."),
    ("generated_tokens", CounterMetricFamily, "generated_tokens", "Tokens generated."),
    ("drafted_tokens", CounterMetricFamily, "drafted_tokens", "Tokens drafted speculatively."),
    ("accepted_tokens", CounterMetricFamily, "accepted_tokens", "Drafted tokens that were accepted."),
    ("evicted_tokens", CounterMetricFamily, "evicted_tokens", "Tokens evicted from the prefix cache."),
    ("preemptions", CounterMetricFamily, "preemptions", "Requests preempted for lack of KV pages."),
)
_TIERS = {"memory": "reused_memory_tokens", "disk": "reused_disk_tokens"}


class _Engines(Collector):
    def __init__(self, loaded: LoadedStats) -> None:
        self._loaded = loaded

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        loaded = self._loaded().items()
        for field, kind, name, text in _OF_ENGINES:
            family = kind(f"localllm_{name}", text, labels=["model"])
            for model, stats in loaded:
                family.add_metric([model], getattr(stats, field))
            yield family
        hits = CounterMetricFamily(
            "localllm_prefix_hit_tokens", "Prompt tokens read from the prefix cache.", labels=["model", "tier"]
        )
        for model, stats in loaded:
            for tier, field in _TIERS.items():
                hits.add_metric([model, tier], getattr(stats, field))
        yield hits
        yield GaugeMetricFamily("localllm_tasks", "Tasks of the event loop.", value=len(asyncio.all_tasks()))
        yield GaugeMetricFamily("localllm_models_loaded", "Models in memory.", value=len(loaded))
        yield GaugeMetricFamily(
            "localllm_memory_bytes", "Memory that the process holds.", value=psutil.Process().memory_info().rss
        )


class Counting:
    """ASGI middleware that counts requests by status and route: the route's pattern, since paths are unbounded."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                self._metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)
