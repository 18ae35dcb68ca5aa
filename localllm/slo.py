"""Service-level objectives: upper bounds of a request's latencies."""

import re
from dataclasses import dataclass, fields
from typing import Self

from localllm.errors import RequestError

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_TIME = re.compile(r"(\d*\.?\d+)(us|ms|s)?")


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper bounds in seconds; None is no bound. itl bounds the longest gap of an answer."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "ttft=2s,tpot=100ms"; a number without a unit is in seconds. Raises RequestError."""
        names = [field.name for field in fields(cls)]
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            found = _TIME.fullmatch(value.strip())
            if name not in names or name in bounds or found is None:
                raise RequestError(
                    f"The SLO has {part.strip()!r}; give each of {', '.join(names)} at most once, as in "
                    "ttft=2s,tpot=100ms."
                )
            bounds[name] = float(found[1]) * _UNITS[found[2] or "s"]
        return cls(**bounds)

    def __str__(self) -> str:
        bounds = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ",".join(f"{name}={value:g}s" for name, value in bounds if value is not None)

    def violated(self, ttft: float, tpot: float | None, itl: float | None, e2e: float) -> list[str]:
        """The names of the bounds that an answer's times exceed. tpot, itl: None for an answer of one token."""
        times = {"ttft": ttft, "tpot": tpot, "itl": itl, "e2e": e2e}
        bounds = {name: getattr(self, name) for name in times}
        return [name for name, value in times.items() if None not in (value, bounds[name]) and value > bounds[name]]
