"""Filters: plain functions from candidates to fewer candidates, with llama.cpp's meaning and neutral values.

Each is applied only when its parameter is not neutral, in llama.cpp's order; temperature comes last. A filter leaves at
least one candidate.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from localllm.engine.request import SamplingParams
from localllm.engine.sampling.candidates import Candidates, best_first, largest

Filter = Callable[[Candidates], Candidates]

# Sorting this many is cheap, and a nucleus is hardly ever larger.
USUAL_NUCLEUS = 1024
# Where the entropy asks for temperature 0: any logits that differ at all are then decided by the highest.
COLDEST = 1e-9
# Below it, float32 logits that differ are as far apart as at it: all but the highest have no chance.
LEAST_TEMPERATURE = 1e-200


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
    """With the given probability drop all tokens that reach `threshold` but the least probable of them.

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
    """Divide the logits, less their maximum, by the temperature, which is above 0."""
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
    """Mirostat 2: keep the surprise of the text near a target by cutting off what is too surprising (arXiv:2007.14966).

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
        """Learn from the token that was taken. One that was not drawn from the last candidates teaches nothing."""
        candidates, self._last = self._last, None
        if candidates is None:
            return
        position = int(np.searchsorted(candidates.ids, token_id))
        if position < candidates.ids.size and candidates.ids[position] == token_id:
            surprise = -float(np.log2(candidates.probabilities()[position]))
            self._mu -= self._eta * (surprise - self._tau)
