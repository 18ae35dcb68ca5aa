"""Request latencies: times, percentiles, and how many requests met a service-level objective (SLO).

TTFT: from when a request was due to its first text. ITL: each gap between two pieces of text. TPOT: the mean time per
token after the first. E2E: from when a request was due to the end of its answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from localllm.slo import Slo


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request and its result. Times are in seconds since the beginning of the measurement.

    due: when it should have been sent. Latencies count from then, not from `sent`, so that a load generator or a
    connection limit that holds requests back cannot hide a slow server (coordinated omission).
    pieces: when each piece of text arrived. Token counts are the server's; None if it reports none.
    error: why there is no complete answer.
    """

    due: float
    sent: float
    pieces: tuple[float, ...]
    ended: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens generated; the number of pieces if the server reports no count."""
        return len(self.pieces) if self.generated_tokens is None else self.generated_tokens

    @property
    def ttft(self) -> float:
        """Seconds from `due` to the first text; to the end of an answer without text."""
        return (self.pieces[0] if self.pieces else self.ended) - self.due

    @property
    def itl(self) -> tuple[float, ...]:
        """Gaps between pieces. A piece has more than one token if the server sends several together."""
        return tuple(later - earlier for earlier, later in pairwise(self.pieces))

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None with fewer than two pieces or two tokens."""
        if len(self.pieces) < 2 or self.tokens < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1)

    @property
    def e2e(self) -> float:
        """Time of the whole answer."""
        return self.ended - self.due

    def meets(self, slo: Slo) -> bool:
        """Whether the request was answered within all bounds."""
        longest = max(self.itl, default=None)
        return self.error is None and not slo.violated(self.ttft, self.tpot, longest, self.e2e)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """p50, p95, p99 and mean of some values, in their unit."""

    p50: float
    p95: float
    p99: float
    mean: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """The percentiles of values; None if there are none."""
        import numpy as np  # not for commands that only read bounds

        found = list(values)
        if not found:
            return None
        p50, p95, p99 = np.percentile(found, (50, 95, 99)).tolist()
        return cls(p50, p95, p99, float(np.mean(found)))


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of many requests. Latencies are those of answered requests, in seconds; rates are per second.

    seconds: from the first request to the last end. cached_share: of the prompt tokens, None if the server reports no
    counts. good: requests that met the SLO; None without one.
    """

    requests: int
    answered: int
    seconds: float
    ttft: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    e2e: Percentiles | None
    prompt_tokens: int
    generated_tokens: int
    cached_share: float | None
    counted: bool
    late: float
    good: int | None

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], slo: Slo | None = None) -> Self:
        """Sum up. counted: whether the server counted all tokens; late: the longest time a request was held back."""
        answered = [outcome for outcome in outcomes if outcome.error is None]
        began = min((outcome.due for outcome in outcomes), default=0.0)
        cached = [outcome.cached_tokens for outcome in answered if outcome.cached_tokens is not None]
        prompt = sum(outcome.prompt_tokens or 0 for outcome in answered)
        return cls(
            requests=len(outcomes),
            answered=len(answered),
            seconds=max((outcome.ended for outcome in outcomes), default=0.0) - began,
            ttft=Percentiles.of(outcome.ttft for outcome in answered),
            itl=Percentiles.of(gap for outcome in answered for gap in outcome.itl),
            tpot=Percentiles.of(outcome.tpot for outcome in answered if outcome.tpot is not None),
            e2e=Percentiles.of(outcome.e2e for outcome in answered),
            prompt_tokens=prompt,
            generated_tokens=sum(outcome.tokens for outcome in answered),
            cached_share=sum(cached) / prompt if cached and prompt else None,
            counted=all(outcome.generated_tokens is not None for outcome in answered),
            late=max((outcome.sent - outcome.due for outcome in outcomes), default=0.0),
            good=None if slo is None else sum(outcome.meets(slo) for outcome in outcomes),
        )

    @property
    def request_rate(self) -> float:
        """Answers a second."""
        return self._a_second(self.answered)

    @property
    def token_rate(self) -> float:
        """Generated tokens a second."""
        return self._a_second(self.generated_tokens)

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second, cached ones included."""
        return self._a_second(self.prompt_tokens)

    @property
    def goodput(self) -> float | None:
        """Requests a second that met the SLO."""
        return None if self.good is None else self._a_second(self.good)

    @property
    def attained(self) -> float | None:
        """The share of requests that met the SLO, 0 to 1."""
        return None if self.good is None else self.good / max(self.requests, 1)

    def _a_second(self, count: int) -> float:
        return count / self.seconds if self.seconds else 0.0
