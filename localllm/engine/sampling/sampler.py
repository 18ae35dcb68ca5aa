"""Samples a token from a row of logits."""

import secrets
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.engine.request import SamplingParams, TokenLogprob
from localllm.engine.sampling.filters import (
    Candidates,
    Mirostat,
    best_first,
    build_filters,
    check_choice,
    check_model,
    narrow,
    peaks,
)
from localllm.engine.sampling.penalties import DryPenalty, TokenHistory, add_bias, penalise_repeats
from localllm.errors import RequestError

# Positions whose random numbers are drawn together: making a generator takes as long as the rest of sampling a token.
DRAWN_TOGETHER = 64


class Sampler:
    """Chooses the tokens of one generation.

    params: already validated. prompt: what the penalty windows see before the answer. token_text: a token's bytes;
    needed for DRY only. seed: the requested one, else a random one. Not thread-safe.

    The random numbers depend only on the seed and the number of accepted tokens. So the same logits give the same
    tokens, however the request was batched, preempted or speculated: a drafted token is accepted if it equals what
    `sample` returns for its row, which also leaves the distribution unchanged.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: Sequence[int] = (),
        token_text: Callable[[int], bytes] | None = None,
    ) -> None:
        self._params = params
        self.vocab_size = vocab_size
        self._all_ids = np.arange(vocab_size)
        # Preallocated: allocating arrays of this size takes longer than the arithmetic.
        self._adjusted = np.empty(vocab_size, np.float32)
        self._ceilings = np.empty(vocab_size, np.float32)
        self.seed = secrets.randbits(32) if params.seed is None or params.seed < 0 else params.seed
        self._position = 0
        self._drawn: tuple[int, list[list[float]]] = (-1, [])
        penalises = params.repeat_last_n != 0 and (
            params.repeat_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self._history = TokenHistory(prompt) if penalises else None
        self._dry: DryPenalty | None = None
        if params.dry_multiplier > 0:
            if token_text is None:
                raise ValueError("DRY looks for sequence breakers in the text: pass token_text")
            self._dry = DryPenalty(params, prompt, token_text)
        self._changes_logits = bool(params.logit_bias) or penalises or self._dry is not None
        self._greedy = params.temperature == 0
        self._filters = [] if self._greedy else build_filters(params, self._coin)
        last = self._filters[-1] if self._filters else None
        self._mirostat = last if isinstance(last, Mirostat) else None
        self._top_k_first = params.top_k > 0 and params.top_n_sigma <= 0 and not params.mirostat

    def sample(
        self,
        logits: NDArray[np.float32],
        allowed: NDArray[np.bool_] | None = None,
        banned: NDArray[np.intp] | None = None,
    ) -> tuple[int, TokenLogprob | None]:
        """Return the next token and, if the params request it, its log-probability. Records nothing.

        logits: float32[vocab_size], not modified. allowed: bool[vocab_size], None allows every token. banned: ids that
        are not allowed. Raises LogitsError on NaN or absurdly high logits, RequestError if no token is left.
        """
        if logits.shape != (self.vocab_size,):
            raise ValueError(f"logits have shape {logits.shape}, expected ({self.vocab_size},)")
        if self._greedy:
            token_id = self._best(logits, allowed, banned)
        else:
            uniform = self._uniforms()[0]
            token_id = self.candidates(logits, allowed, banned).draw(uniform)
        wanted = self._params.logprobs
        return token_id, None if wanted is None else token_logprob(logits, token_id, wanted)

    def candidates(
        self,
        logits: NDArray[np.float32],
        allowed: NDArray[np.bool_] | None = None,
        banned: NDArray[np.intp] | None = None,
    ) -> Candidates:
        """Return what `sample` draws from, above temperature 0: what is left after penalties, masks and filters."""
        if self._changes_logits or allowed is not None or banned is not None:
            candidates = self._adjust(logits, allowed, banned)
        else:
            highest = peaks(logits)
            check_model(float(highest.max()))
            candidates = Candidates(self._all_ids, logits, highest)
        return narrow(candidates, self._filters, self._top_k_first)

    def accept(self, token_id: int) -> None:
        """Record that this token comes next, whether it was sampled, speculated or forced."""
        self._position += 1
        if self._history is not None:
            self._history.append(token_id)
        if self._dry is not None:
            self._dry.accept(token_id)
        if self._mirostat is not None:
            self._mirostat.accept(token_id)

    def _best(
        self, logits: NDArray[np.float32], allowed: NDArray[np.bool_] | None, banned: NDArray[np.intp] | None
    ) -> int:
        if allowed is None and not self._changes_logits:
            token_id = int(logits.argmax())
            check_model(float(logits[token_id]))
            if banned is None or token_id not in banned:
                check_choice(float(logits[token_id]))
                return token_id
        adjusted = self._adjust(logits, allowed, banned).logits
        token_id = int(adjusted.argmax())
        check_choice(float(adjusted[token_id]))
        return token_id

    def _adjust(
        self, logits: NDArray[np.float32], allowed: NDArray[np.bool_] | None, banned: NDArray[np.intp] | None
    ) -> Candidates:
        if allowed is not None and allowed.shape != logits.shape:
            raise RequestError(
                f"The constraint knows {allowed.size} tokens and the model has {logits.size}: "
                "constraints cannot be used with this model."
            )
        check_model(float(logits.max()))
        adjusted = self._adjusted
        np.copyto(adjusted, logits)
        if self._changes_logits:
            with np.errstate(over="ignore"):  # a logit pushed below float32 is minus infinity, as it should be
                self._penalise(adjusted)
        if allowed is not None:
            # A ceiling of plus or minus infinity: four times faster than assigning through a mask.
            np.subtract(allowed, np.float32(0.5), out=self._ceilings)
            np.multiply(self._ceilings, np.float32(np.inf), out=self._ceilings)
            np.minimum(adjusted, self._ceilings, out=adjusted)
        if banned is not None:
            adjusted[banned] = -np.inf
        return Candidates(self._all_ids, adjusted)

    def _penalise(self, logits: NDArray[np.float32]) -> None:
        params = self._params
        if params.logit_bias:
            add_bias(logits, params.logit_bias)
        if self._history is not None:
            window = self._history.last(params.repeat_last_n)
            penalise_repeats(logits, window, params.repeat_penalty, params.presence_penalty, params.frequency_penalty)
        if self._dry is not None:
            self._dry.apply(logits)

    def _coin(self) -> float:
        return self._uniforms()[1]

    def _uniforms(self) -> list[float]:
        """Two numbers in [0, 1) for the position: one for the draw, one for XTC's coin.

        They are the first two of the four that Philox generates per position.
        """
        first = self._position - self._position % DRAWN_TOGETHER
        if self._drawn[0] != first:
            raw = np.random.Philox(key=self.seed, counter=first).random_raw(4 * DRAWN_TOGETHER)
            self._drawn = first, ((raw.reshape(-1, 4)[:, :2] >> np.uint64(11)) * 2.0**-53).tolist()
        return self._drawn[1][self._position - first]


def token_logprob(logits: NDArray[np.float32], token_id: int, top: int) -> TokenLogprob:
    """Return the token's log-probability and those of the `top` most probable tokens, best first.

    Computed from the model's own logits, before bias, masks and filters.
    """
    highest = logits.max()
    total = float(highest) + float(np.log(np.exp(logits - highest).sum(dtype=np.float64)))
    best = best_first(logits, top) if top else np.empty(0, dtype=np.intp)
    others = tuple((int(other), float(logits[other]) - total) for other in best)
    return TokenLogprob(token_id, float(logits[token_id]) - total, others)
