"""A constraint on parts of an answer only, such as tool calls: from where a part opens until it closes."""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from localllm.engine.constraint.constraint import Constraint
from localllm.engine.constraint.vocabulary import ConstraintVocabulary


class Watcher(Protocol):
    """Reads an answer's text and detects where parts open."""

    def watch(self, text: str) -> "tuple[int, str] | None":
        """Add text. If a part opens, return the index of its constraint and the text since, which it must match too."""

    def fork(self) -> Self:
        """A copy in the same state; never called within a part."""


@dataclass(frozen=True, slots=True)
class HeldPart:
    """How to constrain one kind of part. constraint: in its initial state. ends: whether the answer ends with it."""

    constraint: Constraint
    ends: bool


class LazyConstraint:
    """Constrains nothing until its watcher sees a part open. Has Constraint's interface, except that masks may be None.

    A token that opens a part and continues in a way that the part's constraint forbids is not permitted. That is
    checked only once a token has been chosen, so that text outside of parts costs no masks. Not thread-safe.
    """

    def __init__(
        self,
        watcher: Callable[[], Watcher],
        parts: Sequence[HeldPart],
        openings: Sequence[str],
        vocabulary: ConstraintVocabulary,
    ) -> None:
        """watcher: makes a watcher for each answer. openings: no part opens without one of these texts."""
        self._make_watcher = watcher
        self._parts = parts
        self._openings = [opening.encode() for opening in openings]
        self._vocabulary = vocabulary
        self._watcher = watcher()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._longest = max(map(len, self._openings))
        self._tail = b""  # the last bytes of the answer, in which an opening may have begun
        self._part: HeldPart | None = None
        self._held: Constraint | None = None  # of the open part
        self._checked: tuple[int, Watcher, tuple[bytes, int], HeldPart | None, Constraint | None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the answer must end here."""
        return self._held is not None and self._held.is_finished

    def mask(self) -> NDArray[np.bool_] | None:
        """Which tokens may come next; None outside of parts, where every permitted token may."""
        return None if self._held is None else self._held.mask()

    def permits(self, token_id: int) -> bool:
        """Whether a token that the mask allows may come next."""
        if self._held is not None:
            return True
        data = self._vocabulary.token_bytes(token_id)
        text = self._tail + data
        if not any(opening in text for opening in self._openings):
            return True
        watcher = self._watcher.fork()
        state = self._decoder.getstate()
        opened = watcher.watch(self._decoder.decode(data))
        after = self._decoder.getstate()
        self._decoder.setstate(state)
        part = held = None
        if opened is not None:
            which, rest = opened
            part = self._parts[which]
            held = part.constraint.fork()
            if not held.accept_text(self._vocabulary.tokens_of(rest)):
                return False
        self._checked = token_id, watcher, after, part, held
        return True

    def accept(self, token_id: int) -> None:
        """Record the token that comes next. Raises RequestError if the open part forbids it."""
        data = self._vocabulary.token_bytes(token_id)
        self._tail = (self._tail + data)[-self._longest :]
        if self._held is not None:
            self._held.accept(token_id)
            self._watcher.watch(self._decoder.decode(data))
            if self._held.is_finished and self._part and not self._part.ends:
                self._part = self._held = None
                self._tail = b""
        elif self._checked is not None and self._checked[0] == token_id:
            _, self._watcher, state, self._part, self._held = self._checked
            self._decoder.setstate(state)
        else:
            self._watcher.watch(self._decoder.decode(data))
        self._checked = None

    def forced_tokens(self) -> list[int]:
        """Always empty, so that text which the model would have written anyway keeps the model's own tokens."""
        return []

    def fork(self) -> "LazyConstraint":
        """An independent copy for the beginning of an answer."""
        return LazyConstraint(
            self._make_watcher, self._parts, [text.decode() for text in self._openings], self._vocabulary
        )
