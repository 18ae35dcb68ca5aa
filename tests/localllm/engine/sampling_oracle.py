"""The choice of a token in NumPy, to compare the compiled one with: candidates, and the filters that narrow them.

Filters are plain functions from candidates to fewer candidates, with llama.cpp's meaning and neutral values. Each is
applied only when its parameter is not neutral, in llama.cpp's order; temperature comes last. A filter leaves at least
one candidate.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from localllm.engine.request import SamplingParams

# Values per column in the search for the largest.
STACKED = 64
# Sorting this many is cheap, and a nucleus is hardly ever larger.
USUAL_NUCLEUS = 1024
# Used where entropy scaling gives temperature 0: unless logits are equal, the highest one then always wins.
COLDEST = 1e-9
# Lower temperatures change nothing: already here, all but the highest of different float32 logits have no chance.
LEAST_TEMPERATURE = 1e-200


@dataclass(frozen=True, slots=True)
class Candidates:
    """Token ids, ascending and unique, and their logits: int64[n] and float32 or float64[n], n >= 1.

    Ascending ids make every tie fall to the lowest id. The logits are finite. peaks: the result of `peaks`, if known.
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.floating]
    peaks: NDArray[np.floating] | None = None

    def keep(self, positions: NDArray[np.intp]) -> "Candidates":
        """Return the candidates at these ascending positions."""
        return Candidates(self.ids[positions], self.logits[positions])

    def probabilities(self) -> NDArray[np.float64]:
        """Return the softmax of the logits, float64[n]."""
        weights: NDArray[np.float64] = np.exp(self.logits.astype(np.float64) - float(self.logits.max()))
        weights /= weights.sum()
        return weights

    def draw(self, uniform: float) -> int:
        """Return the id where the cumulative distribution passes `uniform`, in [0, 1); never one of probability 0."""
        cumulative = self.probabilities().cumsum()
        return int(self.ids[cumulative.searchsorted(uniform * cumulative[-1], side="right")])


