"""Speculation without a second model: what followed the same words before probably follows them again."""

from collections.abc import Sequence

NGRAM = 3


class PromptLookup:
    """Finds the tokens that followed the last NGRAM tokens where they last stood in the prompt or the output.

    Where that was right, it goes on from there: the more words agree, the better is the place.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._after: dict[tuple[int, ...], int] = {}
        for end in range(NGRAM, len(self._tokens)):
            self._after[tuple(self._tokens[end - NGRAM : end])] = end
        self._next = self._found()

    @property
    def found(self) -> bool:
        """Whether the last tokens have stood anywhere before."""
        return self._next is not None

    def append(self, token_id: int) -> bool | None:
        """Add a token to what is searched; return whether it was the one to be expected, None if none was."""
        end, expected = len(self._tokens), self._next
        if end >= NGRAM:
            self._after[tuple(self._tokens[end - NGRAM : end])] = end
        self._tokens.append(token_id)
        right = None if expected is None else self._tokens[expected] == token_id
        self._next = expected + 1 if expected is not None and right else self._found()
        return right

    def draft(self, length: int) -> list[int]:
        """Return up to `length` tokens that may come next; often none."""
        return [] if self._next is None else self._tokens[self._next : self._next + length]

    def _found(self) -> int | None:
        return self._after.get(tuple(self._tokens[-NGRAM:]))
