"""Random texts under a constraint, for the tests of constraints."""

import numpy as np

from gguf_io.tokenizer import Tokenizer
from localllm.engine.constraint import Constraint
from localllm.engine.request import SamplingParams
from localllm.engine.sampling import Sampler

MAX_TOKENS = 200
ENDING = 0.5


class Walker:
    """Samples tokens from random logits under the masks.

    Short tokens are likelier and ends are preferred, so that random text eventually closes its brackets.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lengths = np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])
        self._ends = sorted(tokenizer.eog_ids)

    def text(self, constraint: Constraint, seed: int) -> str | None:
        """Return the sampled text; None if it does not end within MAX_TOKENS."""
        rng = np.random.default_rng(seed)
        sampler = Sampler(SamplingParams(temperature=0), self._tokenizer.vocab_size)
        text = b""
        for _ in range(MAX_TOKENS):
            mask = constraint.mask()
            logits = (rng.gumbel(size=mask.size) - 2 * self._lengths).astype(np.float32)
            if mask[self._ends].any() and rng.random() < ENDING:
                logits[self._ends] += 100
            token, _ = sampler.sample(logits, mask)
            constraint.accept(token)
            if token in self._ends:
                return text.decode()
            text += self._tokenizer.token_bytes(token)
        return None
