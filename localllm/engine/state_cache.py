"""Cache of states that cannot be truncated (recurrent, hybrid models): kept whole, found by their tokens."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from localllm.engine.inspection import PrefixView
from localllm.engine.pins import Pin, Pins
from localllm.engine.prefix_cache import PREFIX_SHARE
from localllm.engine.runner import Runner
from localllm.engine.sequence import KeySpace

# The last tokens of a prompt often differ in the next turn, such as the start of the answer.
TAIL_TOKENS = 16
# The maximum number of marks in a long prompt. They keep an edit of an early message from recomputing everything.
MARKS = 4
LEAST_BETWEEN = 512


def mark_places(length: int, wanted: Collection[int] = ()) -> list[int]:
    """Where to keep the state of a prompt of `length` tokens during prefill, also after `wanted` tokens; ascending."""
    step = max(length // MARKS // LEAST_BETWEEN + 1, 1) * LEAST_BETWEEN
    last = length - TAIL_TOKENS
    places = [*range(step, last, step), last] if last > TAIL_TOKENS else []
    return sorted({*places, *(place for place in wanted if 0 < place < length)})


@dataclass(eq=False, slots=True)
class _State:
    """A runner's sequence, and the tokens that it stores."""

    space: KeySpace
    tokens: list[int]
    sequence: int
    last_used: int
    shared_prefix: bool = False


class StateCache:
    """Replaces PrefixCache for a runner whose sequences are only usable whole.

    Evicts states that another one continues before the others, each the least recently used first, shared prefixes and
    pins last. Not thread-safe: the engine's thread is the only caller.
    """

    def __init__(self, runner: Runner, pinned_states: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """pinned_states: how many states requests may pin."""
        self._runner = runner
        self._pinned_states = pinned_states
        self._pins: Pins[_State] = Pins(clock)
        self._states: list[_State] = []
        self._clock = 0
        self.evicted_tokens = 0

    def __len__(self) -> int:
        """Number of cached states, one sequence each."""
        return len(self._states)

    @property
    def tokens(self) -> int:
        """Tokens of all states."""
        return sum(len(state.tokens) for state in self._states)

    def match(self, space: KeySpace, tokens: Sequence[int]) -> int:
        """Return how many leading tokens the longest usable state holds. Changes nothing."""
        leading = (state for state in self._of(space) if list(tokens[: len(state.tokens)]) == state.tokens)
        return max((len(state.tokens) for state in leading), default=0)

    def usable(self, space: KeySpace, tokens: Sequence[int]) -> int:
        """The same as `match`."""
        return self.match(space, tokens)

    def fork(self, space: KeySpace, tokens: Sequence[int], length: int) -> int:
        """Return a new sequence that holds tokens[:length]; length is what `match` returned, above 0."""
        state = self._exact(space, tokens[:length])
        assert state is not None
        self._touch(state)
        return self._runner.fork_sequence(state.sequence, length)

    def holder(self, space: KeySpace, tokens: Sequence[int]) -> int | None:
        """Return the sequence that holds exactly these tokens, or None. The cache still owns it."""
        state = self._exact(space, tokens)
        return state.sequence if state else None

    def insert(self, space: KeySpace, tokens: Sequence[int], sequence: int) -> None:
        """Take over a sequence that holds exactly these tokens; free it if they are cached already or empty."""
        state = self._exact(space, tokens)
        if state or not tokens:
            self._runner.free_sequence(sequence)
        else:
            state = _State(space, list(tokens), sequence, 0)
            self._states.append(state)
        if state:
            self._touch(state)

    def pin(self, space: KeySpace, tokens: Sequence[int]) -> None:
        """Pin the cached state of a shared prefix; over the limit for them, unpin the least recently used."""
        if state := self._exact(space, tokens):
            state.shared_prefix = True
            self._touch(state)
        shared = sorted((state for state in self._states if state.shared_prefix), key=lambda state: -state.last_used)
        for old in shared[max(int(PREFIX_SHARE * self._runner.info.max_sequences / 2), 1) :]:
            old.shared_prefix = False

    def keep(self, space: KeySpace, tokens: Sequence[int], pin: Pin) -> None:
        """Pin the longest cached state within a prefix for a request."""
        if state := self._exact(space, tokens[: self.match(space, tokens)]):
            self._pins.add(state, pin)
            self._pins.limit(len, self._pinned_states, lambda one: one.last_used)

    def evict(self, pages: int) -> bool:
        """Remove one state, whatever `pages` is; False if none is left."""
        if not self._states:
            return False
        pins = self._pins.current()

        def worth(state: _State) -> tuple[bool, bool, bool, int]:
            return state in pins, state.shared_prefix, not self._is_continued(state), state.last_used

        state = min(self._states, key=worth)
        self._pins.discard(state)
        self._states.remove(state)
        self._runner.free_sequence(state.sequence)
        self.evicted_tokens += len(state.tokens)
        return True

    def drop_oldest(self) -> bool:
        """Free one sequence handle; False if no state is left."""
        return self.evict(0)

    def check_integrity(self) -> set[int]:
        """Return the sequences owned. Raises RuntimeError if the bookkeeping is inconsistent."""
        owned = {state.sequence for state in self._states}
        kept = {(state.space, tuple(state.tokens)) for state in self._states}
        if not len(owned) == len(self._states) == len(kept):
            raise RuntimeError("state cache: a sequence or its tokens are kept twice")
        for state in self._states:
            if self._runner.sequence_length(state.sequence) != len(state.tokens):
                raise RuntimeError(f"state cache: sequence {state.sequence} does not hold {len(state.tokens)} tokens")
        return owned

    def tree(self) -> tuple[PrefixView, ...]:
        """The states for display, shortest first."""
        ordered = sorted(self._states, key=lambda state: len(state.tokens))
        return tuple(PrefixView(0, len(state.tokens), 1, state.last_used) for state in ordered)

    def _of(self, space: KeySpace) -> list[_State]:
        return [state for state in self._states if state.space == space]

    def _exact(self, space: KeySpace, tokens: Sequence[int]) -> _State | None:
        return next((state for state in self._of(space) if state.tokens == list(tokens)), None)

    def _is_continued(self, state: _State) -> bool:
        length = len(state.tokens)
        others = self._of(state.space)
        return any(len(other.tokens) > length and other.tokens[:length] == state.tokens for other in others)

    def _touch(self, state: _State) -> None:
        self._clock += 1
        state.last_used = self._clock
