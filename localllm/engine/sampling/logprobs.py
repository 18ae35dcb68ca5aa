"""What the model thought of a token before anything was biased, masked or filtered."""

import numpy as np
from numpy.typing import NDArray

from localllm.engine.request import TokenLogprob
from localllm.engine.sampling.candidates import best_first


def token_logprob(logits: NDArray[np.float32], token_id: int, top: int) -> TokenLogprob:
    """Return the token's log-probability and those of the `top` most probable tokens, best first."""
    highest = logits.max()
    total = float(highest) + float(np.log(np.exp(logits - highest).sum(dtype=np.float64)))
    best = best_first(logits, top) if top else np.empty(0, dtype=np.intp)
    rivals = tuple((int(rival), float(logits[rival]) - total) for rival in best)
    return TokenLogprob(token_id, float(logits[token_id]) - total, rivals)
