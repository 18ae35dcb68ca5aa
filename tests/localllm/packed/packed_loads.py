"""Loads models as the engine does, with packed weights in a home of the test's own."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from gguf_io import open_model
from localllm import files, packed
from models.native_runner import NativeRunner
from models.packed_file import PackedWeights
from tests.systems import use_own_places
from tests.waiting import PATIENCE_S

PLENTY = 1000  # MiB


def pack_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use this home, in which small and new models are also packed, immediately."""
    use_own_places(home, monkeypatch)
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    monkeypatch.setattr(files, "SETTLED_NS", -(2**62))
    monkeypatch.setattr(packed, "_WAIT_S", 0.0)
    monkeypatch.setattr(packed, "_PATIENCE_S", PATIENCE_S)


class Loads:
    """Loads a model like the engine, and counts how often its weights were packed."""

    packed = 0

    def __call__(self, path: Path, limit_mib: int | None = PLENTY) -> np.ndarray:
        """Logits of a token; the packed file is complete afterwards."""
        with open_model(path) as file:

            def opened(ready: PackedWeights | None) -> NativeRunner:
                self.packed += ready is None
                return NativeRunner(file, kv_bytes=1 << 20, threads=1, ready=ready)

            runner = packed.open_with_packed(file, packed.find_packed(file, limit_mib), limit_mib, opened)
        with closing(runner):
            packed.finish_keeping()
            return runner.run([5], [0], [runner.create_sequence()], [0]).copy()


def stored() -> list[Path]:
    return [each.path for each in packed.packed_files()]
