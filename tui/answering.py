"""Answers that are not displayed: titles and summaries."""

import asyncio
import threading

from localllm.answer.event import AnswerEvent, AnswerStream, merged
from localllm.answer.request import AnswerRequest
from localllm.engine.request import FinishReason
from localllm.text import harmless
from tui.backend import Backend
from tui.background import in_thread
from tui.conversation import Conversation

MOST_TITLE_WORDS = 8  # the prompt asks for five
POLL_S = 0.1


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
