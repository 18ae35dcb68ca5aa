"""Samples a token from a row of logits."""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from localllm.engine.request import SamplingParams, TokenLogprob
from localllm.engine.sampling.choice import HIGHEST_LOGIT, Candidates, Chooser, check_model
from localllm.engine.sampling.penalties import DryPenalty, TokenHistory, add_bias, penalise_repeats
from localllm.engine.sampling.watermark import Watermark
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
        self._chooser = Chooser(params, vocab_size)
        self.seed = secrets.randbits(32) if params.seed is None or params.seed < 0 else params.seed
        self._begun = False  # whether the next token is chosen already
        self._unbanned: NDArray[np.bool_] | None = None
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
        self._watermark: Watermark | None = None
        if params.watermark_key:
            before = prompt[-1] if prompt else None
            self._watermark = Watermark(params.watermark_key, params.watermark_delta, params.watermark_gamma, before)
        self._changes_logits = bool(params.logit_bias) or penalises or self._dry is not None
        # Preallocated: allocating an array of this size takes longer than the arithmetic. The watermark writes
        # sixteen at a time.
        self._adjusted = np.empty(vocab_size + 15, np.float32)[:vocab_size]
        # Mirostat 2 (arXiv:2007.14966): the bound of the surprise in bits, and what the last token was drawn from.
        self._mu = 2 * params.mirostat_tau if params.mirostat and params.temperature > 0 else None
        self._last: Candidates | None = None

    def begin(
        self,
        logits: NDArray[np.float32] | None,
        allowed: NDArray[np.bool_] | None = None,
        banned: NDArray[np.intp] | None = None,
    ) -> int | None:
        """The operation of `choose` for the token that `sample` returns next for these logits, to be run before it.

        None where `sample` needs more than that choice. allowed, banned: as for `sample`; allowed must live until then.
        logits: None if they come later, and whoever runs the operation tells where they are; then the result is None
        where they must be changed before. Raises RequestError.
        """
        if self._mu is not None or self._params.post_sampling_probs:
            return None
        if logits is None:
            if self._changes_logits or self._watermark is not None:
                return None
        elif self._changes_logits and not float(logits.max()) < HIGHEST_LOGIT:
            return None
        else:
            logits = self._changed(logits)
        self._chooser.prepare(logits, self._mask(allowed, banned), *self._uniforms())
        self._begun = True
        return self._chooser.operation

    def sample(
        self,
        logits: NDArray[np.float32],
        allowed: NDArray[np.bool_] | None = None,
        banned: NDArray[np.intp] | None = None,
    ) -> tuple[int, TokenLogprob | None]:
        """Return the next token and, if the params request it, its log-probability. Records nothing.

        logits: float32[vocab_size], not modified. allowed: bool[vocab_size], None allows every token but `banned`: the
        same ids in every call. Raises LogitsError on NaN or absurdly high logits, RequestError if no token is left.
        """
        if logits.shape != (self.vocab_size,):
            raise ValueError(f"logits have shape {logits.shape}, expected ({self.vocab_size},)")
        token_id = self._choose(logits, allowed, banned)
        wanted = self._params.logprobs
        if wanted is None:
            return token_id, None
        if self._params.post_sampling_probs:
            return token_id, self._drawn_logprob(logits, token_id, wanted)
        return token_id, token_logprob(logits, token_id, wanted)

    def candidates(self, logits: NDArray[np.float32], allowed: NDArray[np.bool_] | None = None) -> Candidates:
        """Return what `sample` draws from, above temperature 0, after penalties, masks and filters."""
        self._choose(logits, allowed, None)
        return self._drawn_from(logits)

    def accept(self, token_id: int) -> None:
        """Record that this token comes next, whether it was sampled, speculated or forced."""
        self._position += 1
        if self._history is not None:
            self._history.append(token_id)
        if self._dry is not None:
            self._dry.accept(token_id)
        if self._watermark is not None:
            self._watermark.accept(token_id)
        if self._mu is not None and self._last is not None:
            position = int(self._last.ids.searchsorted(token_id))
            # A token that was not drawn from the last candidates changes nothing.
            if position < self._last.ids.size and self._last.ids[position] == token_id:
                surprise = -math.log2(self._last.probabilities[position])
                self._mu -= self._params.mirostat_eta * (surprise - self._params.mirostat_tau)
            self._last = None

    def _choose(
        self, logits: NDArray[np.float32], allowed: NDArray[np.bool_] | None, banned: NDArray[np.intp] | None
    ) -> int:
        if self._begun:
            self._begun = False
            return self._chooser.chosen(self._changes_logits)
        mask, adjusted = self._mask(allowed, banned), self._changes_logits
        if self._params.temperature == 0 and mask is None and not adjusted and self._watermark is None:
            token_id = int(logits.argmax())
            check_model(float(logits[token_id]))
            if logits[token_id] > -np.inf:
                return token_id
        if adjusted:
            check_model(float(logits.max()))
        logits = self._changed(logits)
        uniform, coin = self._uniforms()
        token_id = self._chooser.choose(logits, mask, uniform, coin, self._mu, adjusted)
        if self._mu is not None:
            self._last = self._chooser.candidates(logits)
        return token_id

    def _drawn_from(self, logits: NDArray[np.float32]) -> Candidates:
        """What the last token was drawn from. logits: the model's own."""
        changed = self._changes_logits or self._watermark is not None
        return self._chooser.candidates(self._adjusted if changed else logits)

    def _drawn_logprob(self, logits: NDArray[np.float32], token_id: int, top: int) -> TokenLogprob:
        """The log-probability by which a token was drawn, and the `top` most probable candidates, best first."""
        if self._params.temperature == 0:
            return TokenLogprob(token_id, 0.0, ((token_id, 0.0),)[:top])
        drawn = self._drawn_from(logits)
        own = drawn.probabilities[drawn.ids.searchsorted(token_id)]
        best = [at for at in (-drawn.probabilities).argsort(kind="stable")[:top] if drawn.probabilities[at] > 0]
        others = tuple((int(drawn.ids[at]), math.log(drawn.probabilities[at])) for at in best)
        return TokenLogprob(token_id, math.log(own), others)

    def _mask(self, allowed: NDArray[np.bool_] | None, banned: NDArray[np.intp] | None) -> NDArray[np.bool_] | None:
        """bool[vocab_size]: the tokens that may be chosen; None for all. Raises RequestError."""
        if allowed is not None and allowed.size != self.vocab_size:
            raise RequestError(
                f"The constraint knows {allowed.size} tokens and the model has {self.vocab_size}: "
                "constraints cannot be used with this model."
            )
        if allowed is not None or banned is None:
            return allowed
        if self._unbanned is None:
            self._unbanned = np.ones(self.vocab_size, np.bool_)
            self._unbanned[banned] = False
        return self._unbanned

    def _changed(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the token is chosen by: the logits, or a copy with bias, penalties and watermark."""
        if self._changes_logits:
            np.copyto(self._adjusted, logits)
            logits = self._adjusted
            with np.errstate(over="ignore"):  # a logit pushed below float32 is minus infinity, as it should be
                self._penalise(logits)
        if self._watermark is not None:
            logits = self._watermark.raised(logits, self._adjusted)
        return logits

    def _penalise(self, logits: NDArray[np.float32]) -> None:
        params = self._params
        if params.logit_bias:
            add_bias(logits, params.logit_bias)
        if self._history is not None:
            window = self._history.last(params.repeat_last_n)
            penalise_repeats(logits, window, params.repeat_penalty, params.presence_penalty, params.frequency_penalty)
        if self._dry is not None:
            self._dry.apply(logits)

    def _uniforms(self) -> list[float]:
        """Two numbers in [0, 1) for the position: one for the draw, one for XTC's coin.

        They are the first two of the four that Philox generates per position.
        """
        first = self._position - self._position % DRAWN_TOGETHER
        if self._drawn[0] != first:
            raw = np.random.Philox(key=self.seed, counter=first).random_raw(4 * DRAWN_TOGETHER)
            self._drawn = first, ((raw.reshape(-1, 4)[:, :2] >> np.uint64(11)) * 2.0**-53).tolist()
        return self._drawn[1][self._position - first]


# Every token at temperature 1, and the parameters' neutral values.
_PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, xtc_probability=0.0, min_keep=1)


def token_logprob(logits: NDArray[np.float32], token_id: int, top: int) -> TokenLogprob:
    """Return the token's log-probability and those of the `top` most probable tokens, best first.

    Computed from the model's own logits, before bias, masks and filters. Ties go to the lowest id.
    """
    best = Chooser(replace(_PLAIN, top_k=max(top, 1)), logits.size, total=True)
    best.choose(logits, None, 0.0, 0.0)
    total, ids = best.log_total, best.candidates(logits).ids
    others = ids[(-logits[ids]).argsort(kind="stable")][:top].tolist()
    return TokenLogprob(
        token_id, float(logits[token_id]) - total, tuple((other, float(logits[other]) - total) for other in others)
    )
