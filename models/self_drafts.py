"""What is kept of sequences for a layer that drafts (models/drafting_layer.py), and how it drafts several tokens.

The layer reads the model's states of a sequence's latest tokens. Those of the last KEPT are copied from each step; its
keys and values are computed when it drafts, of as many tokens as there are states. So nothing but a copy is done while
drafting pauses, and prompts, prefixes, forks and what lies on disk know nothing of it: a sequence that goes on from a
known prefix drafts from the states that were computed since. Drafts are guesses, so that they may depend on this.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from models.drafting_layer import MAX_ROWS, MAX_SEQUENCES, MAX_TOKENS, DraftingLayer, Part
from models.kv_pages import Sequence

KEPT = 128
_MOST = MAX_TOKENS - KEPT - 1  # tokens of a draft
_COVERED = 15 / 16  # of the latest tokens, by the ids that are guessed from
_FEW = 32
"""Rows that are read for a single guess, which is asked for to see whether guesses are right."""
_EACH = MAX_ROWS // MAX_SEQUENCES
"""Rows that each of several sequences may have in one run."""


@dataclass
class _Trail:
    """A sequence's states and tokens of positions start..end-1, a position's at position % KEPT.

    stored: the layer's own sequence, the first position of which is `first` of the text.
    """

    states: NDArray[np.float32]
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(KEPT, np.int64))
    stored: Sequence = field(default_factory=Sequence)
    start: int = 0
    end: int = 0
    first: int = 0


class SelfDrafts:
    """Follows up to MAX_SEQUENCES sequences, those that were computed latest, and drafts for them."""

    def __init__(self, layer: DraftingLayer) -> None:
        self._layer = layer
        self._trails: dict[int, _Trail] = {}  # the latest last

    def note(self, sequence: int, start: int, tokens: Ordered[int], states: NDArray[np.generic]) -> None:
        """Keep the states of a sequence's new tokens. states: float32[tokens, values], those that the layer reads."""
        trail = self._trails.pop(sequence, None)
        if trail is None:
            trail = self._room()
        self._trails[sequence] = trail
        if trail.end != start:
            self._restart(trail, start)
        end = trail.end = start + len(tokens)
        if len(tokens) == 1:  # decoding, where each microsecond counts
            trail.states[start % KEPT] = states[0]
            trail.tokens[start % KEPT] = tokens[0]
        else:
            kept = min(len(tokens), KEPT)
            at = np.arange(end - kept, end) % KEPT
            trail.states[at] = states[-kept:]
            trail.tokens[at] = tokens[-kept:]
        trail.start = max(trail.start, end - KEPT)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget what is known of a sequence from this position on."""
        trail = self._trails.get(sequence)
        if trail is None or length >= trail.end:
            return
        if length <= trail.start:
            self._restart(trail, length)
        trail.end = length
        self._cut(trail, length)

    def free(self, sequence: int) -> None:
        """Forget a sequence."""
        if trail := self._trails.pop(sequence, None):
            self._layer.store.truncate(trail.stored, 0)

    def follow(self, wanted: Ordered[tuple[int, int, int]]) -> dict[int, Part]:
        """Store what is missing of sequences but a few last rows, and return these, of those that can be drafted for.

        wanted: as for `draft`, which does the same where it was not done.
        """
        parts: dict[int, Part] = {}
        for sequence, token, count in wanted:
            trail = self._trails.get(sequence)
            if trail is not None and trail.start < trail.end and count > 0:
                parts[sequence] = self._follow(trail, token, min(count, _MOST))
        return parts

    def draft(self, wanted: Ordered[tuple[int, int, int]]) -> list[list[int]]:
        """Guess tokens; wanted: a sequence, the token that follows what it stores, and how many may follow that.

        A sequence of which no state is known gets none.
        """
        found: dict[int, list[int]] = {sequence: [] for sequence, _, _ in wanted}
        counts = {sequence: min(count, _MOST) for sequence, _, count in wanted}
        parts = self.follow(wanted)
        ids = self._ids([self._trails[sequence] for sequence in parts])
        while parts:
            tokens, states = self._layer.run(list(parts.values()), ids)
            going = {}
            for at, (sequence, part) in enumerate(parts.items()):
                found[sequence].append(int(tokens[at]))
                if len(found[sequence]) < counts[sequence]:
                    going[sequence] = Part(part.sequence, [int(tokens[at])], states[at : at + 1], guessed=True)
            parts = going
        for sequence, _, _ in wanted:
            if trail := self._trails.get(sequence):
                self._cut(trail, trail.end + 1)
        return [found[sequence] for sequence, _, _ in wanted]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the states of all sequences that can be followed."""
        return MAX_SEQUENCES * KEPT * 4 * self._layer.width

    def check_integrity(self) -> None:
        """Raise RuntimeError where the layer's pages are not those of the sequences that are followed."""
        self._layer.store.check_integrity([trail.stored for trail in self._trails.values()])

    def _follow(self, trail: _Trail, token: int, count: int) -> Part:
        """Store what is missing of a sequence but its last rows, and return these."""
        stored, end = trail.stored, trail.end
        self._cut(trail, end)  # another token may have followed before
        begin = trail.first + stored.length
        if not stored.length or begin <= trail.start or end + count - trail.first >= MAX_TOKENS:
            self._layer.store.truncate(stored, 0)
            begin = trail.first = max(trail.start + 1, end - _FEW if count == 1 else 0)
        positions = np.arange(begin, end + 1)
        tokens = [*trail.tokens[positions[:-1] % KEPT].tolist(), token]
        states = self._layer.prepared(trail.states[(positions - 1) % KEPT])
        while len(tokens) > _EACH:
            some = min(len(tokens) - 1, MAX_ROWS)
            self._layer.run([Part(stored, tokens[:some], states[:some])])
            tokens, states = tokens[some:], states[some:]
        return Part(stored, tokens, states)

    def _ids(self, trails: Ordered[_Trail]) -> int:
        """How many ids to guess from: so many that nearly all of the latest tokens are among them."""
        reaches = self._layer.reaches
        if len(reaches) == 1 or not trails:
            return reaches[-1]
        latest = np.concatenate([trail.tokens[np.arange(trail.start, trail.end) % KEPT] for trail in trails])
        return next((ids for ids in reaches if np.count_nonzero(latest < ids) >= _COVERED * len(latest)), reaches[-1])

    def _room(self) -> _Trail:
        """A trail that follows nothing, that of the sequence that was computed longest ago if there are too many."""
        if len(self._trails) < MAX_SEQUENCES:
            return _Trail(np.zeros((KEPT, self._layer.width), np.float32))
        oldest = self._trails.pop(next(iter(self._trails)))
        self._restart(oldest, 0)
        return oldest

    def _restart(self, trail: _Trail, position: int) -> None:
        """Know nothing of the positions before this one."""
        self._layer.store.truncate(trail.stored, 0)
        trail.start = trail.end = position

    def _cut(self, trail: _Trail, length: int) -> None:
        """Forget what the layer stores of positions from this one on."""
        keep = max(0, length - trail.first)
        if keep < trail.stored.length:
            self._layer.store.truncate(trail.stored, keep)
