"""DRY, "don't repeat yourself": tokens that would continue a repeated passage cost more the longer the passage is.

Defined in text-generation-webui pull request 5677; parameters as in llama.cpp.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

# Bans a token for certain and is still far from overflowing float32.
MAX_PENALTY = 1e30


class DryPenalty:
    """The penalty with its settings and the distance to the last sequence breaker.

    A breaker (a newline, a quote) ends a passage: only what follows it can count as repeated. It is found in the
    bytes of the text, so it may straddle tokens.
    """

    def __init__(
        self,
        multiplier: float,
        base: float,
        allowed_length: int,
        breakers: Sequence[str],
        token_text: Callable[[int], bytes],
    ) -> None:
        self._multiplier = multiplier
        self._base = base
        self._allowed_length = allowed_length
        self._breakers = [breaker.encode() for breaker in breakers]
        self._overlap = max((len(breaker) for breaker in self._breakers), default=1) - 1
        self._token_text = token_text
        self._text_tail = b""
        self._since_breaker = 0
        self._max_exponent = int(math.log(MAX_PENALTY / multiplier) / math.log(base)) + 1 if base > 1 else 0

    def accept(self, token_id: int) -> None:
        """Record the newest token."""
        text = self._text_tail + self._token_text(token_id)
        # The tail is shorter than the longest breaker, but may hold a whole shorter one, which was counted before.
        fresh = len(self._text_tail)
        broken = any(text.find(breaker, max(0, fresh - len(breaker) + 1)) >= 0 for breaker in self._breakers)
        self._since_breaker = 0 if broken else self._since_breaker + 1
        self._text_tail = text[len(text) - self._overlap :] if len(text) > self._overlap else text

    def apply(self, logits: NDArray[np.float32], window: NDArray[np.int64]) -> None:
        """Lower, in place, the logits of tokens that would continue a repeat within the window of newest tokens."""
        limit = min(self._since_breaker, window.size)
        if window.size <= self._allowed_length or limit < self._allowed_length:
            return
        # Longer repeats cost no more than the longest exponent, so they are not measured.
        lengths = repeat_lengths(window, min(limit, self._allowed_length + self._max_exponent))
        repeated = np.flatnonzero(lengths >= self._allowed_length)
        repeated = repeated[np.argsort(lengths[repeated], kind="stable")]
        longest = dict(zip(window[repeated + 1].tolist(), lengths[repeated].tolist(), strict=True))
        for token_id, length in longest.items():
            if not self._breaks(token_id):
                penalty = self._multiplier * self._base ** (length - self._allowed_length)
                logits[token_id] -= np.float32(min(penalty, MAX_PENALTY))

    def _breaks(self, token_id: int) -> bool:
        text = self._token_text(token_id)
        return any(breaker in text for breaker in self._breakers)


def repeat_lengths(window: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Return for each token but the last how many tokens ending there equal the window's end, at most `limit`."""
    lengths = np.zeros(window.size - 1, dtype=np.int64)
    alive = np.arange(window.size - 1)
    for matched in range(limit):
        alive = alive[alive >= matched]
        alive = alive[window[alive - matched] == window[window.size - 1 - matched]]
        if alive.size == 0:
            break
        lengths[alive] = matched + 1
    return lengths
