"""Mirostat 2: keep the surprise of the text near a target by cutting off what is too surprising (arXiv:2007.14966)."""

import numpy as np

from localllm.engine.sampling.candidates import Candidates


class Mirostat:
    """The controller. tau is the target surprise in bits, eta the learning rate; the state is the bound mu."""

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
