"""A constraint on parts of an answer only, such as tool calls: from where a part opens until it closes."""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.engine.constraint.constraint import Constraint
from localllm.engine.constraint.vocabulary import ConstraintVocabulary


class Watcher(Protocol):
    """Reads an answer's text and detects where parts open and close."""

    @property
    def is_open(self) -> bool:
        """Whether the text so far ends within a part."""

    def watch(self, text: str) -> "tuple[int, str] | None":
        """Add text. If a part opens, return the index of its constraint and the text since, which it must match too."""


@dataclass(frozen=True, slots=True)
class HeldPart:
    """How to constrain one kind of part.

    constraint: in its initial state. Unless the answer ends with the part (ends), it allows any text after it, so that
    a token which closes the part may go on.
    """

    constraint: Constraint
    ends: bool


class LazyConstraint:
    """Constrains nothing until its watcher sees a part open. Has Constraint's interface, except that masks may be None.

    A token that opens a part and goes on with what the part cannot begin with is text, and nothing is constrained. Not
    thread-safe.
    """

    def __init__(
        self, watcher: Callable[[], Watcher], parts: Sequence[HeldPart], vocabulary: ConstraintVocabulary
    ) -> None:
        """watcher: makes a watcher for each answer."""
        self._make_watcher = watcher
        self._parts = parts
        self._vocabulary = vocabulary
        self._watcher = watcher()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: Constraint | None = None  # of the open part
        self._ends = False  # whether the answer ends with the open part

    @property
    def is_finished(self) -> bool:
        """Whether the answer must end here."""
        return self._held is not None and self._held.is_finished

    def mask(self) -> NDArray[np.bool_] | None:
        """Which tokens may come next; None outside of parts, where every token may."""
        return None if self._held is None else self._held.mask()

    def accept(self, token_id: int) -> None:
        """Record the token that comes next. Raises RequestError if the open part forbids it."""
        if self._held is not None:
            self._held.accept(token_id)
        opened = self._watcher.watch(self._decoder.decode(self._vocabulary.token_bytes(token_id)))
        if opened is not None:
            which, rest = opened
            part = self._parts[which]
            held = part.constraint.fork()
            fits = held.accept_text(self._vocabulary.tokens_of(rest))
            self._held, self._ends = held if fits else None, part.ends
        elif not self._watcher.is_open and not self._ends:
            self._held = None

    def forced_tokens(self) -> list[int]:
        """Always empty, so that text which the model would have written anyway keeps the model's own tokens."""
        return []

    def fork(self) -> "LazyConstraint":
        """An independent copy for the beginning of an answer."""
        return LazyConstraint(self._make_watcher, self._parts, self._vocabulary)
