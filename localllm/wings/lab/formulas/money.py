"""Energy and money. Money is in the currency of the prices; token prices are per million."""

SECONDS_PER_HOUR = 3600
HOURS_PER_MONTH = 730  # 8760 / 12
MILLION = 1e6


def kwh(watts: float, hours: float) -> float:
    """Kilowatt-hours of a constant power over a time."""
    return watts * hours / 1000


def joules_per_token(watts: float, tokens_per_second: float) -> float:
    """Energy per token."""
    return watts / tokens_per_second


def kwh_per_million(watts: float, tokens_per_second: float) -> float:
    """Kilowatt-hours per million tokens."""
    return joules_per_token(watts, tokens_per_second) * MILLION / SECONDS_PER_HOUR / 1000


def cost_per_million(money_per_hour: float, tokens_per_second: float) -> float:
    """Cost of a million tokens on a machine that costs money_per_hour and is always busy."""
    return money_per_hour / (tokens_per_second * SECONDS_PER_HOUR) * MILLION


def money_per_hour(price: float, years: float, watts: float, price_per_kwh: float, busy: float = 1.0) -> float:
    """Cost of an hour of work on one's own machine: its price spread over its busy hours, plus electricity.

    busy: the share of time that it works; electricity is counted only for that time.
    """
    return price / (years * 12 * HOURS_PER_MONTH * busy) + kwh(watts, 1) * price_per_kwh


def api_price(
    prompt_tokens: float,
    generated_tokens: float,
    prompt_price: float,
    generated_price: float,
    cached_tokens: float = 0.0,
    cached_price: float | None = None,
) -> float:
    """An API's price for tokens. prompt_tokens include cached_tokens, which without a price cost the same as others."""
    cached_price = prompt_price if cached_price is None else cached_price
    fresh = prompt_tokens - cached_tokens
    return (fresh * prompt_price + cached_tokens * cached_price + generated_tokens * generated_price) / MILLION


def break_even_tokens(fixed: float, api_price_per_million: float, own_price_per_million: float = 0.0) -> float:
    """Tokens above which one's own machine is cheaper than an API, in the time that `fixed` money pays for.

    own_price_per_million: the machine's variable cost, such as electricity. Raises ValueError if the API costs no more
    than that, since there is no break-even then.
    """
    saved = api_price_per_million - own_price_per_million
    if saved <= 0:
        raise ValueError("the API costs no more for each token than the own machine does, so there is no break-even")
    return fixed / saved * MILLION
