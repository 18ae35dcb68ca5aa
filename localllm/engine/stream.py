"""The stream of one generation's events from the engine's thread to its reader, and its writer."""

import codecs
import contextlib
import math
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from gguf_io.system import next_of
from localllm.engine.request import Counts, FinishReason, Progress, StopScope, Timings, TokenEvent, TokenLogprob

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Event

CAPACITY = 256


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer, folded from a stream's events. last: the final event, with counts, timings and finish reason.

    prompt_logprobs: see TokenEvent.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    last: TokenEvent
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


def _nothing() -> None:
    """What a stream that has ended calls in place of its engine."""


class StreamedEvent(Protocol):
    """The attributes of an event that a stream reads."""

    @property
    def progress(self) -> object: ...

    @property
    def finish_reason(self) -> object: ...


EventT = TypeVar("EventT", bound=StreamedEvent)


class _Bell:
    """Sets events of one asyncio loop from other threads; those of many streams wake the loop once."""

    def __init__(self) -> None:
        self._due: deque[Event] = deque()
        self._rung = False

    def ring(self, loop: "AbstractEventLoop", arrived: "Event") -> None:
        self._due.append(arrived)
        if not self._rung:
            self._rung = True
            with contextlib.suppress(RuntimeError):  # the loop may have closed since
                loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._rung = False  # first, so that what is added from now on rings again
        while self._due:
            self._due.popleft().set()


_BELLS: "WeakKeyDictionary[AbstractEventLoop, _Bell]" = WeakKeyDictionary()


class EventStream(Generic[EventT]):
    """Events of one request, in order, ending with the one that has a finish_reason.

    Read it from one place: `for event in stream`, `async for event in stream` or `poll()` after a listener's call.
    Back-pressure: a reader CAPACITY events behind pauses its own request's generation until it catches up.
    Leaving an `async for` early cancels, leaving a `for` does not; `cancel()` does, from any thread. Reading after the
    end gives nothing.
    cancelled: whether `cancel` was called. full: whether the reader is so far behind that generation must pause.
    """

    def __init__(self, wake_engine: Callable[[], None], interrupt: Callable[[], None] | None = None) -> None:
        """Both are called on the reader's thread: wake_engine after a full stream was read, interrupt on cancel."""
        self._wake_engine = wake_engine
        self._interrupt = interrupt or wake_engine
        self._lock = threading.Lock()
        self._bell: SimpleQueue[None] = SimpleQueue()  # wakes a waiting reader; a condition takes far longer
        self._waiting = False
        self._events: deque[EventT] = deque()
        self._listener: Callable[[], None] | None = None
        self.cancelled = self.full = self._finished = False

    def cancel(self) -> None:
        """Ask the engine to stop, whether the request waits, prefills or decodes. The last event still comes."""
        self.cancelled = True
        if not self._finished:
            self._interrupt()

    def push(self, event: EventT) -> None:
        """Add an event and tell the reader; the engine's thread only."""
        self.add(event)
        self.tell()

    def add(self, event: EventT) -> None:
        """Add an event, of which `tell` tells the reader. Newer progress replaces unread progress."""
        with self._lock:
            if event.progress and self._events and self._events[-1].progress:
                self._events.pop()
            self._events.append(event)
            self.full = len(self._events) >= CAPACITY
            self._finished = event.finish_reason is not None
            if self._finished:  # whoever keeps the answer's stream must not keep the engine, and its model
                self._wake_engine = self._interrupt = _nothing

    def tell(self) -> None:
        """Wake the reader after events were added."""
        if self._waiting:
            self._waiting = False
            self._bell.put(None)
        if listener := self._listener:
            listener()

    def set_listener(self, listener: Callable[[], None] | None) -> None:
        """Call `listener` on the engine's thread after new events, and now if events wait.

        It must return at once and not raise.
        """
        with self._lock:
            self._listener = listener
            waiting = bool(self._events)
        if listener and waiting:
            listener()

    def poll(self) -> list[EventT]:
        """Return the events since the last read, without waiting."""
        with self._lock:
            was_full, self.full = self.full, False
            events = list(self._events)
            self._events.clear()
        if was_full:
            self._wake_engine()
        return events

    def __iter__(self) -> Iterator[EventT]:
        while True:
            with self._lock:
                waits = self._waiting = not (self._events or self._finished)
            if waits:
                next_of(self._bell)
            yield from self.poll()
            if self._finished and not self._events:
                return

    async def __aiter__(self) -> AsyncGenerator[EventT, None]:
        """Iterate without a thread. A task that is cancelled while it waits cancels the generation."""
        async with contextlib.aclosing(self.portions()) as portions:
            async for events in portions:
                for event in events:
                    yield event

    async def portions(self) -> AsyncGenerator[list[EventT], None]:
        """Iterate over what has come since the portion before, else as `async for` does."""
        import asyncio  # a slow import, which streaming without a loop does not need

        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        self.set_listener(partial(_BELLS.setdefault(loop, _Bell()).ring, loop, arrived))
        try:
            while not self._finished or self._events:
                await arrived.wait()
                arrived.clear()
                if events := self.poll():
                    yield events
        finally:
            self.set_listener(None)
            if not self._finished:
                self.cancel()

    def collect(self: "GenerationStream") -> Completion:
        """Wait for the end and return the whole answer."""
        return fold(iter(self))


