"""Energy and money. Money is in the currency of the prices; token prices are per million."""

SECONDS_PER_HOUR = 3600
MILLION = 1e6


def kwh(watts: float, hours: float) -> float:
    """Kilowatt-hours of a constant power over a time."""
    return watts * hours / 1000


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
