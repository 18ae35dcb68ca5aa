"""Beginnings of prompts that requests pin: evicted last until a time, within a share of each memory and the disk."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_CLOCK_S = 60.0  # by which clocks are set back without further meaning
N = TypeVar("N", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Pin:
    """The first tokens of a prompt, kept for some seconds after their last use. priority: a request's, lower first."""

    tokens: int
    seconds: float
    priority: int = 0


def computed_for(pins: Sequence[Pin], reused: int) -> tuple[tuple[float, int], ...]:
    """How many tokens are pinned for each time, the longest first, of those after the reused ones."""
    found: dict[float, int] = {}
    for pin in sorted(pins, key=lambda one: (-one.seconds, one.tokens)):
        found[pin.seconds] = found.get(pin.seconds, 0) + max(pin.tokens - reused, 0)
        reused = max(reused, pin.tokens)
    return tuple(found.items())


@dataclass(frozen=True, slots=True)
class PinRecord:
    """A pin as the disk tier stores it. until: in seconds since 1970. seconds: how long it was made for."""

    until: float
    seconds: float
    priority: int

    def holds(self, now: float) -> bool:
        """Whether it pins at a time: not if it ends later than it can, because a clock was set back.

        Raises TypeError for values that are no numbers.
        """
        return isinstance(self.priority, int) and 0 < self.until - now <= self.seconds + _CLOCK_S


class Pins(Generic[N]):
    """What is pinned, until when (by a monotonic clock), and with which priority. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: dict[N, tuple[float, int]] = {}

    def add(self, one: N, pin: Pin) -> None:
        """Pin something, or prolong its pin."""
        until, priority = self._kept.get(one, (0.0, pin.priority))
        self._kept[one] = max(until, self._clock() + pin.seconds), min(priority, pin.priority)

    def discard(self, one: N) -> None:
        """Remove a pin, if there is one."""
        self._kept.pop(one, None)

    def current(self) -> set[N]:
        """What is pinned now; pins that have expired are removed."""
        now = self._clock()
        self._kept = {one: kept for one, kept in self._kept.items() if kept[0] > now}
        return {*self._kept}

    def limit(self, size: Callable[[set[N]], float], most: float, last_used: Callable[[N], int]) -> None:
        """Remove pins until those left have at most this size: the lowest priorities, the least recently used first."""
        left = self.current()
        while left and size(left) > most:
            worst = max(left, key=lambda one: (self._kept[one][1], -last_used(one)))
            self.discard(worst)
            left.remove(worst)
