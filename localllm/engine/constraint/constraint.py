"""A constraint in use: what may come next, and what came."""

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from localllm.errors import RequestError

REWORDED = {
    "NoExtensionBias": "no token of this model's vocabulary can write what must come next",
}


class Constraint:
    """The state of one generation under a constraint; made by compile_constraint. Not thread-safe.

    The masks hold on the model's real vocabulary: tokens that are no text are never allowed, and those that end a
    generation only where the constraint is satisfied. Of forced text only the tokenizer's own cut is allowed.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask: NDArray[np.bool_] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether what was accepted satisfies the constraint, so that the generation may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def is_finished(self) -> bool:
        """Whether nothing more can follow, so that the generation must end here."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, bool[vocab_size]; the same array until the next change of state.

        Takes some 0.1 ms and lets other threads run. Raises RequestError when the grammar needs too much work here, and
        when the vocabulary lacks what must come next.
        """
        if self._mask is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            self._check("say which tokens may come next")
            self._mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        return self._mask

    def accept(self, token_id: int) -> None:
        """Record the token that comes next. Raises RequestError if the constraint forbids it."""
        self._mask = None
        self._matcher.consume_token(token_id)
        self._check(f"accept token {token_id}")

    def permits(self, token_id: int) -> bool:
        """Whether a token may come next that the mask allows; it always may."""
        return True

    def accept_text(self, tokens: list[int]) -> bool:
        """Record text, as any tokens that spell it. False, and of no more use, if it is forbidden."""
        self._mask = None
        return not tokens or self._matcher.try_consume_tokens(tokens) == len(tokens)

    def forced_tokens(self) -> list[int]:
        """Return the tokens, often none, whose text is the only one that can follow. Changes no state.

        The masks along them allow nothing else, so that taking them unsampled gives what sampling would.
        """
        tokens = list(self._matcher.compute_ff_tokens())
        self._check("say what must follow")
        return tokens

    def forced_text(self) -> bytes:
        """Return the bytes, often none, that must come next, whether the vocabulary can write them or not."""
        text = bytes(self._matcher.compute_ff_bytes())
        self._check("say what must follow")
        return text

    def rollback(self, tokens: int) -> None:
        """Forget the last accepted tokens. Raises ValueError if there were fewer."""
        self._mask = None
        if not self._matcher.rollback(tokens):
            raise ValueError(f"cannot roll {tokens} tokens back: {reason(self._matcher)}")

    def fork(self) -> "Constraint":
        """Return an independent copy in the same state."""
        return Constraint(self._matcher.deep_copy(), self._vocab_size)

    def _check(self, action: str) -> None:
        if self._matcher.is_error():
            raise RequestError(f"The constraint cannot {action}: {reason(self._matcher)}")


def reason(matcher: LLMatcher) -> str:
    """Return llguidance's words on an error, less its notes to developers."""
    words = str(matcher.get_error()).replace("<non-verbose/>", "").strip()
    for theirs, ours in REWORDED.items():
        words = words.replace(theirs, ours)
    return words