def peaks(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the largest value of each column of values, STACKED to a column, and the remaining values.

    Finding the largest values takes only this one pass over all of them.
    """
    columns = values.size // STACKED
    stack = values[: columns * STACKED].reshape(STACKED, columns)
    return np.concatenate([stack.max(axis=0), values[columns * STACKED :]])


def _contenders(values: NDArray[np.floating], count: int, highest: NDArray[np.floating]) -> NDArray[np.intp]:
    """Return ascending positions that include those of the `count` largest values. highest: the values' peaks.

    Only columns whose peak reaches the count-th highest peak can hold them, so the rest is not read again, and no array
    of all values is allocated.
    """
    columns = values.size // STACKED
    border = np.partition(highest, highest.size - count)[highest.size - count]
    high = (highest[:columns] >= border).nonzero()[0]
    inside = (np.arange(0, columns * STACKED, columns)[:, np.newaxis] + high).ravel()
    return np.concatenate([inside, np.arange(columns * STACKED, values.size)])


def best_first(values: NDArray[np.floating], count: int) -> NDArray[np.intp]:
    """Return the positions of the `count` largest values, largest first; ties go to the lowest position."""
    if count >= values.size:
        return np.asarray((-values).argsort(kind="stable"))
    best = largest(values, count)
    return best[(-values[best]).argsort(kind="stable")]


def largest(values: NDArray[np.floating], count: int, highest: NDArray[np.floating] | None = None) -> NDArray[np.intp]:
    """Return the positions, ascending, of the `count` largest values; ties at the border go to the lowest position.

    highest: the values' peaks, if known.
    """
    if count >= values.size:
        return np.arange(values.size)
    if count < values.size // STACKED:
        contenders = _contenders(values, count, peaks(values) if highest is None else highest)
        if contenders.size < values.size:
            return contenders[largest(values[contenders], count)]
    border = np.partition(values, values.size - count)[values.size - count]
    positions: NDArray[np.intp] = (values >= border).nonzero()[0]
    if positions.size > count:
        tied = positions[values[positions] == border]
        surplus = tied[tied.size - (positions.size - count) :]
        positions = np.setdiff1d(positions, surplus, assume_unique=True)
    return positions


Filter = Callable[[Candidates], Candidates]


def build_filters(params: SamplingParams, coin: Callable[[], float]) -> list[Filter]:
    """Return the filters whose parameters are not neutral, for a temperature above 0. coin() is uniform in [0, 1)."""
    if params.mirostat:
        return [_temperature(params), Mirostat(params.mirostat_tau, params.mirostat_eta)]
    keep, xtc_share = params.min_keep, params.xtc_probability
    chain: list[tuple[bool, Filter]] = [
        (params.top_n_sigma > 0, partial(top_n_sigma, sigmas=params.top_n_sigma)),
        (params.top_k > 0, partial(top_k, count=params.top_k)),
        (params.typical_p < 1, partial(typical_p, mass=params.typical_p, min_keep=keep)),
        (params.top_p < 1, partial(top_p, mass=params.top_p, min_keep=keep)),
        (params.min_p > 0, partial(min_p, share=params.min_p, min_keep=keep)),
        (xtc_share > 0, partial(xtc, probability=xtc_share, threshold=params.xtc_threshold, min_keep=keep, coin=coin)),
        (True, _temperature(params)),
    ]
    return [step for active, step in chain if active]


def narrow(candidates: Candidates, filters: Sequence[Filter], top_k_first: bool) -> Candidates:
    """Return what the filters leave of the candidates that are possible. top_k_first: the first of them is top_k."""
    if top_k_first:  # leaves few, and impossible ones only where there are no others
        candidates, filters = filters[0](candidates), filters[1:]
    if candidates.logits.min() == -np.inf:
        candidates = candidates.keep(np.flatnonzero(candidates.logits > -np.inf))
    for step in filters:
        candidates = step(candidates)
    return candidates


def _temperature(params: SamplingParams) -> Filter:
    if params.dynatemp_range > 0:
        spread, exponent = params.dynatemp_range, params.dynatemp_exponent
        return partial(scale_by_entropy, temperature=params.temperature, spread=spread, exponent=exponent)
    return partial(scale, temperature=params.temperature)


def top_n_sigma(candidates: Candidates, sigmas: float) -> Candidates:
    """Keep logits within `sigmas` standard deviations of the highest one (Top-n-sigma, arXiv:2411.07641)."""
    logits = candidates.logits.astype(np.float64)
    return candidates.keep(np.flatnonzero(logits >= logits.max() - sigmas * logits.std()))


def top_k(candidates: Candidates, count: int) -> Candidates:
    """Keep the `count` highest logits."""
    return candidates.keep(largest(candidates.logits, count, candidates.peaks))


def typical_p(candidates: Candidates, mass: float, min_keep: int) -> Candidates:
    """Keep the tokens whose surprise is nearest to the entropy, until their mass exceeds `mass` (arXiv:2202.00666)."""
    probabilities = candidates.probabilities()
    possible = np.flatnonzero(probabilities > 0)
    probabilities = probabilities[possible]
    surprise = -np.log(probabilities)
    entropy = float(probabilities @ surprise)
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    kept = int(np.searchsorted(np.cumsum(probabilities[order]), mass, side="right")) + 1
    return candidates.keep(np.sort(possible[order[: max(kept, min_keep)]]))


def top_p(candidates: Candidates, mass: float, min_keep: int) -> Candidates:
    """Keep the most probable tokens until their mass reaches `mass` (nucleus sampling, arXiv:1904.09751)."""
    probabilities = candidates.probabilities()
    for looked_at in (USUAL_NUCLEUS, probabilities.size):
        order = best_first(probabilities, looked_at)
        cumulative = probabilities[order].cumsum()
        if cumulative[-1] >= mass:
            break
    kept = max(int(cumulative.searchsorted(mass)) + 1, min_keep)
    return candidates.keep(np.sort(order[:kept]) if kept <= order.size else largest(probabilities, kept))


def min_p(candidates: Candidates, share: float, min_keep: int) -> Candidates:
    """Keep tokens at least `share` times as probable as the best one (arXiv:2407.01082)."""
    kept = (candidates.logits >= candidates.logits.max() + np.log(share)).nonzero()[0]
    return candidates.keep(kept if kept.size >= min_keep else largest(candidates.logits, min_keep))


def xtc(
    candidates: Candidates, probability: float, threshold: float, min_keep: int, coin: Callable[[], float]
) -> Candidates:
    """With the given probability, drop all tokens that reach `threshold`, except the least probable of them.

    XTC, "exclude top choices" (text-generation-webui pull request 6335). coin() is uniform in [0, 1).
    """
    if threshold > 0.5 or coin() >= probability:
        return candidates
    probabilities = candidates.probabilities()
    order = np.argsort(-probabilities, kind="stable")
    dropped = int(np.count_nonzero(probabilities >= threshold)) - 1
    if dropped < 1 or order.size - dropped < min_keep:
        return candidates
    return candidates.keep(np.sort(order[dropped:]))


def scale(candidates: Candidates, temperature: float) -> Candidates:
    """Subtract the maximum from the logits and divide by the temperature, which is above 0."""
    distance = candidates.logits.astype(np.float64) - float(candidates.logits.max())
    return Candidates(candidates.ids, distance / max(temperature, LEAST_TEMPERATURE))


def scale_by_entropy(candidates: Candidates, temperature: float, spread: float, exponent: float) -> Candidates:
    """Divide by a temperature within `spread` of the given one that grows with the entropy (arXiv:2309.02772)."""
    if candidates.ids.size == 1:
        return candidates
    probabilities = candidates.probabilities()
    possible = probabilities[probabilities > 0]
    entropy = -float(possible @ np.log(possible)) / math.log(probabilities.size)
    low, high = max(0.0, temperature - spread), temperature + spread
    return scale(candidates, max(COLDEST, low + (high - low) * max(entropy, 0.0) ** exponent))


class Mirostat:
    """Mirostat 2: keep the text's surprise near a target by dropping too surprising tokens (arXiv:2007.14966).

    tau is the target surprise in bits, eta the learning rate; the state is the bound mu.
    """

    def __init__(self, tau: float, eta: float) -> None:
        self._tau = tau
        self._eta = eta
        self._mu = 2 * tau
        self._last: Candidates | None = None

    def __call__(self, candidates: Candidates) -> Candidates:
        """Keep tokens whose surprise is at most mu, and always the most probable one."""
        with np.errstate(divide="ignore"):  # an impossible token is infinitely surprising
            surprise = -np.log2(candidates.probabilities())
        surprise[np.argmin(surprise)] = -np.inf
        self._last = candidates.keep(np.flatnonzero(surprise <= self._mu))
        return self._last

    def accept(self, token_id: int) -> None:
        """Update mu from the accepted token. A token that was not drawn from the last candidates changes nothing."""
        candidates, self._last = self._last, None
        if candidates is None:
            return
        position = int(np.searchsorted(candidates.ids, token_id))
        if position < candidates.ids.size and candidates.ids[position] == token_id:
            surprise = -float(np.log2(candidates.probabilities()[position]))
            self._mu -= self._eta * (surprise - self._tau)


def expected(
    params: SamplingParams, logits: NDArray[np.float32], allowed: NDArray[np.bool_] | None, coin: float
) -> Candidates:
    """What a token is drawn from, above temperature 0. At least one token must be possible."""
    if allowed is not None:
        logits = np.where(allowed, logits, np.float32(-np.inf))
    candidates = Candidates(np.arange(logits.size), logits)
    top_k_first = params.top_k > 0 and params.top_n_sigma <= 0 and not params.mirostat
    return narrow(candidates, build_filters(params, lambda: coin), top_k_first)
