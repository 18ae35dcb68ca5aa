"""Answers that are not displayed: titles and summaries."""

import threading
import time

from localllm.answer.event import AnswerEvent, merged
from localllm.answer.request import AnswerRequest
from localllm.background import in_thread
from localllm.chats.conversation import Conversation
from localllm.engine.request import FinishReason
from localllm.errors import RequestError
from tui.backend import Backend

POLL_S = 0.1


async def make_title(conversation: Conversation, backend: Backend) -> None:
    """Ask the model to title an untitled conversation. Discards a title that is too long. Raises LocalLLMError."""
    request, session_id = conversation.title_request(), conversation.session_id
    if request is None or session_id is None:
        return
    whole = await whole_answer(backend, request)
    if whole.finish_reason == FinishReason.STOP:
        conversation.take_title(session_id, whole.content)


async def summarise(conversation: Conversation, backend: Backend, sees: bool, stop: threading.Event) -> bool:
    """Replace the oldest turns in requests by the model's own summary; False if stopped. Raises LocalLLMError."""
    message, request = conversation.compaction(sees)
    whole = await whole_answer(backend, request, stop)
    if whole.finish_reason is FinishReason.CANCELLED:
        return False
    summary = whole.content.strip()
    if whole.finish_reason is FinishReason.ERROR or not summary:
        raise RequestError(f"There is no summary: {whole.error or 'the model wrote nothing'}. Nothing was changed.")
    conversation.set_summary(message, summary)
    return True


async def whole_answer(backend: Backend, request: AnswerRequest, stop: threading.Event | None = None) -> AnswerEvent:
    """Run a request to its end without displaying it. Raises LocalLLMError.

    Setting `stop`, or cancelling the awaiting task, cancels the request.
    """
    left = threading.Event()

    def work() -> AnswerEvent:
        answer, events = backend.submit(request), list[AnswerEvent]()
        while not (events and events[-1].finish_reason is not None):
            if left.is_set() or (stop is not None and stop.is_set()):
                answer.cancel()
            time.sleep(POLL_S)
            events += answer.poll()
        return merged(events)

    try:
        return await in_thread(work)
    finally:
        left.set()
