"""A constraint in use: which tokens may come next, given those accepted so far."""

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from localllm.engine.constraint.keys import Keys
from localllm.engine.constraint.vocabulary import ConstraintVocabulary
from localllm.errors import RequestError

JSON_PART = "failed to compile JSON schema: "
REWORDED = {
    "NoExtensionBias": "no token of this model's vocabulary can write what must come next",
}


class Constraint:
    """The state of one generation under a constraint; made by compile_constraint. Not thread-safe.

    Masks cover the model's real vocabulary: tokens that are not text are never allowed, and end tokens only where the
    constraint is satisfied. For forced text, only the tokenizer's own tokenization is allowed.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: ConstraintVocabulary, keys: Keys | None = None) -> None:
        """keys: reads the names in JSON. None is allowed twice in an object, unless no other can be written."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._keys = keys
        self._mask: NDArray[np.bool_] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the accepted tokens satisfy the constraint, so that the generation may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def is_finished(self) -> bool:
        """Whether nothing more can follow, so that the generation must end here."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, bool[vocab_size]; the same array until the state changes.

        Takes about 0.1 ms and lets other threads run. Raises RequestError if the grammar needs too much work here, or
        if the vocabulary cannot write what must come next.
        """
        if self._mask is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            self._check("say which tokens may come next")
            self._mask = np.unpackbits(bits, count=self._vocabulary.vocab_size, bitorder="little").view(np.bool_)
            if repeats := self._keys.repeats() if self._keys else ():
                others = self._mask.copy()
                for text in repeats:
                    others[self._vocabulary.beginning_with(text)] = False
                self._mask = others if others.any() else self._mask
        return self._mask

    def accept(self, token_id: int) -> None:
        """Record the token that comes next. Raises RequestError if the constraint forbids it."""
        self._mask = None
        self._matcher.consume_token(token_id)
        if self._keys:
            self._keys.feed(self._vocabulary.token_bytes(token_id))
        self._check(f"accept token {token_id}")

    def accept_text(self, tokens: list[int]) -> bool:
        """Record text, as any tokens that spell it. Returns False if it is forbidden; the object is then unusable."""
        self._mask = None
        return not tokens or self._matcher.try_consume_tokens(tokens) == len(tokens)

    def forced_tokens(self) -> list[int]:
        """Return the tokens, often none, of the only text that can follow. Changes no state.

        The masks at these positions allow nothing else, so taking them without sampling gives the same result.
        """
        tokens = list(self._matcher.compute_ff_tokens())
        self._check("say what must follow")
        return tokens

    def forced_text(self) -> bytes:
        """Return the bytes, often none, that must come next, even if the vocabulary cannot write them."""
        text = bytes(self._matcher.compute_ff_bytes())
        self._check("say what must follow")
        return text

    def fork(self) -> "Constraint":
        """Return an independent copy in the same state."""
        return Constraint(self._matcher.deep_copy(), self._vocabulary, self._keys.fork() if self._keys else None)

    def _check(self, action: str) -> None:
        if self._matcher.is_error():
            raise RequestError(f"The constraint cannot {action}: {reason(self._matcher)}")


def reason(matcher: LLMatcher) -> str:
    """Return llguidance's error message without its notes to developers."""
    return reworded(str(matcher.get_error()))


def reworded(message: str) -> str:
    """An error message of llguidance without its notes to developers."""
    words = message.replace("<non-verbose/>", "").strip()
    if JSON_PART in words:  # of a grammar that the user did not write
        words = words.partition(JSON_PART)[2].partition("\n")[0]
    for theirs, ours in REWORDED.items():
        words = words.replace(theirs, ours)
    return words
