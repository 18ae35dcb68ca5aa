"""A fake runner whose device computes beside its caller."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.engine.runner import Begin
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
        self._prepared: list[Sequence[int]] = []
        self._latest = np.empty(0, np.float32)

    def prepare(self, *places: Sequence[int]) -> Begin:
        """Compute once the tokens come, but keep the result until it is asked for."""
        latest = self._prepared = [*places]

        def begin(tokens: Sequence[int]) -> Callable[[], NDArray[np.float32]]:
            assert self._prepared is latest, "something else was done since"
            logits = self.run(tokens, *places)
            self.busy = True
            self.begun += 1

            def wait() -> NDArray[np.float32]:
                self.meanwhile()
                self.busy = False
                return logits

            return wait

        return begin

    def run(self, *rows: Sequence[int]) -> NDArray[np.float32]:
        assert not self.busy
        self._latest[:] = np.nan  # valid until the next call
        self._latest = super().run(*rows)
        return self._latest

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
