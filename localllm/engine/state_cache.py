"""States that cannot be cut, of recurrent and hybrid models: kept whole, and found by the tokens that led to them."""

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.engine.inspection import PrefixView
from localllm.engine.prefix_cache import TRUNK_SHARE
from localllm.engine.runner import Runner
from localllm.engine.sequence import KeySpace

# The last tokens of a prompt are often written otherwise in the next turn, such as the beginning of the answer.
TAIL_TOKENS = 16
# A long prompt is marked this often at most, so that an edit of an early message does not cost all of it.
MARKS = 4
LEAST_BETWEEN = 512


def mark_places(length: int, trunk: int = 0) -> list[int]:
    """Where the state of a prompt of this many tokens, and its trunk's, is to be kept while computed, ascending."""
    step = max(length // MARKS // LEAST_BETWEEN + 1, 1) * LEAST_BETWEEN
    last = length - TAIL_TOKENS
    places = [*range(step, last, step), last] if last > TAIL_TOKENS else []
    return sorted({*places, trunk}) if trunk else places


@dataclass(eq=False, slots=True)
class _State:
    """A sequence of the runner, and the tokens that it stores."""

    space: KeySpace
    tokens: list[int]
    sequence: int
    last_used: int
    trunk: bool = False


class StateCache:
    """Takes the place of a PrefixCache for a runner whose sequences are of use whole or not at all.

    A state that another continues goes before one that none does, the least recently used first; trunks go last. Not
    thread-safe: the engine's thread is the only caller.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._states: list[_State] = []
        self._clock = 0
        self.evicted_tokens = 0

    def __len__(self) -> int:
        """Number of states kept, one sequence each."""
        return len(self._states)

    @property
    def tokens(self) -> int:
        """Tokens behind all states."""
        return sum(len(state.tokens) for state in self._states)

    def match(self, space: KeySpace, tokens: Sequence[int]) -> int:
        """Return how many leading tokens the longest state of use holds. Changes nothing."""
        leading = (state for state in self._of(space) if list(tokens[: len(state.tokens)]) == state.tokens)
        return max((len(state.tokens) for state in leading), default=0)

    def fork(self, space: KeySpace, tokens: Sequence[int], length: int) -> int:
        """Return a new sequence that holds tokens[:length]; length is what `match` returned, above 0."""
        state = self._exact(space, tokens[:length])
        assert state is not None
        self._touch(state)
        return self._runner.fork_sequence(state.sequence, length)

    def holder(self, space: KeySpace, tokens: Sequence[int]) -> int | None:
        """Return the sequence that holds exactly these tokens, or None. It stays the cache's."""
        state = self._exact(space, tokens)
        return state.sequence if state else None

    def insert(self, space: KeySpace, tokens: Sequence[int], sequence: int) -> None:
        """Take over a sequence that holds exactly these tokens; it is freed at once if they are kept, or none."""
        state = self._exact(space, tokens)
        if state or not tokens:
            self._runner.free_sequence(sequence)
        else:
            state = _State(space, list(tokens), sequence, 0)
            self._states.append(state)
        if state:
            self._touch(state)

    def pin(self, space: KeySpace, tokens: Sequence[int]) -> None:
        """Make a state that is kept a trunk; beyond their share of sequences the least recently used cease to be."""
        if state := self._exact(space, tokens):
            state.trunk = True
            self._touch(state)
        trunks = sorted((state for state in self._states if state.trunk), key=lambda state: -state.last_used)
        for old in trunks[max(int(TRUNK_SHARE * self._runner.info.max_sequences / 2), 1) :]:
            old.trunk = False

    def evict(self, pages: int) -> bool:
        """Forget one state, however many pages are wanted; False if none is left."""
        if not self._states:
            return False
        state = min(self._states, key=lambda state: (state.trunk, not self._is_continued(state), state.last_used))
        self._states.remove(state)
        self._runner.free_sequence(state.sequence)
        self.evicted_tokens += len(state.tokens)
        return True

    def drop_oldest(self) -> bool:
        """Give one sequence handle back; False if no state is left."""
        return self.evict(0)

    def check_integrity(self) -> set[int]:
        """Raise RuntimeError where the bookkeeping is wrong, and return the sequences owned."""
        owned = {state.sequence for state in self._states}
        kept = {(state.space, tuple(state.tokens)) for state in self._states}
        if not len(owned) == len(self._states) == len(kept):
            raise RuntimeError("state cache: a sequence or its tokens are kept twice")
        for state in self._states:
            if self._runner.sequence_length(state.sequence) != len(state.tokens):
                raise RuntimeError(f"state cache: sequence {state.sequence} does not hold {len(state.tokens)} tokens")
        return owned

    def tree(self) -> tuple[PrefixView, ...]:
        """The states for people to look at, the shortest first."""
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
