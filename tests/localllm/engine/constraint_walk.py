"""Random texts under a constraint, for the tests of constraints."""

import numpy as np

from gguf_io.tokenizer import Tokenizer
from localllm.engine.constraint import Constraint

MAX_TOKENS = 200
ENDING = 0.5


class Walker:
    """Draws random tokens under the masks.

    Short tokens are likelier and ends are preferred, so that random text eventually closes its brackets.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        lengths = [min(len(tokenizer.token_bytes(token)), 40) for token in range(tokenizer.vocab_size)]
        self._delays = np.exp(2.0 * np.array(lengths))
        self._ends = sorted(tokenizer.eog_ids)

    def text(self, constraint: Constraint, seed: int) -> str | None:
        """Return the sampled text; None if it does not end within MAX_TOKENS."""
        rng = np.random.default_rng(seed)
        text = b""
        for _ in range(MAX_TOKENS):
            mask = constraint.mask()
            # The first of exponentially distributed times is each token's with a probability of exp(-2 * length).
            times = np.where(mask, rng.standard_exponential(mask.size) * self._delays, np.inf)
            if mask[self._ends].any() and rng.random() < ENDING:
                token = self._ends[int(times[self._ends].argmin())]
            else:
                token = int(times.argmin())
            constraint.accept(token)
            if token in self._ends:
                return text.decode()
            text += self._tokenizer.token_bytes(token)
        return None