GenerationStream = EventStream[TokenEvent]


def fold(events: Iterator[TokenEvent]) -> Completion:
    """Join events into one answer."""
    text: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    scores: tuple[TokenLogprob, ...] | None = None
    last = TokenEvent(finish_reason=FinishReason.ERROR, error="the stream ended without its last event")
    for last in events:
        text.append(last.text)
        token_ids += last.token_ids
        logprobs += last.logprobs
        scores = scores if last.prompt_logprobs is None else last.prompt_logprobs
    return Completion("".join(text), tuple(token_ids), tuple(logprobs), last, scores)


def joined(events: Sequence[TokenEvent]) -> list[TokenEvent]:
    """The events, those in a row that only add text as one: a reader who is behind has no more to do for several."""
    found: list[TokenEvent] = []
    for event in events:
        before = found[-1] if found else None
        if before and _only_adds_text(before) and _only_adds_text(event):
            found[-1] = replace(event, text=before.text + event.text, token_ids=before.token_ids + event.token_ids)
        else:
            found.append(event)
    return found


def _only_adds_text(event: TokenEvent) -> bool:
    return not (event.logprobs or event.progress or event.finish_reason) and event.prompt_logprobs is None


class Detokenizer:
    """Decodes the bytes of one generation's tokens to text, piece by piece.

    The pieces joined are the text of all tokens, cut before the first stop string. Bytes that are not UTF-8 become
    U+FFFD; a character that the end cuts is left out. stopped is the stop string that was found, None until then.
    """

    def __init__(
        self,
        stop: Sequence[str] = (),
        scope: StopScope | None = None,
        ends: Sequence[str] = (),
        least_indent: int = 0,
    ) -> None:
        """stop: stop strings within the scope, everywhere if that is None. ends: stop strings everywhere.

        least_indent: a later line with less indentation stops the text too; stopped is its beginning, with the break.
        """
        self._stops = [_StopString(text) for text in stop]
        self._ends: list[_StopString | _ShallowLine] = [_StopString(text) for text in ends]
        if least_indent:
            self._ends.append(_ShallowLine(least_indent))
        self._scope = scope if stop else None
        self._undecided = 0  # characters at the end of the text whose scope is not known yet
        self._bytes = b""  # of an incomplete character
        self._held = ""
        self.stopped: str | None = None

    @property
    def held(self) -> int:
        """Number of complete characters held back."""
        return len(self._held)

    @property
    def may_stop(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stops or self._ends)

    def push(self, piece: bytes) -> str:
        """Add one token's bytes; return the text that is now certain. Sets `stopped` at a complete stop string."""
        return self._release(self._decode(piece))

    def flush(self) -> str:
        """Return the held text when the generation ends, because it can no longer become a stop string."""
        if self.stopped:
            return ""
        text = self._release("", final=True)
        text, self._held = text + self._held, ""
        return text

    def _decode(self, piece: bytes) -> str:
        piece = self._bytes + piece
        text, taken = codecs.utf_8_decode(piece, "replace", False)
        self._bytes = piece[taken:]
        return text

    def _release(self, fresh: str, final: bool = False) -> str:
        if not self.may_stop:
            return fresh
        text = self._held + fresh
        cuts = _cuts(self._ends, fresh, len(self._held))
        at = len(self._held) - self._undecided
        for piece, counts in self._scoped(fresh, text[at:], final):
            if counts:
                cuts += _cuts(self._stops, piece, at)
            else:
                for stop in self._stops:
                    stop.matched = 0
            at += len(piece)
        if cuts:
            at, self.stopped = min(cuts)
            self._held = ""
            return text[:at]
        self._undecided = len(text) - at
        begun = max((stop.matched for stop in self._stops), default=0)
        certain = len(text) - max(self._undecided + begun, *(end.matched for end in self._ends), 0)
        self._held = text[certain:]
        return text[:certain]

    def _scoped(self, fresh: str, undecided: str, final: bool) -> Sequence[tuple[str, bool]]:
        """The pieces of the undecided text, which ends with the fresh one, that are decided now; at the end, all."""
        if self._scope is None:
            return [(fresh, True)]
        found = self._scope.feed(fresh) if fresh else ()
        rest = undecided[sum(len(piece) for piece, _ in found) :]
        return [*found, (rest, True)] if final else found


