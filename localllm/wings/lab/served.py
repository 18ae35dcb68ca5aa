"""Tokens that a localllm server has served, from the counters of /metrics, which contain no prompts or answers."""

from collections.abc import Mapping
from dataclasses import dataclass

from localllm.errors import RequestError
from localllm.wings.lab.formulas import money

_COUNTERS = {
    "localllm_prompt_tokens_total": "prompt",
    "localllm_prefix_hit_tokens_total": "cached",
    "localllm_generated_tokens_total": "generated",
}


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token counts. prompt: including cached ones; cached: those of the prompt that were not computed again."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(self.prompt + other.prompt, self.cached + other.cached, self.generated + other.generated)

    def since(self, earlier: "Tokens") -> "Tokens":
        """The tokens added since `earlier`; all of them if the counters have restarted in between."""
        added = Tokens(self.prompt - earlier.prompt, self.cached - earlier.cached, self.generated - earlier.generated)
        return self if min(added.prompt, added.cached, added.generated) < 0 else added


@dataclass(frozen=True, slots=True)
class TokensServed:
    """Tokens by model. seconds: how long the server has been counting; None if unknown."""

    models: Mapping[str, Tokens]
    seconds: float | None


def read_metrics(text: str) -> TokensServed:
    """Read Prometheus' text format. Raises RequestError if it has none of localllm's counters."""
    from prometheus_client.parser import text_string_to_metric_families

    counts: dict[str, dict[str, int]] = {}
    seconds: float | None = None
    ours = False
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                ours = ours or sample.name.startswith("localllm_")
                if sample.name == "localllm_uptime_seconds":
                    seconds = sample.value
                elif (field := _COUNTERS.get(sample.name)) is not None:
                    model = counts.setdefault(sample.labels.get("model", ""), {})
                    model[field] = model.get(field, 0) + int(sample.value)
    except ValueError as error:
        raise RequestError(f"The metrics are not in Prometheus' text format ({error}).") from error
    if not ours:
        raise RequestError("The metrics are not those of a localllm server: no localllm_ counters.")
    return TokensServed({name: Tokens(**fields) for name, fields in counts.items()}, seconds)


class Tally:
    """Adds up the tokens served from one reading to the next. A model that is unloaded keeps its total."""

    def __init__(self, first: TokensServed) -> None:
        self._last = first
        self.models: dict[str, Tokens] = {}

    def add(self, reading: TokensServed) -> None:
        """Add the tokens since the previous reading."""
        for name, tokens in reading.models.items():
            added = tokens.since(self._last.models.get(name, Tokens()))
            self.models[name] = self.models.get(name, Tokens()) + added
        self._last = reading


@dataclass(frozen=True, slots=True)
class Prices:
    """kwh: price of a kilowatt-hour. The others: an API's prices per million tokens; cached: None means as prompt."""

    kwh: float | None = None
    prompt: float | None = None
    generated: float | None = None
    cached: float | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """Tokens served in a period of `seconds`, and the energy used. joules: None if unknown."""

    models: Mapping[str, Tokens]
    seconds: float
    joules: float | None
    prices: Prices

    @property
    def total(self) -> Tokens:
        """Tokens of all models."""
        return sum(self.models.values(), Tokens())

    @property
    def kwh(self) -> float | None:
        return None if self.joules is None else money.kwh(self.joules / money.SECONDS_PER_HOUR, 1)

    @property
    def electricity(self) -> float | None:
        """Price of the energy; None if it or its price is unknown."""
        return None if self.kwh is None or self.prices.kwh is None else self.kwh * self.prices.kwh

    @property
    def electricity_per_million(self) -> float | None:
        """Price of the electricity for a million generated tokens."""
        if self.electricity is None or not self.total.generated:
            return None
        return self.electricity / self.total.generated * money.MILLION

    @property
    def joules_per_token(self) -> float | None:
        """Energy per generated token, including prefill and idle time."""
        return None if self.joules is None or not self.total.generated else self.joules / self.total.generated

    @property
    def api(self) -> float | None:
        """The API's price for the same tokens; None if its prices are not given."""
        prices, total = self.prices, self.total
        if prices.prompt is None or prices.generated is None:
            return None
        return money.api_price(
            total.prompt, total.generated, prices.prompt, prices.generated, total.cached, prices.cached
        )
