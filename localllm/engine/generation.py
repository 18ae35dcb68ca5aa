"""One request while the engine works on it."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.engine.adapters import AdapterSet
from localllm.engine.context_policy import FittedPrompt, kept_first, roll
from localllm.engine.detokenizer import Detokenizer
from localllm.engine.disk_cache import Segment
from localllm.engine.images import ImageSpans
from localllm.engine.memory_tier import MemorySegment
from localllm.engine.prefix_cache import common_prefix
from localllm.engine.prompt_lookup import PromptLookup
from localllm.engine.request import (
    ContextPolicy,
    Counts,
    FinishReason,
    GenerationRequest,
    Progress,
    Timings,
    TokenEvent,
    TokenLogprob,
)
from localllm.engine.sampling import Sampler
from localllm.engine.speculation import DraftLength, LookupLength, StepCosts
from localllm.engine.stream import GenerationStream


class Vocabulary(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def eog_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for in text."""


class Generation:
    """The state of one request from its submission to its last event.

    tokens is the prompt and what was generated; the runner's sequence stores the first `computed` of them. Decoding is
    the case of one pending token, prefill that of many: the scheduler treats both alike. `restoring` are the segments
    still to be read from the disk tier before anything is computed. `marks` are places in the prompt where a step must
    end, so that the state there can be kept.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prompt: FittedPrompt,
        context: int,
        sampler: Sampler,
        vocabulary: Vocabulary,
        stream: GenerationStream,
        adapters: AdapterSet = (),
    ) -> None:
        self.request = request
        self.adapters = adapters
        self.context = context
        self.stream = stream
        self.tokens = list(prompt.tokens)
        self.images = ImageSpans(self.tokens, request.images)
        self.sequence: int | None = None
        self.computed = 0
        self.restoring: list[Segment | MemorySegment] = []
        self.marks: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.cause: Exception | None = None
        self._lookup = PromptLookup(self.images.without(self.tokens))
        self._lookup_length = LookupLength()
        self._model_length = DraftLength()
        self._drafted_by: DraftLength | None = None
        self._constraint = request.constraint.fork() if request.constraint else None
        self.generated = 0
        self._speculated = (0, 0)  # drafted, accepted
        # What does not change with every token.
        self._counts = Counts(
            prompt=len(self.tokens),
            dropped_messages=prompt.dropped_messages,
            dropped_tokens=prompt.dropped_tokens,
        )
        self._sampler = sampler
        self._vocabulary = vocabulary
        self._eog = np.array(sorted(vocabulary.eog_ids), dtype=np.intp)
        self._detokenizer = Detokenizer(request.stop)
        self._unsent: list[int] = []
        self._logprobs: list[tuple[int, TokenLogprob]] = []  # not sent yet, by where in the text their tokens begin
        self._text = ""
        self._shown = 0  # characters of text that are certain
        self._progress: Progress | None = None
        self.submitted = time.monotonic()
        self._admitted: float | None = None
        self._first_token: float | None = None
        self._take_forced()

    @property
    def pending(self) -> int:
        """Tokens whose KV is not stored yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def counts(self) -> Counts:
        """Tokens so far."""
        fixed = self._counts
        return Counts(
            fixed.prompt,
            fixed.cached_memory,
            fixed.cached_disk,
            self.generated,
            *self._speculated,
            fixed.dropped_messages,
            fixed.dropped_tokens,
        )

    @property
    def expired(self) -> bool:
        """Whether the request's time limit has passed."""
        limit = self.request.time_limit_s
        return limit is not None and time.monotonic() - self.submitted >= limit

    @property
    def tokens_left(self) -> int:
        """Most tokens that may still be generated."""
        asked, in_context = self.request.max_tokens, self.context - len(self.tokens)
        left = self.context if asked is None else asked - self.generated
        return left if self.request.context_policy is ContextPolicy.ROLLING else min(left, in_context)

    def start(self, sequence: int, cached_memory: int) -> None:
        """Take a sequence that already stores the first cached_memory tokens."""
        self.sequence = sequence
        self.computed = cached_memory
        if self._admitted is None:
            self._admitted = time.monotonic()
            self._counts = replace(self._counts, cached_memory=cached_memory)

    def restored(self, tokens: int, from_disk: bool) -> None:
        """Note that the sequence was filled up to so many tokens, from the disk or from copies in main memory."""
        gained, self.computed = tokens - self.computed, tokens
        if self.generated == 0:
            name = "cached_disk" if from_disk else "cached_memory"
            self._counts = replace(self._counts, **{name: getattr(self._counts, name) + gained})

    @property
    def knows_more(self) -> bool:
        """Whether `draft` has something to go on with."""
        return self._lookup.found

    def draft(self, limit: int, costs: StepCosts, others: int) -> list[int]:
        """Return up to `limit` tokens that followed the same words before; others: rows that the step has beside."""
        self._drafted_by = None
        if not self._lookup.found:
            return []
        self._drafted_by = self._lookup_length
        return self._lookup.draft(self._lookup_length.choose(limit, costs, 0.0, others))

    def wanted_guesses(self, limit: int, costs: StepCosts, token_s: float, others: int) -> int:
        """How many tokens a draft model should guess that takes token_s for each; call it where `draft` gave none."""
        self._drafted_by = self._model_length
        return self._model_length.choose(limit, costs, token_s, others)

    def accept_rows(self, rows: NDArray[np.float32], drafts: Sequence[int]) -> None:
        """Sample from each row in turn, as long as the token drafted for it is the one sampled.

        A draft is a certainty, so that keeping the target's own sample, and going on only where it equals the draft, is
        the rejection rule of Leviathan et al. for it: the answer is the one without speculation, seed by seed.
        """
        start = len(self.tokens)
        came: list[int] = []
        while not self.finish_reason and len(came) <= len(drafts) and came == list(drafts[: len(came)]):
            self._sample(rows[len(came)])
            came = self.tokens[start:]
        if not drafts:
            return
        accepted = common_prefix(came, drafts)
        if self._drafted_by:
            self._drafted_by.observe(len(drafts), accepted)
        self._speculated = self._speculated[0] + len(drafts), self._speculated[1] + accepted

    def _sample(self, row: NDArray[np.float32]) -> None:
        """Choose a token; take it and those that must follow. Raises LogitsError, or the constraint's RequestError."""
        allowed = self._constraint.mask() if self._constraint else None
        goes_on = allowed is None and (self.request.ignore_eos or self.generated < self.request.min_tokens)
        token_id, logprob = self._sampler.sample(row, allowed, self._eog if goes_on else None)
        self._first_token = self._first_token or time.monotonic()
        self._take(token_id, logprob)
        self._take_forced()

    def _take_forced(self) -> None:
        """Take the tokens that the constraint leaves no choice about, which then need no logits.

        Where log-probabilities are wanted, or mirostat learns from every choice, they are sampled like all others; so
        is the token that fills the context.
        """
        sampling = self.request.sampling
        if self._constraint is None or sampling.logprobs is not None or sampling.mirostat or self.tokens_left <= 0:
            return
        for token_id in self._constraint.forced_tokens() if self.finish_reason is None else []:
            if self.finish_reason or len(self.tokens) + 1 >= self.context:
                return
            self._take(token_id, None)

    def _take(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Go on with a token: in the history, the text, the constraint; and see whether it ends the answer."""
        self._sampler.accept(token_id)
        self.tokens.append(token_id)
        expected = self._lookup.append(token_id)
        if expected is not None:
            self._lookup_length.guessed(expected)
        self._model_length.token()
        self.generated += 1
        self._unsent.append(token_id)
        if token_id in self._vocabulary.eog_ids:
            self.finish_reason = FinishReason.STOP
            return
        if logprob:
            self._logprobs.append((self._shown + self._detokenizer.held, logprob))
        self._show(self._detokenizer.push(self._vocabulary.token_bytes(token_id)))
        if self._constraint:
            self._constraint.accept(token_id)
        if self._detokenizer.stopped or (self._constraint and self._constraint.is_finished):
            self.finish_reason = FinishReason.STOP
        elif self.tokens_left <= 0:
            self.finish_reason = FinishReason.LENGTH

    def _show(self, text: str) -> None:
        self._text += text
        self._shown += len(text)

    def fail(self, error: Exception) -> None:
        """End with an error, which the last event shows."""
        self.finish_reason = FinishReason.ERROR
        self.error, self.cause = str(error), error

    def roll_if_full(self) -> bool:
        """Under ContextPolicy.ROLLING, shorten a full window; True if the stored KV no longer fits the tokens."""
        if self.request.context_policy is not ContextPolicy.ROLLING or len(self.tokens) < self.context:
            return False
        kept = roll(self.tokens, self.context, kept_first(self.request))
        dropped = self._counts.dropped_tokens + len(self.tokens) - len(kept)
        self._counts = replace(self._counts, dropped_tokens=dropped)
        self.tokens, self.computed = kept, 0
        self._lookup = PromptLookup(kept)
        return True

    def send_progress(self, queue_position: int) -> None:
        """Tell the reader how far the request has come before its first token, where that has changed."""
        progress = Progress(queue_position, self.computed, len(self.tokens))
        if self._first_token is None and progress != self._progress:
            self._progress = progress
            self.stream.push(TokenEvent(counts=self.counts, timings=self.timings(), progress=progress))

    def send_text(self) -> None:
        """Send what was generated since the last event, if some of its text is certain."""
        if self._text and self.finish_reason is None:
            self.stream.push(self._event())

    def send_last(self) -> None:
        """Send the final event; finish_reason must be set."""
        self._show(self._detokenizer.flush())
        self.stream.push(
            replace(
                self._event(),
                finish_reason=self.finish_reason,
                seed=self._sampler.seed,
                error=self.error,
                cause=self.cause,
                stop_string=self._detokenizer.stopped,
            )
        )

    def _event(self) -> TokenEvent:
        # What ends in nothing, such as the first byte of a character, is told at the end.
        whole = self.finish_reason is not None and self._detokenizer.stopped is None
        told = [logprob for begins, logprob in self._logprobs if whole or begins < self._shown]
        del self._logprobs[: len(told)]
        event = TokenEvent(
            text=self._text,
            token_ids=tuple(self._unsent),
            logprobs=tuple(told),
            counts=self.counts,
            timings=self.timings(),
        )
        self._text = ""
        self._unsent.clear()
        return event

    def timings(self) -> Timings:
        """How long each phase has taken so far."""
        now = time.monotonic()
        admitted = self._admitted or now
        first = self._first_token or now
        return Timings(
            queue_s=admitted - self.submitted,
            prefill_s=first - admitted,
            decode_s=now - first,
            ttft_s=first - self.submitted if self._first_token else 0.0,
        )
