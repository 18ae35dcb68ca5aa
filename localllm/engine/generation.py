"""One request in progress."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gguf_io.runner_info import AdapterSet
from localllm.engine.inspection import RequestView, Timeline
from localllm.engine.pins import computed_for
from localllm.engine.prefix_cache import common_prefix
from localllm.engine.request import (
    ContextPolicy,
    Counts,
    FinishReason,
    FittedPrompt,
    GenerationRequest,
    Progress,
    TokenLogprob,
    kept_first,
    roll,
)
from localllm.engine.sampling import Sampler, check_model, token_logprob
from localllm.engine.sequence import KeySpace, TokenSequence
from localllm.engine.speculation import Speculation
from localllm.engine.stream import EventWriter
from localllm.errors import LocalLLMError, RequestError

log = logging.getLogger(__name__)


class Vocabulary(Protocol):
    """The part of a tokenizer that the engine uses."""

    @property
    def eog_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of the token's text."""


def sequence_of(
    request: GenerationRequest, prompt: FittedPrompt, adapters: AdapterSet, most_pinned: int
) -> TokenSequence:
    """The tokens of a request whose prompt was fitted to its context, none of them computed.

    most_pinned: how many tokens a request can pin.
    """

    def is_whole(length: int) -> bool:  # no message dropped
        return tuple(prompt.tokens[:length]) == request.prompt[:length]

    pins = [] if request.background else [pin for pin in request.pins if is_whole(pin.tokens)]
    pins = [replace(pin, tokens=min(pin.tokens, most_pinned)) for pin in pins if most_pinned]
    return TokenSequence(
        prompt.tokens,
        request.images,
        KeySpace(adapters, request.namespace),
        request.background,
        request.persist,
        request.shared_prefix if is_whole(request.shared_prefix) else 0,
        pins,
    )


