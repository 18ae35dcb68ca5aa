"""The distribution that a sampler draws from."""

import numpy as np
from numpy.typing import NDArray

from localllm.engine.sampling import Sampler


def distribution(
    sampler: Sampler, logits: NDArray[np.float32], allowed: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Probabilities of all tokens, float64[vocab_size]; for a temperature above 0."""
    result = np.zeros(logits.size)
    candidates = sampler.candidates(logits, allowed)
    result[candidates.ids] = candidates.probabilities
    return result