def _cuts(stops: "Sequence[_StopString | _ShallowLine]", text: str, at: int) -> list[tuple[int, str]]:
    """Where the stop strings that the text completes begin, each with its text. at: the index of the text."""
    found = [(stop.feed(text), stop.text) for stop in stops]
    return [(at + end - len(name), name) for end, name in found if end is not None]


class _StopString:
    """Tracks how much of a stop string the text ends with, in linear time (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # For each prefix of the string: the length of its longest proper prefix that is also its suffix.
        self._shorter = [0] * len(text)
        length = 0
        for at in range(1, len(text)):
            while length and text[at] != text[length]:
                length = self._shorter[length - 1]
            length += text[at] == text[length]
            self._shorter[at] = length

    def feed(self, fresh: str) -> int | None:
        """Add text; return the index in it right after the first match, None if there is none."""
        text, matched = self.text, self.matched
        if not matched and text[0] not in fresh:
            return None
        for at, character in enumerate(fresh, start=1):
            while matched and text[matched] != character:
                matched = self._shorter[matched - 1]
            matched += text[matched] == character
            if matched == len(text):
                return at
        self.matched = matched
        return None


class _ShallowLine:
    """Finds a line after a line break that is indented by fewer than `least` spaces and tabs. Empty lines are none.

    text: the line break and what follows, as long as it may be such a line.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self.text = ""

    @property
    def matched(self) -> int:
        """How many characters at the end may be cut."""
        return len(self.text)

    def feed(self, fresh: str) -> int | None:
        """Add text; return the index in it right after the first character of such a line, None if there is none."""
        for at, character in enumerate(fresh, start=1):
            if character == "\n":
                self.text = character
            elif self.text:
                self.text += character
                if character not in " \t":
                    return at
                if len(self.text) > self._least:
                    self.text = ""
        return None


