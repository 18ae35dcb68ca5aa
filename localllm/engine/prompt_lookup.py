"""Speculation without a second model: what followed the same words before probably follows them again."""

from collections.abc import Sequence

NGRAM = 3


class PromptLookup:
    """Finds the tokens that followed the last NGRAM tokens where they last stood in the prompt or the output."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._after: dict[tuple[int, ...], int] = {}
        for end in range(NGRAM, len(self._tokens)):
            self._after[tuple(self._tokens[end - NGRAM : end])] = end

    def append(self, token_id: int) -> None:
        """Add a token to what is searched."""
        end = len(self._tokens)
        if end >= NGRAM:
            self._after[tuple(self._tokens[end - NGRAM : end])] = end
        self._tokens.append(token_id)

    @property
    def found(self) -> bool:
        """Whether the last tokens have stood anywhere before."""
        return tuple(self._tokens[-NGRAM:]) in self._after

    def draft(self, length: int) -> list[int]:
        """Return up to `length` tokens that may come next; often none."""
        at = self._after.get(tuple(self._tokens[-NGRAM:]))
        return [] if at is None else self._tokens[at : at + length]
