"""Logit bias, and penalties on tokens that would repeat the text so far. They change logits in place."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.engine.request import SamplingParams

# Surely bans a token, and is far from overflowing float32.
MAX_PENALTY = 1e30
# In longer windows, counting over the vocabulary is faster than sorting the window.
LONG_WINDOW = 4096


class TokenHistory:
    """The tokens so far, oldest first, as an array that grows."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._buffer = np.empty(len(tokens) + 256, dtype=np.int64)
        self._buffer[: len(tokens)] = tokens
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    def append(self, token_id: int) -> None:
        """Add the newest token."""
        if self._length == self._buffer.size:
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._buffer[self._length] = token_id
        self._length += 1

    def last(self, count: int) -> NDArray[np.int64]:
        """Return a view of the last `count` tokens or of all if there are fewer; -1 means all."""
        start = 0 if count < 0 else max(0, self._length - count)
        return self._buffer[start : self._length]


def add_bias(logits: NDArray[np.float32], bias: Mapping[int, float]) -> None:
    """Add each token's bias, at most MAX_PENALTY; minus infinity bans the token."""
    values = np.fromiter(bias.values(), dtype=np.float64, count=len(bias))
    logits[list(bias)] += np.minimum(values, MAX_PENALTY).astype(np.float32)


def penalise_repeats(
    logits: NDArray[np.float32], window: NDArray[np.int64], repeat: float, presence: float, frequency: float
) -> None:
    """Lower the logits of the tokens in the window.

    repeat divides positive logits and multiplies negative ones (CTRL, arXiv:1909.05858); presence is subtracted once,
    frequency once per occurrence (OpenAI's definitions).
    """
    if window.size < LONG_WINDOW:
        ids, counts = np.unique(window, return_counts=True)
    else:
        counted = np.bincount(window)
        ids = np.flatnonzero(counted)
        counts = counted[ids]
    seen = logits[ids]
    seen = np.where(seen > 0, seen / np.float32(repeat), seen * np.float32(repeat))
    logits[ids] = seen - counts.astype(np.float32) * np.float32(frequency) - np.float32(presence)


class DryPenalty:
    """DRY, "don't repeat yourself": a token that would continue a repeated passage costs more the longer it is.

    Defined in text-generation-webui pull request 5677; parameters as in llama.cpp. A breaker (a newline, a quote) ends
    a passage: only what follows it can count as repeated. It is found in the bytes of the text, so it may straddle
    tokens.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], token_text: Callable[[int], bytes]) -> None:
        self._history = history = TokenHistory(prompt)
        self._window = params.dry_penalty_last_n
        self._allowed_length = params.dry_allowed_length
        self._log_multiplier, self._log_base = math.log(params.dry_multiplier), math.log(params.dry_base)
        # Longer repeats cost no more.
        room = math.log(MAX_PENALTY) - self._log_multiplier
        most = room / self._log_base if self._log_base > 0 else 0.0
        self._longest = self._allowed_length + math.ceil(min(most, 1e9))
        self._breakers = [breaker.encode() for breaker in params.dry_sequence_breakers]
        self._overlap = max((len(breaker) for breaker in self._breakers), default=1) - 1
        self._token_text = token_text
        self._text_tail = b""
        self._since_breaker = 0
        for token_id in history.last(self._window).tolist():
            self._look_for_breaker(token_id)
        self._lengths = np.zeros(len(history) + 256, np.int32)
        self._lengths[: len(history)] = repeat_lengths(history.last(-1))

    def accept(self, token_id: int) -> None:
        """Record the newest token.

        Where a token equals the newest, the repeat that ends there is one longer than the one that ended before it.
        """
        self._history.append(token_id)
        self._look_for_breaker(token_id)
        tokens = self._history.last(-1)
        if tokens.size > self._lengths.size:
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
        before = self._lengths[: tokens.size - 1]
        longer = np.zeros(tokens.size, np.int32)
        longer[1:] = before
        longer += 1
        longer *= tokens == token_id
        longer[-1] = 0  # the end itself
        self._lengths[: tokens.size] = longer

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Lower, in place, the logits of tokens that would continue a repeat within the window of newest tokens."""
        window = self._history.last(self._window)
        limit = min(self._since_breaker, window.size, self._longest)
        if window.size <= self._allowed_length or limit < self._allowed_length:
            return
        lengths = self._lengths[len(self._history) - window.size : len(self._history) - 1]
        lengths = np.minimum(lengths, np.minimum(np.arange(1, window.size), limit))
        repeated = np.flatnonzero(lengths >= self._allowed_length)
        repeated = repeated[np.argsort(lengths[repeated], kind="stable")]
        longest = dict(zip(window[repeated + 1].tolist(), lengths[repeated].tolist(), strict=True))
        for token_id, length in longest.items():
            text = self._token_text(token_id)
            if not any(breaker in text for breaker in self._breakers):
                logits[token_id] -= np.float32(self._penalty(length - self._allowed_length))

    def _penalty(self, exponent: int) -> float:
        """multiplier * base ** exponent, at most MAX_PENALTY."""
        logarithm = self._log_multiplier + exponent * self._log_base
        return math.exp(min(logarithm, math.log(MAX_PENALTY)))

    def _look_for_breaker(self, token_id: int) -> None:
        text = self._text_tail + self._token_text(token_id)
        # The tail is shorter than the longest breaker, but may hold a whole shorter one, which was counted before.
        fresh = len(self._text_tail)
        broken = any(text.find(breaker, max(0, fresh - len(breaker) + 1)) >= 0 for breaker in self._breakers)
        self._since_breaker = 0 if broken else self._since_breaker + 1
        self._text_tail = text[len(text) - self._overlap :] if len(text) > self._overlap else text


def repeat_lengths(tokens: NDArray[np.int64]) -> list[int]:
    """Return for each token how many tokens ending there equal the end of the list; 0 for the last itself.

    The Z algorithm from the end, in linear time.
    """
    values = tokens.tolist()[::-1]
    count = len(values)
    lengths = [0] * count
    left = right = 0
    for at in range(1, count):
        length = min(right - at, lengths[at - left]) if at < right else 0
        while at + length < count and values[length] == values[at + length]:
            length += 1
        lengths[at] = length
        if at + length > right:
            left, right = at, at + length
    return lengths[::-1]