def beginning_at_end(text: str, markers: Sequence[str]) -> int:
    """Length of the text's longest suffix that is a proper prefix of one of the markers."""
    longest = max((len(marker) - 1 for marker in markers), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0


class EventWriter:
    """Creates the events of one generation and pushes them to its stream.

    Create it when the request arrives; `came` is that time. detokenizer: with the request's stop strings. clock: in
    seconds. first_token: when the first token was sampled, which ends progress reports; None until then. restore_s,
    drafting_s: see Timings.
    """

    def __init__(self, stream: GenerationStream, detokenizer: Detokenizer, clock: Callable[[], float]) -> None:
        self.stream = stream
        self._clock = clock
        self.came = clock()
        self._admitted: float | None = None
        self.first_token: float | None = None
        self.restore_s = 0.0
        self.drafting_s = 0.0
        self._detokenizer = detokenizer
        self._token_ids: list[int] = []  # not sent yet, like the next two
        self._logprobs: list[tuple[int, TokenLogprob]] = []  # with the index in the text where the token starts
        self._scores: tuple[TokenLogprob, ...] | None = None
        self._was_scored = False
        self._bytes: list[bytes] = []  # of tokens that are not decoded yet, because no stop string can end the text
        self._text = ""
        self._certain = 0  # number of certain characters of the whole text
        self._progress: Progress | None = None

    @property
    def age(self) -> float:
        """Seconds since the request arrived."""
        return self._clock() - self.came

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._detokenizer.stopped is not None

    def admitted(self) -> None:
        """Record that the request has started to run."""
        if self._admitted is None:
            self._admitted = self._clock()

    def sampled(self) -> None:
        """Record that a token was sampled; the first one ends the prefill."""
        if self.first_token is None:
            self.first_token = self._clock()

    def prompt_scored(self, scores: Iterable[TokenLogprob]) -> None:
        """Send the log-probabilities of the prompt's tokens after the first with the next event."""
        self._scores, self._was_scored = tuple(scores), True

    def token(self, token_id: int, data: bytes, logprob: TokenLogprob | None) -> None:
        """Add a token with its bytes, which are empty for a token that ends the generation.

        Without stop strings the bytes are decoded with the next event, so that this takes little time.
        """
        self._token_ids.append(token_id)
        if logprob:
            self._decode()
            self._logprobs.append((self._certain + self._detokenizer.held, logprob))
        self._bytes.append(data)
        if self._detokenizer.may_stop:
            self._decode()

    def send_progress(self, progress: Progress, counts: Counts) -> None:
        """Send the progress before the first token, if it has changed."""
        if progress != self._progress:
            self._progress = progress
            self.stream.push(TokenEvent(counts=counts, timings=self.timings(), progress=progress))

    def add_text(self, counts: Counts) -> bool:
        """Add to the stream what came since the last event, if it includes certain text; return whether it does."""
        self._decode()
        if self._text:
            self.stream.add(self._event(counts, self._certain))
            return True
        return False

    def send_last(
        self, counts: Counts, finish_reason: FinishReason, seed: int, error: str | None, cause: Exception | None
    ) -> None:
        """Send the final event."""
        self._decode()
        self._add(self._detokenizer.flush())
        stopped = self._detokenizer.stopped
        # Tokens that produced no text, such as an incomplete character, get their log-probabilities at the end; tokens
        # of a stop string get them only if the prompt's are sent too.
        event = self._event(counts, self._certain if stopped and not self._was_scored else math.inf)
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
                prompt_logprobs=event.prompt_logprobs,
            )
        )

    def timings(self) -> Timings:
        """Time spent in each phase so far."""
        now = self._clock()
        admitted = now if self._admitted is None else self._admitted
        first = now if self.first_token is None else self.first_token
        return Timings(
            queue_s=admitted - self.came,
            prefill_s=first - admitted,
            decode_s=now - first,
            ttft_s=0.0 if self.first_token is None else first - self.came,
            restore_s=self.restore_s,
            drafting_s=self.drafting_s,
        )

    def _decode(self) -> None:
        if self._bytes:
            self._add(self._detokenizer.push(b"".join(self._bytes)))
            self._bytes.clear()

    def _add(self, text: str) -> None:
        self._text += text
        self._certain += len(text)

    def _event(self, counts: Counts, certain: float) -> TokenEvent:
        """Everything not sent yet, with the log-probabilities of tokens that start before index `certain`."""
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._logprobs:
            logprobs = tuple(logprob for begins, logprob in self._logprobs if begins < certain)
            del self._logprobs[: len(logprobs)]
        ids = tuple(self._token_ids)
        event = TokenEvent(self._text, ids, logprobs, counts, self.timings(), prompt_logprobs=self._scores)
        self._text, self._scores = "", None
        self._token_ids.clear()
        return event
