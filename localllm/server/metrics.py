"""Prometheus metrics. They contain nothing of prompts or answers."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.answer.event import AnswerEvent
from localllm.engine.engine import EngineStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

LoadedStats = Callable[[], Mapping[str, EngineStats]]


class Metrics:
    """A server's metrics. Not thread-safe: use them on the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "localllm_requests", "HTTP requests by route and status.", ["route", "status"], registry=self.registry
        )
        self._ttft = Histogram(
            "localllm_ttft_seconds", "Submission to first token.", buckets=_SECONDS, registry=self.registry
        )
        self._itl = Histogram(
            "localllm_itl_seconds",
            "Time between two tokens, a request's mean.",
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )
        self._queue = Histogram(
            "localllm_queue_seconds", "Time that requests spent in the queue.", buckets=_SECONDS, registry=self.registry
        )

    def watch(self, loaded: LoadedStats) -> None:
        """Include the engines' figures, read whenever the metrics are."""
        self.registry.register(_Engines(loaded))

    def observe(self, last: AnswerEvent) -> None:
        """Count an answer by its last event."""
        self._queue.observe(last.timings.queue_s)
        if last.counts.generated:
            self._ttft.observe(last.timings.ttft_s)
        if last.counts.generated > 1:
            self._itl.observe(last.timings.decode_s / (last.counts.generated - 1))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format. Call it on the event loop."""
        return generate_latest(self.registry)


_GAUGES = {
    "running": ("localllm_running_requests", "Requests being computed."),
    "waiting": ("localllm_waiting_requests", "Requests in the queue."),
    "cached_prefixes": ("localllm_cached_prefixes", "Prefixes in the prefix cache."),
    "cached_tokens": ("localllm_cached_tokens", "Tokens in the prefix cache."),
    "pages_total": ("localllm_kv_pages", "KV pages in the budget."),
    "pages_free": ("localllm_kv_pages_free", "KV pages that are free."),
    "page_bytes": ("localllm_kv_page_bytes", "Bytes of a KV page."),
}
_COUNTERS = {
    "prompt_tokens": ("localllm_prompt_tokens", "Prompt tokens, cached ones included."),
    "generated_tokens": ("localllm_generated_tokens", "Tokens generated."),
    "drafted_tokens": ("localllm_drafted_tokens", "Tokens drafted speculatively."),
    "accepted_tokens": ("localllm_accepted_tokens", "Drafted tokens that were accepted."),
    "evicted_tokens": ("localllm_evicted_tokens", "Tokens evicted from the prefix cache."),
    "preemptions": ("localllm_preemptions", "Requests preempted for lack of KV pages."),
}
_TIERS = {"memory": "reused_memory_tokens", "disk": "reused_disk_tokens"}


class _Engines(Collector):
    def __init__(self, loaded: LoadedStats) -> None:
        self._loaded = loaded

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        loaded = self._loaded().items()
        for field, (name, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model"])
            for model, stats in loaded:
                gauge.add_metric([model], getattr(stats, field))
            yield gauge
        for field, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["model"])
            for model, stats in loaded:
                counter.add_metric([model], getattr(stats, field))
            yield counter
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
        """Pass on, and count the status."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                self._metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)
