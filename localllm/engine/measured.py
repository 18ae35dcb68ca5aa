"""What was measured of models on this machine, kept for the next process beside its compiled kernels."""

import hashlib
import json
from collections.abc import Mapping

from cpu_kernels.kernel_cache import read_measured, write_measured
from gguf_io.runner_info import RunnerInfo

MOST_KEPT = 64


class Measured:
    """The measurements of one kind of one model, as placed. key: from key_of; "" keeps nothing."""

    def __init__(self, kind: str, key: str) -> None:
        self._kind, self._key = kind, key

    def read(self) -> dict[str, object]:
        """What the last process wrote; empty if there is nothing, or nothing valid."""
        found = _all(self._kind).get(self._key) if self._key else None
        return found if isinstance(found, dict) else {}

    def write(self, measured: Mapping[str, object]) -> None:
        """Keep measurements instead of those before; of few models only, the latest."""
        if not self._key or not measured:
            return
        kept = _all(self._kind)
        kept.pop(self._key, None)
        kept[self._key] = dict(measured)
        write_measured(self._kind, json.dumps(dict([*kept.items()][-MOST_KEPT:])).encode())


def key_of(info: RunnerInfo, *placed: str) -> str:
    """The key of a runner's model. placed: on which devices, and how, and what else the measurements depend on."""
    files = [[str(file.path), file.size, file.modified_ns] for file in info.kv_files]
    identity = json.dumps([info.backend, info.kv_layout, files, *placed])
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def _all(kind: str) -> dict[str, object]:
    data = read_measured(kind)
    kept = json.loads(data) if data else {}
    return kept if isinstance(kept, dict) else {}
