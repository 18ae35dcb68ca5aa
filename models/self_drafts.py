"""What a drafting layer (models/drafting_layer.py) keeps of sequences, and how it drafts several tokens.

The layer reads the model's states of a sequence's latest tokens. Each step copies the states of the last KEPT tokens;
the layer's keys and values are computed only when it drafts, for the tokens whose states are kept. So a pause in
drafting costs only that copy, and prompts, cached prefixes, forks and the disk tier are unaffected: a sequence that
continues from a cached prefix drafts from the states computed since. This may change drafts, but never the text.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from models.drafting_layer import MAX_ROWS, MAX_SEQUENCES, MAX_TOKENS, DraftingLayer, DraftRows
from models.kv_pages import Sequence

KEPT = 128
_MOST = MAX_TOKENS - KEPT - 1  # tokens of a draft
_COVERED = 15 / 16  # share of the latest tokens that must be among the ids to draft from
_FEW = 32
"""Rows that are read for a draft of a single token, which only tests whether drafting pays."""
_EACH = MAX_ROWS // MAX_SEQUENCES
"""The most rows of each of several sequences in one run."""


@dataclass
class _Trail:
    """A sequence's states and tokens of positions start..end-1, in ring buffers indexed by position % KEPT.

    stored: the layer's own sequence, whose first position is position `first` of the text.
    """

    states: NDArray[np.float32]
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(KEPT, np.int64))
    stored: Sequence = field(default_factory=Sequence)
    start: int = 0
    end: int = 0
    first: int = 0


class SelfDrafts:
    """Tracks the MAX_SEQUENCES most recently computed sequences, and drafts for them."""

    def __init__(self, layer: DraftingLayer) -> None:
        self.layer = layer
        self._trails: dict[int, _Trail] = {}  # in order of use, the most recent last

    def note(self, sequence: int, start: int, tokens: Ordered[int], states: NDArray[np.generic]) -> None:
        """Keep the states of a sequence's new tokens. states: float32[tokens, values], as the layer reads them."""
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
        """Forget a sequence's states and tokens from position `length` on."""
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
            self.layer.store.truncate(trail.stored, 0)

    def follow(self, wanted: Ordered[tuple[int, int, Ordered[float]]]) -> dict[int, DraftRows]:
        """Compute the missing keys and values of sequences, except for a few last rows, and return those rows.

        Sequences without known states are left out. wanted: as for `draft`, which calls this itself; calling it earlier
        only moves the work.
        """
        parts: dict[int, DraftRows] = {}
        for sequence, token, least in wanted:
            trail = self._trails.get(sequence)
            if trail is not None and trail.start < trail.end and least:
                parts[sequence] = self._follow(trail, token, min(len(least), _MOST))
        return parts

    def draft(self, wanted: Ordered[tuple[int, int, Ordered[float]]]) -> list[list[tuple[int, float]]]:
        """Draft tokens, see localllm.engine.runner.DraftsItself.

        Returns a list for each sequence; it is empty if no state of the sequence is known.
        """
        found: dict[int, list[tuple[int, float]]] = {sequence: [] for sequence, _, _ in wanted}
        needed = {sequence: least[:_MOST] for sequence, _, least in wanted}
        likely = dict.fromkeys(found, 1.0)
        parts = self.follow(wanted)
        ready = len(parts)
        ids = self._ids([self._trails[sequence] for sequence in parts])
        while parts:
            drafted, states = self.layer.run(list(parts.values()), ids)
            going = {}
            for at, (sequence, part) in enumerate(parts.items()):
                token, probability = drafted[at]
                found[sequence].append(drafted[at])
                likely[sequence] *= probability
                least = needed[sequence][len(found[sequence]) :]
                if least and likely[sequence] * len(parts) / ready >= least[0]:
                    going[sequence] = DraftRows(part.sequence, [token], states[at : at + 1], guessed=True)
            parts = going
        for sequence, _, _ in wanted:
            if trail := self._trails.get(sequence):
                self._cut(trail, trail.end + 1)
        return [found[sequence] for sequence, _, _ in wanted]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the states of MAX_SEQUENCES sequences."""
        return MAX_SEQUENCES * KEPT * 4 * self.layer.width

    def check_integrity(self) -> None:
        """Raise RuntimeError if the layer's pages do not match the tracked sequences."""
        self.layer.store.check_integrity([trail.stored for trail in self._trails.values()])

    def _follow(self, trail: _Trail, token: int, count: int) -> DraftRows:
        """Compute a sequence's missing keys and values except for its last rows, and return those rows."""
        stored, end = trail.stored, trail.end
        self._cut(trail, end)  # drop rows computed for another next token
        begin = trail.first + stored.length
        if not stored.length or begin <= trail.start or end + count - trail.first >= MAX_TOKENS:
            self.layer.store.truncate(stored, 0)
            begin = trail.first = max(trail.start + 1, end - _FEW if count == 1 else 0)
        positions = np.arange(begin, end + 1)
        tokens = [*trail.tokens[positions[:-1] % KEPT].tolist(), token]
        states = self.layer.prepared(trail.states[(positions - 1) % KEPT])
        while len(tokens) > _EACH:
            some = min(len(tokens) - 1, MAX_ROWS)
            self.layer.run([DraftRows(stored, tokens[:some], states[:some])])
            tokens, states = tokens[some:], states[some:]
        return DraftRows(stored, tokens, states)

    def _ids(self, trails: Ordered[_Trail]) -> int:
        """How many ids to draft from: the least of `reaches` that covers nearly all of the latest tokens."""
        reaches = self.layer.reaches
        if len(reaches) == 1 or not trails:
            return reaches[-1]
        latest = np.concatenate([trail.tokens[np.arange(trail.start, trail.end) % KEPT] for trail in trails])
        return next((ids for ids in reaches if np.count_nonzero(latest < ids) >= _COVERED * len(latest)), reaches[-1])

    def _room(self) -> _Trail:
        """An empty trail: a new one, or that of the least recently computed sequence if there are too many."""
        if len(self._trails) < MAX_SEQUENCES:
            return _Trail(np.zeros((KEPT, self.layer.width), np.float32))
        oldest = self._trails.pop(next(iter(self._trails)))
        self._restart(oldest, 0)
        return oldest

    def _restart(self, trail: _Trail, position: int) -> None:
        """Forget all positions and restart at this one."""
        self.layer.store.truncate(trail.stored, 0)
        trail.start = trail.end = position

    def _cut(self, trail: _Trail, length: int) -> None:
        """Drop the layer's keys and values from position `length` on."""
        keep = max(0, length - trail.first)
        if keep < trail.stored.length:
            self.layer.store.truncate(trail.stored, keep)
