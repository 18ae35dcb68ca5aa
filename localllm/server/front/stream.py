"""Answers of a server elsewhere as the events of a generation, on a thread for each answer."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from localllm.engine.answer_parts import AnswerPart
from localllm.engine.request import FinishReason, TokenEvent, TokenLogprob
from localllm.engine.stream import GenerationStream
from localllm.remote.errors import RemoteError
from localllm.remote.logprobs import SpeltLogprob
from localllm.remote.server import RemoteAnswer, RemoteUpdate


@dataclass(frozen=True, slots=True)
class PartsEvent(TokenEvent):
    """An event whose text a server has told apart already; `text` stays empty."""

    parts: tuple[AnswerPart, ...] = ()


class Spellings:
    """Numbers for tokens that are known by their text alone. Stands where a tokenizer would. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[bytes, int] = {}
        self._spellings: list[bytes] = []

    def number(self, spelling: bytes) -> int:
        """The number of a spelling, a new one where it is new. There are as many as the server's model has tokens."""
        with self._lock:
            found = self._numbers.setdefault(spelling, len(self._spellings))
            if found == len(self._spellings):
                self._spellings.append(spelling)
            return found

    def token_bytes(self, number: int) -> bytes:
        """The spelling of a number."""
        return self._spellings[number]


class Reading:
    """One answer on its way into a stream. opened tells when the server has accepted, or raises its RemoteError.

    rivals: how many other tokens are told at most beside each one, whatever the server tells.
    """

    def __init__(self, answer: RemoteAnswer, spellings: Spellings, rivals: int = 0) -> None:
        self.opened: Future[None] = Future()
        self.opened.set_running_or_notify_cancel()  # who waits for it and leaves does not take it back
        self._answer = answer
        self._spellings = spellings
        self._rivals = rivals
        self._room = threading.Event()
        self.stream = GenerationStream(self._wake)
        threading.Thread(target=self._read, name="remote answer", daemon=True).start()

    def _wake(self) -> None:
        """The stream's reader has made room, or has cancelled."""
        if self.stream.cancelled:
            self._answer.cancel()
        self._room.set()

    def _read(self) -> None:
        try:
            self._answer.open()
        except RemoteError as error:
            self.stream.push(TokenEvent(finish_reason=FinishReason.ERROR, error=str(error)))
            self.opened.set_exception(error)
            return
        self.opened.set_result(None)
        for update in self._answer:
            # The server is paused by its own full socket.
            while self.stream.full and not self.stream.cancelled:
                self._room.wait()
                self._room.clear()
            self.stream.push(_event(update, self._spellings.number, self._rivals))


def _event(update: RemoteUpdate, number: Callable[[bytes], int], most: int) -> PartsEvent:
    def numbered(told: SpeltLogprob) -> TokenLogprob:
        rivals = tuple((number(spelling), value) for spelling, value in told.top[:most])
        return TokenLogprob(number(told.spelling), told.logprob, rivals)

    return PartsEvent(
        logprobs=tuple(map(numbered, update.logprobs)),
        counts=update.counts,
        timings=update.timings,
        finish_reason=update.finish_reason,
        error=update.error,
        parts=update.parts,
    )
