"""Speculation without a second model: what followed the same words before probably follows them again."""

from collections.abc import Sequence

NGRAM = 3
MAX_DRAFT = 8


class PromptLookup:
    """Drafts the tokens that followed the last NGRAM tokens where they last stood in the prompt or the output.

    The length adapts: it grows while drafts are accepted and halves when they are not; at zero the next drafts are
    tried only after a pause that doubles with every failure.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._after: dict[tuple[int, ...], int] = {}
        for end in range(NGRAM, len(self._tokens)):
            self._after[tuple(self._tokens[end - NGRAM : end])] = end
        self._length = 4
        self._pause = 0
        self._next_pause = 8

    def append(self, token_id: int) -> None:
        """Add a token to what is searched."""
        end = len(self._tokens)
        if end >= NGRAM:
            self._after[tuple(self._tokens[end - NGRAM : end])] = end
        self._tokens.append(token_id)
        self._pause -= self._pause > 0

    def draft(self, limit: int) -> list[int]:
        """Return up to `limit` tokens that may come next; often none."""
        length = min(self._length, limit)
        at = self._after.get(tuple(self._tokens[-NGRAM:]))
        if at is None or self._pause or length <= 0:
            return []
        return self._tokens[at : at + length]

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a verified draft."""
        if not drafted:
            return
        if accepted == drafted:
            self._length = min(self._length + 2, MAX_DRAFT)
            self._next_pause = 8
        elif accepted * 2 < drafted:
            self._length = max(self._length // 2, 2)
            if not accepted:
                self._pause = self._next_pause
                self._next_pause = min(self._next_pause * 2, 128)
