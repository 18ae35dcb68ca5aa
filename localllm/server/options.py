"""How the endpoint behaves: from the settings, and from Ollama's variables where ours are silent."""

import re
from dataclasses import dataclass, field

FOREVER = float("inf")

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]*\.?[0-9]+)(ns|us|µs|ms|s|m|h)")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """keep_alive_s and grace_s are seconds; memory_bytes None is what the machine has free.

    hosts are further names that the Host header may carry, origins those of foreign pages that may call.
    """

    host: str = "127.0.0.1"
    port: int = 11434
    api_key: str | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    keep_alive_s: float = 300.0
    max_models: int = 3
    max_queue: int = 512
    memory_bytes: int | None = None
    grace_s: float = 30.0


def parse_duration(value: str | float) -> float:
    """Seconds of Ollama's keep_alive: a number of seconds or text such as "5m" or "1h30m"; negative is FOREVER.

    Raises ValueError.
    """
    if isinstance(value, str):
        text = value.strip()
        sign, digits = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
        if re.fullmatch(r"[0-9]+", digits):
            seconds = sign * float(digits)
        elif re.fullmatch(f"(?:{_DURATION.pattern})+", digits):
            seconds = sign * sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(digits))
        else:
            raise ValueError(f"{value!r} is no duration; write 300, 5m or -1")
    else:
        seconds = float(value)
    return FOREVER if seconds < 0 else seconds
