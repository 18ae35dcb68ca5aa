"""Filters: plain functions from candidates to fewer candidates, with llama.cpp's meaning and neutral values.

Each is applied only when its parameter is not neutral (see chain.py). A filter leaves at least one candidate.
"""

from collections.abc import Callable

import numpy as np

from localllm.engine.sampling.candidates import Candidates, best_first, largest

# Sorting this many is cheap, and a nucleus is hardly ever larger.
USUAL_NUCLEUS = 1024


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
