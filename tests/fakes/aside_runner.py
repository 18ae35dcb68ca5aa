"""A fake runner whose device computes beside its caller."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.fakes.fake_runner import FakeRunner


class AsideRunner(FakeRunner):
    """Between `begin` and the call of its result, nothing else may be done with its sequences.

    meanwhile: called when the result is waited for. begun: how many steps were.
    """

    def __init__(self, **described: Any) -> None:
        super().__init__(**{"computes_aside": True, **described})
        self.meanwhile: Callable[[], None] = lambda: None
        self.busy = False
        self.begun = 0

    def begin(self, *rows: Sequence[int]) -> Callable[[], NDArray[np.float32]]:
        """Compute, but keep the result until it is asked for."""
        logits = self.run(*rows)
        self.busy = True
        self.begun += 1

        def wait() -> NDArray[np.float32]:
            self.meanwhile()
            self.busy = False
            return logits

        return wait

    def run(self, *rows: Sequence[int]) -> NDArray[np.float32]:
        assert not self.busy
        return super().run(*rows)

    def create_sequence(self, adapters: tuple[tuple[int, float], ...] = ()) -> int:
        assert not self.busy
        return super().create_sequence(adapters)

    def fork_sequence(self, source: int, length: int) -> int:
        assert not self.busy
        return super().fork_sequence(source, length)

    def truncate_sequence(self, sequence: int, length: int) -> None:
        assert not self.busy
        super().truncate_sequence(sequence, length)

    def free_sequence(self, sequence: int) -> None:
        assert not self.busy
        super().free_sequence(sequence)

    def export_kv(self, sequence: int, start: int, stop: int) -> bytes:
        assert not self.busy
        return super().export_kv(sequence, start, stop)

    def import_kv(self, sequence: int, start: int, stop: int, data: bytes | memoryview) -> None:
        assert not self.busy
        super().import_kv(sequence, start, stop, data)

    def close(self) -> None:
        assert not self.busy
        super().close()
