"""What the reader of one generation gets: text as it becomes certain, progress, counts and timings."""

from collections.abc import Callable

from localllm.engine.detokenizer import Detokenizer
from localllm.engine.request import Counts, FinishReason, Progress, Timings, TokenEvent, TokenLogprob
from localllm.engine.stream import GenerationStream


class EventWriter:
    """Makes the events of one generation and pushes them to its stream. stop: the request's stop strings.

    It is made when the request comes, at `came`; clock gives seconds.
    """

    def __init__(self, stream: GenerationStream, stop: tuple[str, ...], clock: Callable[[], float]) -> None:
        self.stream = stream
        self._clock = clock
        self.came = clock()
        self._admitted: float | None = None
        self._first_token: float | None = None
        self._detokenizer = Detokenizer(stop)
        self._token_ids: list[int] = []  # not sent yet, as the next two
        self._logprobs: list[tuple[int, TokenLogprob]] = []  # by where in the text their tokens begin
        self._text = ""
        self._certain = 0  # characters of text that are certain
        self._progress: Progress | None = None

    @property
    def age(self) -> float:
        """Seconds since the request came."""
        return self._clock() - self.came

    @property
    def has_token(self) -> bool:
        """Whether a token was sampled, which ends the reports of progress."""
        return self._first_token is not None

    @property
    def stopped(self) -> bool:
        """Whether the text has come to a stop string."""
        return self._detokenizer.stopped is not None

    def admitted(self) -> None:
        """Note that the request has begun to run."""
        if self._admitted is None:
            self._admitted = self._clock()

    def sampled(self) -> None:
        """Note that a token was sampled: the first one ends the prefill."""
        if self._first_token is None:
            self._first_token = self._clock()

    def token(self, token_id: int, data: bytes, logprob: TokenLogprob | None) -> None:
        """Add a token with its bytes; those of a token that ends the generation are left out."""
        self._token_ids.append(token_id)
        if logprob:
            self._logprobs.append((self._certain + self._detokenizer.held, logprob))
        self._add(self._detokenizer.push(data))

    def send_progress(self, progress: Progress, counts: Counts) -> None:
        """Send how far the request has come before its first token, where that has changed."""
        if progress != self._progress:
            self._progress = progress
            self.stream.push(TokenEvent(counts=counts, timings=self.timings(), progress=progress))

    def send_text(self, counts: Counts) -> None:
        """Send what came since the last event, if some of its text is certain."""
        if self._text:
            self.stream.push(self._event(counts, self._certain))

    def send_last(
        self, counts: Counts, finish_reason: FinishReason, seed: int, error: str | None, cause: Exception | None
    ) -> None:
        """Send the final event."""
        self._add(self._detokenizer.flush())
        stopped = self._detokenizer.stopped
        # The log-probabilities of what ends in nothing, such as the first byte of a character, come at the end.
        event = self._event(counts, self._certain if stopped else self._certain + 1)
        self.stream.push(
            TokenEvent(
                event.text,
                event.token_ids,
                event.logprobs,
                counts,
                event.timings,
                finish_reason=finish_reason,
                seed=seed,
                error=error,
                cause=cause,
                stop_string=stopped,
            )
        )

    def timings(self) -> Timings:
        """How long each phase has taken so far."""
        now = self._clock()
        admitted = now if self._admitted is None else self._admitted
        first = now if self._first_token is None else self._first_token
        return Timings(
            queue_s=admitted - self.came,
            prefill_s=first - admitted,
            decode_s=now - first,
            ttft_s=0.0 if self._first_token is None else first - self.came,
        )

    def _add(self, text: str) -> None:
        self._text += text
        self._certain += len(text)

    def _event(self, counts: Counts, certain: int) -> TokenEvent:
        """All that is not sent yet, with the log-probabilities of tokens that begin before `certain`."""
        logprobs = tuple(logprob for begins, logprob in self._logprobs if begins < certain)
        del self._logprobs[: len(logprobs)]
        event = TokenEvent(self._text, tuple(self._token_ids), logprobs, counts, self.timings())
        self._text = ""
        self._token_ids.clear()
        return event
