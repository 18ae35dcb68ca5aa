"""Times a runner's prefill and decoding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from localllm.engine.runner import Runner

_SEED = 1


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What to measure. Lengths in tokens; depths: lengths of the sequence before the first decoded token."""

    prompt: int
    depths: tuple[int, ...]
    tokens: int
    rounds: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.prompt, max(self.depths) + self.tokens)

    @property
    def kv_tokens(self) -> int:
        """KV cache tokens for all simultaneous sequences, including partly filled pages."""
        return max(self.depths) + max(self.prompt, self.tokens) + 1024


class SpeedTest:
    """Measures one runner, a round at a time. Every round computes the same random tokens, from a fixed seed.

    prefill: each round's seconds for the whole prompt; decode: for BenchRequest.tokens tokens at each depth.
    """

    def __init__(
        self, runner: Runner, request: BenchRequest, clock: Callable[[], float], tell: Callable[[str], None]
    ) -> None:
        """Fill a sequence for each depth. tell: called with the current activity."""
        self._runner, self._request, self._clock, self._tell = runner, request, clock, tell
        self.prefill: list[float] = []
        self.decode: dict[int, list[float]] = {depth: [] for depth in request.depths}
        generator = np.random.default_rng(_SEED)
        self.tokens: list[int] = generator.integers(0, runner.info.vocab_size, request.longest).tolist()
        self._filled: dict[int, int] = {}
        longest = runner.create_sequence()
        for depth in sorted(request.depths):
            tell(f"filling the sequence to {depth} tokens")
            self._append(longest, self.tokens[runner.sequence_length(longest) : depth])
            self._filled[depth] = runner.fork_sequence(longest, depth)
        runner.free_sequence(longest)

    def round(self) -> None:
        """Measure everything once."""
        self._tell(f"prefill of {self._request.prompt} tokens")
        sequence = self._runner.create_sequence()
        self.prefill.append(self._timed(sequence, [self.tokens[: self._request.prompt]]))
        for depth, filled in self._filled.items():
            self._tell(f"decode after {depth} tokens")
            sequence = self._runner.fork_sequence(filled, depth)
            pieces = [[token] for token in self.tokens[depth : depth + self._request.tokens]]
            self.decode[depth].append(self._timed(sequence, pieces))

    def close(self) -> None:
        for sequence in self._filled.values():
            self._runner.free_sequence(sequence)
        self._filled.clear()

    def _timed(self, sequence: int, pieces: Sequence[Sequence[int]]) -> float:
        """Seconds to append pieces to a sequence, one after the other. Frees the sequence."""
        began = self._clock()
        for piece in pieces:
            self._append(sequence, piece)
        took = self._clock() - began
        self._runner.free_sequence(sequence)
        return took

    def _append(self, sequence: int, tokens: Sequence[int]) -> None:
        """Compute tokens in batches of at most max_rows, with logits for the last token."""
        for first in range(0, len(tokens), self._runner.info.max_rows):
            piece = tokens[first : first + self._runner.info.max_rows]
            start, last = self._runner.sequence_length(sequence), first + len(piece) == len(tokens)
            wanted = [len(piece) - 1] if last else []
            self._runner.run(piece, range(start, start + len(piece)), [sequence] * len(piece), wanted)
