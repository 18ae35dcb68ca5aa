"""A remote answer as a stream of events, read on a separate thread."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.answer.event import AnswerEvent, AnswerPart, Logprob
from localllm.engine.request import Counts, FinishReason, Progress, Timings
from localllm.engine.stream import EventStream
from localllm.remote.connection import Endpoint, RemoteCall, RemoteError

log = logging.getLogger(__name__)

NO_REASON = (
    "The server ended the answer without a reason. Its log may say more; perhaps the prompt exceeds its context."
)


@dataclass(slots=True)
class RemoteMeter:
    """Counts and times of an answer, measured by the client until the server sends its own."""

    began: float
    first: float = 0.0
    counts: Counts = field(default_factory=Counts)

    def piece(self) -> None:
        """Count a piece of the answer; servers send about one per token."""
        self.first = self.first or time.monotonic()
        self.counts = replace(self.counts, generated=self.counts.generated + 1)

    @property
    def timings(self) -> Timings:
        """The current times."""
        now = time.monotonic()
        first = self.first or now
        return Timings(
            prefill_s=first - self.began,
            decode_s=now - first,
            ttft_s=first - self.began if self.first else 0.0,
        )

    def event(
        self,
        parts: tuple[AnswerPart, ...] = (),
        logprobs: tuple[Logprob, ...] = (),
        progress: Progress | None = None,
        finish_reason: FinishReason | None = None,
    ) -> AnswerEvent:
        """An event with the current counts and times."""
        return AnswerEvent(parts, self.counts, self.timings, progress, logprobs, finish_reason=finish_reason)


# Reads an answer: yields its events, the last one with a finish_reason. Raises RemoteError; and TypeError, ValueError,
# KeyError, AttributeError or RecursionError if the server does not follow its protocol.
Reader = Callable[[RemoteCall, RemoteMeter], Iterator[AnswerEvent]]


@dataclass(frozen=True, slots=True)
class RemotePrompt:
    """A request's body for a route of a server. Implements Prompt."""

    endpoint: Endpoint
    route: str
    body: Mapping[str, Any]
    read: Reader
    tokens: None = None
    text: None = None
    pictures: tuple[()] = ()

    def submit(self, choice: int = 0) -> "RemoteStream":
        """See Prompt. Does not block; the stream reports a refusal."""
        body = {**self.body, "seed": self.body["seed"] + choice} if choice and "seed" in self.body else self.body
        return RemoteStream(RemoteCall(self.endpoint, "POST", self.route, body), self.read)


class RemoteStream(EventStream[AnswerEvent]):
    """Sends a request and reads its answer. Implements AnswerStream; the protocols cancel by closing the connection."""

    def __init__(self, call: RemoteCall, read: Reader) -> None:
        self._room = threading.Event()  # set when the reader has taken events from a full stream, or cancels
        super().__init__(self._room.set, self._leave)
        self.accepted: Future[None] = Future()
        self.accepted.set_running_or_notify_cancel()  # cancelling a waiter must not cancel it
        self._call = call
        self._reader = read
        threading.Thread(target=self._run, name="remote answer", daemon=True).start()

    def _leave(self) -> None:
        """Called when the answer is cancelled."""
        self._call.cancel()
        self._room.set()

    def _run(self) -> None:
        meter = RemoteMeter(time.monotonic())
        failure: Exception
        try:
            self._call.open()
            self.accepted.set_result(None)
            for event in self._reader(self._call, meter):
                self._push_with_room(event)
                if event.finish_reason is not None:
                    return
            failure = RemoteError(NO_REASON)
        except RemoteError as error:
            failure = error
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            failure = RemoteError(f"The server does not follow its protocol: {error!r}.")
        except Exception as error:
            log.exception("reading a server's answer failed")
            failure = error
        finally:
            self._call.close()
        if self.cancelled:
            self._push_with_room(meter.event(finish_reason=FinishReason.CANCELLED))
        else:
            last = meter.event(finish_reason=FinishReason.ERROR)
            self._push_with_room(replace(last, error=str(failure), cause=failure))
        if not self.accepted.done():
            self.accepted.set_exception(failure)

    def _push_with_room(self, event: AnswerEvent) -> None:
        """Add an event. While the stream is full, wait: the socket fills up, and the server gets back-pressure."""
        while self.full and not self.cancelled:
            self._room.wait()
            self._room.clear()
        self.push(event)


def read_logprobs(entries: Iterable[Mapping[str, Any]], most: int) -> tuple[Logprob, ...]:
    """Log-probabilities in the format of Ollama and of OpenAI's chats. most: alternatives for each.

    https://platform.openai.com/docs/api-reference/chat/object
    """
    found = []
    for entry in entries:
        top = [(_spelling(other), float(other["logprob"])) for other in entry.get("top_logprobs") or ()]
        found.append(Logprob(_spelling(entry), float(entry["logprob"]), tuple(top[:most])))
    return tuple(found)


def _spelling(entry: Mapping[str, Any]) -> bytes:
    """A token's bytes, which may be invalid UTF-8; some servers leave them out."""
    data = entry.get("bytes")
    if isinstance(data, str):  # of mistral.rs's alternatives, whose token is an id
        return data.encode()
    return bytes(data) if data is not None else str(entry["token"]).encode()
