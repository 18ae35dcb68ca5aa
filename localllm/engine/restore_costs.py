"""Learns what computing and restoring a token cost, and whether restoring a prefix pays on this machine.

On a fast GPU, computing a prefix may take less time than reading its KV from the disk. What was measured is kept with
this machine's compiled kernels, for each model and placement, so a new process knows it from its first request on.
"""

import hashlib
import json
from dataclasses import dataclass

from cpu_kernels.kernel_cache import read_measured, write_measured
from gguf_io.runner_info import RunnerInfo

COMPUTED, MEMORY, DISK = "computed", "memory", "disk"
# Steps and restores of fewer tokens tell little about the cost of a token.
LEAST_ROWS = 16
# A prefix is computed although it is stored only if that saves this much, after as many restores as this.
LEAST_SAVED_S, LEAST_RESTORES = 0.005, 2
# Each time that it is computed, restoring counts as that much cheaper, so it is tried again now and then.
RETRY = 0.99
_FILE = "restore_costs"
MOST_KEPT = 64


@dataclass(slots=True)
class _Pace:
    """Seconds for a token, and how many times that was measured."""

    seconds: float = 0.0
    count: int = 0


class RestoreCosts:
    """The costs of one model on one device. key: under which they are kept, "" for nowhere."""

    def __init__(self, key: str = "") -> None:
        self._key = key
        self._paces = {name: _Pace() for name in (COMPUTED, MEMORY, DISK)}
        kept = kept_costs().get(key) if key else None
        for name, pace in self._paces.items():
            match kept.get(name) if isinstance(kept, dict) else None:
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
        paces: dict[str, object] = {
            name: [pace.seconds, pace.count] for name, pace in self._paces.items() if pace.count
        }
        if not self._key or not paces:
            return
        kept = kept_costs()
        kept.pop(self._key, None)
        kept[self._key] = paces
        write_measured(_FILE, json.dumps(dict([*kept.items()][-MOST_KEPT:])).encode())


def costs_of(info: RunnerInfo, placed: str) -> RestoreCosts:
    """The costs of a runner's model, with what earlier processes learned. placed: on which devices, and how."""
    files = [[str(file.path), file.size, file.modified_ns] for file in info.kv_files]
    identity = json.dumps([info.backend, info.kv_layout, files, placed])
    return RestoreCosts(hashlib.blake2b(identity.encode(), digest_size=16).hexdigest())


def kept_costs() -> dict[str, object]:
    data = read_measured(_FILE)
    kept = json.loads(data) if data else {}
    return kept if isinstance(kept, dict) else {}
