"""Learns what computing and restoring a token cost, and whether restoring a prefix pays on this machine.

On a fast GPU, computing a prefix may take less time than reading its KV from the disk. What was measured is kept with
this machine's compiled kernels, for each model and placement, so a new process knows it from its first request on.
"""

from dataclasses import dataclass

from localllm.engine.measured import Measured

COMPUTED, MEMORY, DISK = "computed", "memory", "disk"
# Steps and restores of fewer tokens tell little about the cost of a token.
LEAST_ROWS = 16
# A prefix is computed although it is stored only if that saves this much, after as many restores as this.
LEAST_SAVED_S, LEAST_RESTORES = 0.005, 2
# Each time that it is computed, restoring counts as that much cheaper, so it is tried again now and then.
RETRY = 0.99


@dataclass(slots=True)
class _Pace:
    """Seconds for a token, and how many times that was measured."""

    seconds: float = 0.0
    count: int = 0


class RestoreCosts:
    """The costs of one model on one device. key: under which they are kept, "" for nowhere."""

    def __init__(self, key: str = "") -> None:
        self._kept = Measured("restore_costs", key)
        self._paces = {name: _Pace() for name in (COMPUTED, MEMORY, DISK)}
        before = self._kept.read()
        for name, pace in self._paces.items():
            match before.get(name):
                case [float(seconds), int(count)] if seconds > 0 and count > 0:
                    pace.seconds, pace.count = seconds, count

    def observe(self, what: str, tokens: int, seconds: float) -> None:
        """Learn from tokens that were COMPUTED in one step, or restored from MEMORY or DISK. Ignores few tokens."""
        if tokens < LEAST_ROWS:
            return
        pace, measured = self._paces[what], seconds / tokens
        pace.seconds = (pace.seconds + measured) / 2 if pace.count else measured
        pace.count += 1

    def saved_s(self, source: str, tokens: int) -> float:
        """Seconds saved by restoring tokens instead of computing them; negative if that takes longer.

        Until both costs are known, restoring is taken to cost nothing.
        """
        computed, restored = self._paces[COMPUTED], self._paces[source]
        per_token = computed.seconds if computed.count else 1.0
        known = computed.count and restored.count >= LEAST_RESTORES
        return tokens * (per_token - (restored.seconds if known else 0.0))

    def pays(self, source: str, tokens: int) -> bool:
        """Whether to restore tokens."""
        return self.saved_s(source, tokens) >= -LEAST_SAVED_S

    def passed_over(self, source: str) -> None:
        """Note that tokens will be computed although they are stored."""
        self._paces[source].seconds *= RETRY

    def keep(self) -> None:
        """Store what was learned for the next process."""
        self._kept.write({name: [pace.seconds, pace.count] for name, pace in self._paces.items() if pace.count})
