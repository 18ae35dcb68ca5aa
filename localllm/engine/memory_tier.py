"""Copies of cached prefixes in main memory, for runners whose stored tokens slow every step (`copies_bytes`).

On the CPU, llama.cpp computes attention over all cells in use, including those of other sequences. So cached prefixes
are copied when the engine is idle, freed in the runner when another request starts, and imported again for a prompt
that starts with them. Copies are segments in a tree like the disk tier's, compared token by token.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from localllm.engine.disk_cache import SEGMENT_TOKENS, missing_segments
from localllm.engine.pins import Pin, Pins
from localllm.engine.prefix_cache import PREFIX_SHARE, common_prefix
from localllm.engine.sequence import KeySpace

_TOKEN_BYTES = 8  # per token id in a list


@dataclass(frozen=True, slots=True)
class MemorySegment:
    """A copy of the KV of tokens start..stop-1. Those before `useful` match the requested tokens."""

    start: int
    stop: int
    useful: int
    kv: bytes


class _Node:
    """A segment that follows those of its ancestors."""

    __slots__ = ("children", "kv", "last_used", "parent", "tokens")

    def __init__(self, parent: "_Node | None", tokens: list[int], kv: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.kv = kv
        self.children: list[_Node] = []
        self.last_used = 0

    @property
    def size(self) -> int:
        return len(self.kv) + _TOKEN_BYTES * len(self.tokens)


class MemoryTier:
    """Segments of up to `limit` bytes in all. Evicts the least recently used from the ends of the trees, shared
    prefixes and pins last.

    Each space has its own tree. Not thread-safe: the engine's thread is the only caller.
    """

    def __init__(self, limit: int, pinned_bytes: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """pinned_bytes: how many bytes requests may pin."""
        self.limit = limit
        self._pinned_bytes = pinned_bytes
        self._pins: Pins[_Node] = Pins(clock)
        self.bytes = 0
        self._roots: dict[KeySpace, _Node] = {}
        self._ends: set[_Node] = set()
        self._shared_prefixes: set[_Node] = set()
        self._clock = 0

    def find(self, space: KeySpace, tokens: Sequence[int]) -> list[MemorySegment]:
        """Return the chain of segments from 0 that matches the most tokens. Changes nothing."""
        chain, start = [], 0
        for node, useful in self._follow(space, tokens):
            chain.append(MemorySegment(start, start + len(node.tokens), useful, node.kv))
            start = useful
        return chain

    def touch(self, space: KeySpace, tokens: Sequence[int]) -> None:
        """Mark what `find` returns as used."""
        self._clock += 1
        for node, _ in self._follow(space, tokens):
            node.last_used = self._clock

    def holds(self, space: KeySpace, tokens: Sequence[int]) -> bool:
        """Whether all these tokens have copies."""
        return max((useful for _, useful in self._follow(space, tokens)), default=0) == len(tokens)

    def missing(self, space: KeySpace, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of the segments that must be stored so that all tokens have copies."""
        chain = [*self._follow(space, tokens)]
        stops = accumulate(len(node.tokens) for node, _ in chain)
        yield from missing_segments(zip(stops, (useful for _, useful in chain), strict=True), len(tokens))

    def store(self, space: KeySpace, tokens: Sequence[int], start: int, kv: bytes) -> None:
        """Store the KV of tokens[start:] if all tokens before have copies and there is room."""
        self._clock += 1
        parent, at = self._roots.setdefault(space, _Node(None, [], b"")), 0
        for node, useful in self._follow(space, tokens[:start]):
            if useful == at + len(node.tokens):
                parent, at = node, useful
        made = _Node(parent, list(tokens[start:]), kv)
        made.last_used = self._clock
        if at == start and made.size <= self.limit:
            for shorter in [child for child in parent.children if made.tokens[: len(child.tokens)] == child.tokens]:
                self._remove(shorter)  # the old end of a conversation that has grown
            parent.children.append(made)
            self._ends.discard(parent)
            self._ends.add(made)
            self.bytes += made.size
        while self.bytes > self.limit:
            pins = self._pins.current()
            self._remove(
                min(
                    self._ends - {made},
                    key=lambda node: (node in pins, node in self._shared_prefixes, node.last_used),
                    default=made,
                )
            )
        self._roots = {space: root for space, root in self._roots.items() if root.children}

    def pin(self, space: KeySpace, tokens: Sequence[int]) -> None:
        """Pin the segments of a shared prefix; over the limit for them, unpin the least recently used prefix."""
        self._clock += 1
        size, most = 0, PREFIX_SHARE * self.limit
        for node, _ in self._follow(space, tokens):
            size += node.size
            if size > most:
                break
            node.last_used = self._clock
            self._shared_prefixes.add(node)
        while sum(node.size for node in self._shared_prefixes) > most:
            self._shared_prefixes.remove(min(self._shared_prefixes, key=lambda node: node.last_used))

    def keep(self, space: KeySpace, tokens: Sequence[int], pin: Pin) -> None:
        """Pin the segments of a prefix for a request."""
        for node, _ in self._follow(space, tokens):
            self._pins.add(node, pin)
        self._pins.limit(lambda nodes: sum(node.size for node in nodes), self._pinned_bytes, lambda one: one.last_used)

    def _follow(self, space: KeySpace, tokens: Sequence[int]) -> Iterator[tuple[_Node, int]]:
        """The chain that matches the most tokens: each segment, and the number of matching tokens up to its end."""
        node, at = self._roots.get(space), 0
        while node is not None and at < len(tokens):
            rest = tokens[at : at + SEGMENT_TOKENS]
            shared = [(common_prefix(child.tokens, rest), child) for child in node.children]
            common, best = max(shared, key=lambda one: (one[0], -len(one[1].tokens)), default=(0, node))
            if not common:
                return
            yield best, at + common
            if common < len(best.tokens):
                return
            node, at = best, at + common

    def _remove(self, node: _Node) -> None:
        """Remove a segment and all that follow it."""
        parent = node.parent
        assert parent is not None  # a root is never removed
        parent.children.remove(node)
        if not parent.children and parent.parent is not None:
            self._ends.add(parent)
        going = [node]
        while going:
            gone = going.pop()
            going += gone.children
            self._ends.discard(gone)
            self._shared_prefixes.discard(gone)
            self._pins.discard(gone)
            self.bytes -= gone.size
