"""Random work on sequences that rest, are parked and come back: what they hold is what was appended."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpu_offload import parking
from tests.gpu_offload import sparse_models
from tests.gpu_offload.resting import OPTIONS, append, opened, same
from tests.oracle import llama_oracle

pytestmark = [pytest.mark.oracle, llama_oracle.needs_llama]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "PIECE_TOKENS", 32)
    monkeypatch.setattr(parking, "HEAD_TOKENS", 5)
    monkeypatch.setattr(parking, "LEAST_TOKENS", 8)


class Machine:
    """A runner at random work, and the tokens that each of its sequences must hold."""

    def __init__(self, path: Path, seed: int) -> None:
        self.chance = np.random.default_rng(seed)
        self.runner, self.reference = opened(path), opened(path)
        self.held: dict[int, list[int]] = {}
        self.rest: set[int] = set()
        self.most = self.most_ahead = 0
        self.happened_in_parts = False

    def act(self) -> None:
        actions: list[Callable[[int], None]] = [self.append, self.append, self.fork, self.cut, self.park, self.park]
        if not self.held or (len(self.held) < 4 and self.chance.random() < 0.3):
            self.held[self.runner.create_sequence()] = []
        chosen = list(self.held)[int(self.chance.integers(len(self.held)))]
        actions.extend([self.free, self.move, self.prepare])
        actions[int(self.chance.integers(len(actions)))](chosen)
        if self.chance.random() < 0.3:
            self.runner.copy_resting()
        self.runner.check_parked()
        assert {one: self.runner.sequence_length(one) for one in self.held} == {
            one: len(tokens) for one, tokens in self.held.items()
        }
        self.most = max(self.most, self.runner.pages_parked())
        self.most_ahead = max(self.most_ahead, self.runner.pages_copied() - self.runner.pages_parked())

    def append(self, sequence: int) -> None:
        tokens = self.held[sequence]
        count = min(int(self.chance.integers(1, 60)), 230 - len(tokens), self.runner.pages_free())
        if count < 1:
            return
        tokens += self.chance.integers(5, 290, count).tolist()
        self.rest.discard(sequence)
        logits = append(self.runner, sequence, tokens[-count:])
        anew = self.reference.create_sequence()
        same(logits, append(self.reference, anew, tokens))
        self.reference.free_sequence(anew)

    def fork(self, sequence: int) -> None:
        if len(self.held) < OPTIONS.max_sequences:
            length = int(self.chance.integers(len(self.held[sequence]) + 1))
            self.held[self.runner.fork_sequence(sequence, length)] = self.held[sequence][:length]

    def cut(self, sequence: int) -> None:
        length = int(self.chance.integers(len(self.held[sequence]) // 2, len(self.held[sequence]) + 1))
        self.runner.truncate_sequence(sequence, length)
        del self.held[sequence][length:]

    def park(self, sequence: int) -> None:
        self.runner.park_sequence(sequence)

    def prepare(self, sequence: int) -> None:
        """What is then appended is another matter."""
        if not self.runner.prepare_sequence(sequence, int(self.chance.integers(1, 60))):
            self.happened_in_parts = True

    def free(self, sequence: int) -> None:
        self.runner.free_sequence(sequence)
        del self.held[sequence]

    def move(self, sequence: int) -> None:
        """Export the end of a sequence, cut it off, and import it again."""
        tokens = self.held[sequence]
        if tokens:
            start = int(self.chance.integers(len(tokens)))
            data = self.runner.export_kv(sequence, start, len(tokens))
            self.runner.truncate_sequence(sequence, start)
            self.runner.import_kv(sequence, start, len(tokens), data)

    def close(self) -> None:
        self.runner.close()
        self.reference.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_work(data_dir, seed, monkeypatch):
    monkeypatch.setattr(parking, "PART_BYTES", 1)  # a piece is moved at a time
    machine = Machine(data_dir / "models" / "gguf" / "stories260K-F32.gguf", seed)
    for _ in range(250):
        machine.act()
    assert machine.most > 128
    assert machine.most_ahead > 32
    assert machine.happened_in_parts
    machine.close()


def test_random_work_behind_windows(tmp_path):
    machine = Machine(sparse_models.write(sparse_models.TINY_GEMMA3, tmp_path / "gemma.gguf", seed=3), 5)
    for _ in range(150):
        machine.act()
    assert machine.most > 128
    assert machine.most_ahead > 32
    machine.close()
