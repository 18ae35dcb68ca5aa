"""Draws and saves a streaming answer at a fixed rate, independent of the token rate."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from textual.message import Message

from localllm.answer.event import AnswerEvent, AnswerStream, merged
from localllm.answer.request import AnswerRequest
from localllm.engine.request import FinishReason
from localllm.text import harmless
from tui.backend import Backend
from tui.background import in_thread
from tui.conversation import Conversation
from tui.sessions.database import SessionError
from tui.status import Latency, SpeedMeter, Status

if TYPE_CHECKING:
    from tui.widgets.messages import AnswerView

FLUSH_S = 1 / 25
SAVE_EVERY_S = 1.0
MOST_TITLE_WORDS = 8  # the prompt asks for five
POLL_S = 0.1  # for an answer that is not displayed


class Answered(Message):
    """An answer has ended for any reason. title: the conversation's title."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title


async def follow(
    answer: AnswerStream,
    view: "AnswerView",
    conversation: Conversation,
    status: Status,
    latency: Latency,
    changed: Callable[[], None],
) -> AnswerEvent:
    """Draw and save an answer until it ends; returns the last event. changed: called after each status change."""
    meter, saved = SpeedMeter(), time.monotonic()
    while True:
        if events := answer.poll():
            event = merged(events)
            status.counts, status.timings, status.progress = event.counts, event.timings, event.progress
            status.speed = meter.observe(event)
            latency.observe(event)
            changed()
            await view.add(event.parts)
            if event.finish_reason is not None:
                return event
        if time.monotonic() - saved > SAVE_EVERY_S:
            # A busy database is retried later; the final save reports errors.
            with contextlib.suppress(SessionError):
                conversation.save(view.message)
            saved = time.monotonic()
        await asyncio.sleep(FLUSH_S)


async def make_title(conversation: Conversation, backend: Backend) -> None:
    """Ask the model to title an untitled conversation. Discards a title that is too long. Raises LocalLLMError."""
    request, session_id = conversation.title_request(), conversation.session_id
    if request is None or session_id is None:
        return
    whole = await whole_answer(backend, request)
    title = " ".join(harmless(whole.content).split()).strip("\"'*#.")[:60]
    named = conversation.store.summary(session_id).titled  # by the user, meanwhile
    if not named and whole.finish_reason == FinishReason.STOP and 0 < len(title.split()) <= MOST_TITLE_WORDS:
        conversation.store.rename(session_id, title)


async def whole_answer(backend: Backend, request: AnswerRequest, stop: threading.Event | None = None) -> AnswerEvent:
    """Run a request to its end without displaying it. Raises LocalLLMError.

    Setting `stop`, or cancelling the awaiting task, cancels the request.
    """
    left, answers = threading.Event(), list[AnswerStream]()

    def submit() -> AnswerStream:
        answers.append(backend.submit(request))
        if left.is_set():  # the task was cancelled meanwhile
            answers[0].cancel()
        return answers[0]

    try:
        answer = await in_thread(submit)
        events = answer.poll()
        while not (events and events[-1].finish_reason is not None):
            if stop is not None and stop.is_set():
                answer.cancel()
            await asyncio.sleep(POLL_S)
            events += answer.poll()
        return merged(events)
    finally:
        left.set()
        for answer in answers:
            answer.cancel()


def note_end(view: "AnswerView", last: AnswerEvent, unseen: Sequence[str] = ()) -> None:
    """Record in the message how the answer ended and its statistics. unseen: names of pictures that were not sent."""
    counts, timings = last.counts, last.timings
    decoded = counts.generated - 1
    message = view.message
    message.finish_reason = last.finish_reason
    message.error = last.error if last.finish_reason is FinishReason.ERROR else None
    message.stats = {
        "prompt": counts.prompt,
        "cached": counts.cached,
        "generated": counts.generated,
        "ttft_s": timings.ttft_s,
        "prefill_s": timings.prefill_s,
        "decode_s": timings.decode_s,
        "speed": decoded / timings.decode_s if decoded > 0 and timings.decode_s > 0 else 0.0,
        "seed": last.seed,
        "unseen": list(unseen),
    }
