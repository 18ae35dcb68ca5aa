"""Finds the watermark of a key in a text (localllm.engine.sampling.watermark).

Where the model had no choice, the watermark changed nothing, so each token counts as much as the model's prediction let
it. That finds marks in predictable text, too (after Lu et al., arXiv:2403.13485; the expected share of green tokens is
that of Kirchenbauer et al., arXiv:2301.10226, summed over tokens).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.engine.runner import Runner
from localllm.engine.sampling.watermark import green
from localllm.wings.lab.quality.perplexity import Progress, log_probabilities

CONTEXT = 512
"""Tokens that the model reads at a time."""
LIKELY = 0.01
"""A lower p is called a watermark."""
FEWEST = 25
"""With fewer pairs, no verdict is given."""
_STEEPEST = 20.0


@dataclass(frozen=True, slots=True)
class Detection:
    """What a key finds in a text.

    pairs: different pairs of a token and the one before it. Only these count: a repeated pair is always of one colour,
    so it proves nothing new. green: how many have a green second token. z: by how many standard deviations the weighted
    number of green tokens is above what a text without this watermark has. p: the probability that such a text has as
    many. marked: whether the text is called marked; None if it is too short.
    """

    tokens: int
    pairs: int
    green: int
    gamma: float
    z: float
    p: float
    marked: bool | None


def detect(
    runner: Runner, tokens: Sequence[int], bos: int | None, mark: tuple[str, float, float], progress: Progress
) -> Detection:
    """Look for a watermark. bos: read before the text. mark: key, delta and gamma."""
    key, delta, gamma = mark
    parts = list(_read(runner, tokens, bos, progress))
    weights = np.concatenate([_weights(part, delta, gamma) for part in parts]) if parts else np.zeros(0)
    every = np.array([tokens[:-1], tokens[1:]], np.int64).T.reshape(-1, 2)
    pairs, first = np.unique(every, axis=0, return_index=True)
    found = green(pairs, key, gamma)
    z, p = significance(weights[first], found, gamma)
    marked = None if len(pairs) < FEWEST else p < LIKELY
    return Detection(len(tokens), len(pairs), int(np.count_nonzero(found)), gamma, z, p, marked)


def _read(runner: Runner, tokens: Sequence[int], bos: int | None, progress: Progress) -> Iterator[NDArray[np.float64]]:
    """Log-probabilities of all tokens at each place of the text after the first."""
    before = [] if bos is None else [bos]
    starts = range(0, len(tokens) - 1, CONTEXT)
    for number, start in enumerate(starts):
        progress(number, len(starts))
        yield log_probabilities(runner, [*before, *tokens[start : start + CONTEXT + 1]], len(before))


def _weights(predictions: NDArray[np.float64], delta: float, gamma: float) -> NDArray[np.float64]:
    """By how much the watermark makes a green token likelier at each place, on average over keys."""
    chances = np.exp(predictions)
    raised, usual = math.exp(delta), 1 + gamma * math.expm1(delta)
    expected = (gamma * raised * chances / (chances * raised + (1 - chances) * usual)).sum(axis=1)
    return np.asarray(np.maximum(expected - gamma, 0.0))


def significance(weights: NDArray[np.float64], found: NDArray[np.bool_], gamma: float) -> tuple[float, float]:
    """z and p of the weighted number of green tokens. Each is green with probability gamma without the watermark.

    p is the saddlepoint approximation by Lugannani and Rice (1980).
    """
    largest = weights.max(initial=0.0)
    if largest <= 0.0:
        return 0.0, 1.0
    weights = weights / largest
    total = float(weights[found].sum())
    spread = math.sqrt(gamma * (1 - gamma) * float((weights**2).sum()))
    z = (total - gamma * float(weights.sum())) / spread
    low, high = -_STEEPEST, _STEEPEST
    for _ in range(60):
        tilt = (low + high) / 2
        chances = 1 / (1 + (1 / gamma - 1) * np.exp(-tilt * weights))
        low, high = (tilt, high) if float((weights * chances).sum()) < total else (low, tilt)
    if abs(tilt) * spread < 1e-3:
        return z, 0.5 * math.erfc(z / math.sqrt(2))
    cumulant = float(np.log1p(gamma * np.expm1(tilt * weights)).sum())
    signed = math.copysign(math.sqrt(2 * max(tilt * total - cumulant, 1e-300)), tilt)
    scaled = tilt * math.sqrt(float((weights**2 * chances * (1 - chances)).sum()))
    density = math.exp(-(signed**2) / 2) / math.sqrt(2 * math.pi)
    p = 0.5 * math.erfc(signed / math.sqrt(2)) + density * (1 / scaled - 1 / signed)
    return z, min(max(p, 0.0), 1.0)