class Generation:
    """A growing sequence of tokens, its drafts, and the events that its reader gets.

    context: maximum tokens of prompt and answer together. generated: tokens of the answer so far. finish_reason is set
    when the generation ends; `finish` sends the last event.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prompt: FittedPrompt,
        sequence: TokenSequence,
        context: int,
        sampler: Sampler,
        vocabulary: Vocabulary,
        writer: EventWriter,
    ) -> None:
        """sequence: of the prompt."""
        self.request = request
        self.context = context
        self.sequence = sequence
        self._speculation: Speculation | None = None
        self.writer = writer
        self.timeline = Timeline(writer.came)
        self.finish_reason: FinishReason | None = None
        self._error: Exception | None = None
        self._prompt = prompt
        self.generated = 0
        self._scores: list[TokenLogprob] = []  # of the prompt's tokens after the first
        self._rolled = 0  # tokens that a rolling window has dropped from the answer's text
        self._sampler = sampler
        self._constraint = request.constraint.fork() if request.constraint else None
        self._vocabulary = vocabulary
        self._eog = np.array(sorted(vocabulary.eog_ids), dtype=np.intp)
        if request.prompt_logprobs is not None:
            self._note_scores()
        if self._constraint:
            self._take_forced()

    @property
    def speculation(self) -> Speculation:
        """The source of drafts. Created on first use, after the first token, because it indexes the whole text."""
        if self._speculation is None:
            tokens = self.sequence.tokens
            prompt = len(tokens) - self.generated
            self._speculation = Speculation(self.sequence.images.without(tokens[:prompt]))
            for token_id in tokens[prompt:]:
                self._speculation.token(token_id)
        return self._speculation

    @property
    def counts(self) -> Counts:
        """Tokens so far."""
        sequence, speculation, prompt = self.sequence, self._speculation, self._prompt
        reused = (sequence.from_memory or 0) + sequence.from_disk
        return Counts(
            len(prompt.tokens),
            sequence.from_memory or 0,
            sequence.from_disk,
            self.generated,
            speculation.drafted if speculation else 0,
            speculation.accepted if speculation else 0,
            prompt.dropped_messages,
            prompt.dropped_tokens + self._rolled,
            sequence.recomputed,
            computed_for(sequence.pins, reused) if sequence.pins else (),
        )

    @property
    def prefilled(self) -> int:
        """Prompt tokens that are computed or reused: all of them once the first token has been sampled."""
        counts = self.counts
        processed = max(self.sequence.computed, counts.cached)  # nothing is computed after a preemption
        return min(processed, counts.prompt) if self.writer.first_token is None else counts.prompt

    @property
    def unscored(self) -> int:
        """How many of the next rows predict a prompt token whose log-probability is requested."""
        ahead = len(self._prompt.tokens) - 1 - self.sequence.computed
        return max(ahead, 0) if self.sequence.reusable is not None else 0

    @property
    def tokens_left(self) -> int:
        """The maximum number of tokens still to generate."""
        asked, in_context = self.request.max_tokens, self.context - len(self.sequence.tokens)
        left = self.context if asked is None else asked - self.generated
        return left if self.request.context_policy is ContextPolicy.ROLLING else min(left, in_context)

    @property
    def most_drafted(self) -> int:
        """The maximum draft length that exceeds neither the answer's limit nor the context."""
        return min(self.tokens_left, self.context - len(self.sequence.tokens)) - 1

    def score_prompt(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Record the prompt's requested log-probabilities; return the remaining rows, for `sample`.

        rows: logits of the sequence's next tokens, none of which is counted as computed yet. Raises LogitsError.
        """
        top, scored = self.request.prompt_logprobs, self.unscored
        assert top is not None
        known = len(self._scores) - self.sequence.computed  # above 0 if evicted rows are computed again
        for at, row in enumerate(rows[:scored]):
            if at >= known:
                check_model(float(row.max()))
                self._scores.append(token_logprob(row, self.sequence.tokens[self.sequence.computed + at + 1], top))
        self._note_scores()
        return rows[scored:]

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar says which tokens may come."""
        return self._constraint is not None

    @property
    def goes_on(self) -> bool:
        """Whether the answer goes on after the next token, and needs only that token for it.

        The token itself may still end it (an end of turn, the end of a stop string or of what a grammar allows), or a
        grammar may force others after it.
        """
        request, stream = self.request, self.writer.stream
        return (
            self.finish_reason is None
            and not (stream.cancelled or stream.full)
            and self.tokens_left > 1
            and len(self.sequence.tokens) + 1 < self.context
            and request.time_limit_s is None
        )

    def begin(self, row: NDArray[np.float32] | None) -> int | None:
        """The operation that chooses the first token of `sample`, to be run before it; None where more is needed.

        row: the first one of `sample`; None if it comes later, see Sampler.begin. Raises RequestError.
        """
        if self.finish_reason or self.request.max_tokens == 0:
            return None
        return self._sampler.begin(row, *self._may_come())

    def sample(self, rows: NDArray[np.float32], drafts: Sequence[int]) -> int:
        """Sample from each row in turn, until a sampled token differs from the draft.

        rows: the logits of the last token and of the drafts after it. Returns the number of accepted drafts. A draft
        has probability 1, and then the rejection rule of Leviathan et al. is to keep the target's own sample and
        continue only if it equals the draft. So for each seed the answer is the same as without speculation. Raises
        LogitsError, RequestError, and any other error of this generation.
        """
        if self.request.max_tokens == 0:
            self.finish_reason = FinishReason.LENGTH
            return 0
        if not drafts:
            self._sample(rows[0])
            return 0
        start = len(self.sequence.tokens)
        came: list[int] = []
        while not self.finish_reason and len(came) <= len(drafts) and came == list(drafts[: len(came)]):
            self._sample(rows[len(came)])
            came = self.sequence.tokens[start:]
        accepted = common_prefix(came, drafts)
        self.speculation.verified(len(drafts), accepted)
        return accepted

    def roll_if_full(self) -> list[int] | None:
        """Under ContextPolicy.ROLLING, the tokens to keep of a full window; None while there is room.

        The caller discards the runner's sequence, whose KV is no longer valid, before `sequence.replace`.
        """
        tokens = self.sequence.tokens
        if self.request.context_policy is not ContextPolicy.ROLLING or len(tokens) < self.context:
            return None
        kept = roll(tokens, self.context, kept_first(self.request))
        self._rolled += len(tokens) - len(kept)
        self.speculation.restart(kept)
        return kept

    def end(self, reason: FinishReason) -> None:
        """End for a reason other than an error. No effect if the generation has ended."""
        self.finish_reason = self.finish_reason or reason

    def fail(self, error: Exception) -> None:
        """End with an error, which the last event reports. Logs it unless it is a LocalLLMError."""
        self.finish_reason, self._error = FinishReason.ERROR, error
        if isinstance(error, LocalLLMError):
            log.debug("A generation failed", exc_info=error)
        else:
            log.error("A generation failed with an unexpected error", exc_info=error)

    def abort(self, reason: FinishReason, error: Exception | None) -> None:
        """End now, for an external reason, and send the final event."""
        self.finish_reason, self._error = reason, error
        self.finish()

    def send_progress(self, queue_position: int) -> None:
        """Send the request's progress until its first token."""
        if self.writer.first_token is None:
            sequence = self.sequence
            self.writer.send_progress(Progress(queue_position, sequence.computed, len(sequence.tokens)), self.counts)

    def add_text(self) -> bool:
        """Add what was generated since the last event to the stream, if some of its text is certain; whether it is."""
        return self.finish_reason is None and self.writer.add_text(self.counts)

    def view(self, waiting: bool) -> RequestView:
        """The request as the inspector shows it."""
        counts, sequence = self.counts, self.sequence
        return RequestView(
            tokens=len(sequence.tokens),
            computed=sequence.computed,
            cached=counts.cached,
            generated=counts.generated,
            waiting=waiting,
            background=self.request.background,
        )

    def finish(self) -> None:
        """Send the final event; finish_reason must be set."""
        assert self.finish_reason is not None
        self.timeline.end(self.writer.came + self.writer.age, self.counts.cached, self.generated)
        error = self._error
        text = None if error is None else str(error)
        if error is not None and not isinstance(error, LocalLLMError):
            text = f"{type(error).__name__}: {error}. This is a bug in localllm; its log shows where."
        if error is not None:
            _remove_frames(error)
        self.writer.send_last(self.counts, self.finish_reason, self._sampler.seed, text, error)

    def _note_scores(self) -> None:
        """Limit reuse of a known prefix to rows already scored; once all are, send the scores with the next event."""
        complete = len(self._scores) == len(self._prompt.tokens) - 1
        self.sequence.reusable = None if complete else len(self._scores)
        if complete:
            self.writer.prompt_scored(self._scores)

    def _sample(self, row: NDArray[np.float32]) -> None:
        """Sample a token; append it and the tokens that the constraint forces after it."""
        token_id, logprob = self._sampler.sample(row, *self._may_come())
        self.writer.sampled()
        self._take(token_id, logprob)
        if self._constraint:
            self._take_forced()

    def _may_come(self) -> tuple[NDArray[np.bool_] | None, NDArray[np.intp] | None]:
        """What the constraint allows next; without one, the tokens that are banned because they end the answer."""
        allowed = self._constraint.mask() if self._constraint else None
        goes_on = self.request.ignore_eos or self.generated < self.request.min_tokens
        return allowed, self._eog if allowed is None and goes_on else None

    @property
    def _line_limit_reached(self) -> bool:
        limit = self.request.line_limit_s
        return limit is not None and self.writer.timings().decode_s >= limit

    def _take_forced(self) -> None:
        """Append the tokens that the constraint forces, which need no logits.

        They are sampled like all others if log-probabilities are requested, or mirostat must learn from every choice;
        so is the token that fills the context.
        """
        sampling = self.request.sampling
        if self._constraint is None or sampling.logprobs is not None or sampling.mirostat or self.tokens_left <= 0:
            return
        for token_id in self._constraint.forced_tokens() if self.finish_reason is None else []:
            if self.finish_reason or len(self.sequence.tokens) + 1 >= self.context:
                return
            if token_id >= self._sampler.vocab_size:
                raise RequestError(f"The constraint needs token {token_id}, which the model does not have.")
            self._take(token_id, None)

    def _take(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Append a token to the history, the text and the constraint; end the answer if the token ends it."""
        self._sampler.accept(token_id)
        self.sequence.tokens.append(token_id)
        if self._speculation:
            self._speculation.token(token_id)
        self.generated += 1
        if token_id in self._vocabulary.eog_ids:
            self.writer.token(token_id, b"", None if self.request.prompt_logprobs is None else logprob)
            self.finish_reason = FinishReason.STOP
            return
        data = self._vocabulary.token_bytes(token_id)
        self.writer.token(token_id, data, logprob)
        if self._constraint:
            self._constraint.accept(token_id)
        if self.writer.stopped or (self._constraint and self._constraint.is_finished):
            self.finish_reason = FinishReason.STOP
        elif self.tokens_left <= 0 or (b"\n" in data and self._line_limit_reached):
            self.finish_reason = FinishReason.LENGTH


def _remove_frames(error: BaseException) -> None:
    """Remove an error's tracebacks: their frames would keep the runner in memory while someone keeps the answer."""
    chain: list[BaseException | None] = [error]
    while chain:
        if (one := chain.pop()) is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            chain += one.__cause__, one.__context__
