"""Temperature: the last step before the draw, fixed or following the entropy."""

import math

import numpy as np

from localllm.engine.sampling.candidates import Candidates

# Where the entropy asks for temperature 0: any logits that differ at all are then decided by the highest.
COLDEST = 1e-9
# Below it, float32 logits that differ are as far apart as at it: all but the highest have no chance.
LEAST_TEMPERATURE = 1e-200


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
