"""Turns a generation's tokens into an answer's events."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from gguf_io.media import View, told_lines
from localllm.answer.event import AnswerEvent, AnswerPart, Logprob, PartKind
from localllm.answer.splitter import Splitter
from localllm.engine.request import FinishReason, TokenEvent
from localllm.engine.stream import GenerationStream, joined

_ACCEPTED: "Future[None]" = Future()
_ACCEPTED.set_result(None)


class LocalStream:
    """A generation's events with their text split into parts. Implements AnswerStream."""

    accepted = _ACCEPTED

    def __init__(
        self,
        stream: GenerationStream,
        splitter: Splitter | None,
        token_bytes: Callable[[int], bytes],
        one_call: bool = False,
        pictures: tuple[View, ...] = (),
        warnings: tuple[str, ...] = (),
    ) -> None:
        """splitter: None if all text is content. one_call: end with the first tool call. pictures, warnings: of the
        prompt.
        """
        self._pictures = pictures
        told = (f"{name} {view.warning}" for name, view in told_lines(pictures) if view.warning)
        self._warnings = (*warnings, *told)
        self._stream = stream
        self._one_call = one_call
        self._begun = False  # whether a call has begun
        self._called = False  # whether the answer was ended by its first call
        self._splitter = splitter
        self._token_bytes = token_bytes

    def cancel(self) -> None:
        self._stream.cancel()

    def poll(self) -> list[AnswerEvent]:
        return [self._event(event) for event in self._stream.poll()]

    def __iter__(self) -> Iterator[AnswerEvent]:
        return map(self._event, self._stream)

    async def __aiter__(self) -> AsyncGenerator[AnswerEvent, None]:
        async with contextlib.aclosing(self._stream.portions()) as portions:
            async for events in portions:
                for event in joined(events):
                    yield self._event(event)

    def _event(self, event: TokenEvent) -> AnswerEvent:
        parts = self._up_to_call(self._parts(event)) if self._one_call else self._parts(event)
        ended_here = self._called and event.finish_reason is FinishReason.CANCELLED
        return AnswerEvent(
            parts,
            event.counts,
            event.timings,
            event.progress,
            tuple(map(self._logprob, event.logprobs)) if event.logprobs else (),
            event.token_ids,
            FinishReason.STOP if ended_here else event.finish_reason,
            event.error,
            event.cause,
            event.seed,
            event.stop_string,
            self._pictures if event.finish_reason else (),
            self._warnings if event.finish_reason else (),
            prompt_logprobs=None if event.prompt_logprobs is None else tuple(map(self._logprob, event.prompt_logprobs)),
        )

    def _parts(self, event: TokenEvent) -> tuple[AnswerPart, ...]:
        if self._splitter is None:
            return (AnswerPart(PartKind.CONTENT, event.text),) if event.text else ()
        parts = self._splitter.push(event.text) if event.text else []
        if event.finish_reason is not None:
            parts += self._splitter.flush()
        return tuple(parts)

    def _up_to_call(self, parts: tuple[AnswerPart, ...]) -> tuple[AnswerPart, ...]:
        """The parts up to the first tool call of the answer, which ends it."""
        if self._called:
            return ()
        found: list[AnswerPart] = []
        for part in parts:
            first = _first_call(part, self._begun)
            self._begun = self._begun or bool(first.deltas)
            found.append(first)
            if first.tool_calls:
                self._called = True
                self._stream.cancel()
                break
        return tuple(found)

    def _logprob(self, entry: Any) -> Logprob:
        spell = self._token_bytes
        ids = (entry.token_id, *(token for token, _ in entry.top))
        top = tuple((spell(token), value) for token, value in entry.top)
        return Logprob(spell(entry.token_id), entry.logprob, top, ids)


def _first_call(part: AnswerPart, begun: bool) -> AnswerPart:
    """A part without its pieces of calls after the first. begun: whether the first began in an earlier part."""
    names = [at for at, delta in enumerate(part.deltas) if delta.name][0 if begun else 1 :]
    return replace(part, tool_calls=part.tool_calls[:1], deltas=part.deltas[: names[0]] if names else part.deltas)
