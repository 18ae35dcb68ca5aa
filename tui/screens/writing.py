"""Requests one answer of the model, and draws and saves it at a fixed rate while it streams, however fast it is."""

import asyncio
import contextlib
import time
from typing import cast

from localllm.answer.event import AnswerEvent, AnswerStream, merged
from localllm.background import in_thread
from localllm.chats import Message
from localllm.chats.database import SessionError
from localllm.chats.ending import note_end
from localllm.engine.request import FinishReason
from localllm.errors import LocalLLMError, RequestError
from tui.backend import LoadedInfo, short_name
from tui.screens.chat_view import ChatView
from tui.screens.loading import FLUSH_S, ChatLoader
from tui.screens.tools import ChatTools
from tui.status import Latency, SpeedMeter
from tui.widgets.messages import AnswerView

SAVE_EVERY_S = 0.25
# Between two drawings of an answer. Within these limits, drawing takes at most this share of a core, because the same
# cores compute the answer.
DRAW_S = (0.1, 0.3)
DRAW_SHARE = 0.08


class AnswerWriter:
    """Writes the answers of one chat, one at a time."""

    def __init__(self, chat: ChatView, loader: ChatLoader, tools: ChatTools, latency: Latency) -> None:
        """latency: records the times of all answers."""
        self._chat, self._conversation, self._facts = chat, chat.conversation, chat.status_line.facts
        self._loader, self._tools, self._latency = loader, tools, latency
        self._answer: AnswerStream | None = None
        self._message: Message | None = None
        self._heard_at = 0.0  # when the running answer last produced data

    @property
    def silent_s(self) -> float:
        """Seconds since the running answer last produced data."""
        return time.monotonic() - self._heard_at

    def cancel(self) -> bool:
        """Cancel the running answer; False if there is none."""
        if self._answer:
            self._answer.cancel()
        return self._answer is not None

    async def write(self, view: AnswerView | None, tool_choice: str | None = None) -> Message | None:
        """Write an answer, or continue that of a view. Returns the saved answer, None if there is none."""
        chat, facts, conversation = self._chat, self._facts, self._conversation
        facts.answering, facts.speed, facts.progress = True, 0.0, None
        self._heard()
        chat.refresh_bindings()
        continues, before = view is not None, dict(view.message.stats) if view else {}
        try:
            if view is None:
                view = cast("AnswerView", await chat.transcript.append(conversation.begin_answer()))
            view.message.finish_reason = None
            self._message = view.message
            info = await self._model_loaded()
            unseen = () if info.sees else conversation.picture_names
            tools = await self._tools.offered(short_name(info.name), info.converses)
            request = conversation.request(continues, info.sees, tools, tool_choice)
            self._answer = await in_thread(lambda: chat.backend.submit(request))
            if chat.stopping.is_set():
                self._answer.cancel()
            last = await self._follow(self._answer, view)
            note_end(view.message, last, unseen, before, conversation.asked_pictures)
            facts.speed = view.message.stats["speed"]
        except LocalLLMError as error:
            if view is None:
                chat.show_error(str(error))
                return None
            view.message.error = str(error)
            view.message.finish_reason = FinishReason.ERROR
        finally:
            self.cancel()
            self._answer = self._message = None
            facts.answering, facts.progress = False, None
            self._heard()
            chat.refresh_bindings()
        return await self._end(view)

    def keep(self) -> None:
        """Save the partial answer, because the program or the chat is about to end."""
        if self._message is None:
            return
        message, self._message = self._message, None
        message.finish_reason = FinishReason.CANCELLED
        try:
            self._conversation.save(message)
        except LocalLLMError as error:  # the screen can no longer show it
            self._chat.log.error(str(error))

    def _heard(self) -> None:
        """Record that the running answer has produced data."""
        self._heard_at, self._facts.silent_s = time.monotonic(), 0.0
        self._chat.status_line.redraw()

    async def _model_loaded(self) -> LoadedInfo:
        """Wait for a model that is loading. Raises RequestError if the load fails or the answer was stopped."""
        while self._loader.busy and not self._chat.stopping.is_set():
            await asyncio.sleep(FLUSH_S)
        info = self._chat.backend.info
        if self._loader.busy or info is None:
            raise RequestError("No model is loaded. /models chooses one, /regenerate asks it again.")
        return info

    async def _follow(self, answer: AnswerStream, view: AnswerView) -> AnswerEvent:
        """Draw and save an answer until it ends; returns the last event."""
        facts, meter, saved, spent = self._facts, SpeedMeter(), time.monotonic(), time.thread_time()
        while True:
            if events := answer.poll():
                event = merged(events)
                facts.counts, facts.timings, facts.progress = event.counts, event.timings, event.progress
                facts.speed = meter.observe(event)
                self._latency.observe(event)
                self._heard()
                view.add(event.parts)
                if event.finish_reason is not None:
                    return event
            if time.monotonic() - saved > SAVE_EVERY_S:
                # A busy database is retried later; the final save reports errors.
                with contextlib.suppress(SessionError):
                    self._conversation.save(view.message, lasting=False)
                saved = time.monotonic()
            spent, before = time.thread_time(), spent
            await asyncio.sleep(min(max((spent - before) / DRAW_SHARE, DRAW_S[0]), DRAW_S[1]))

    async def _end(self, view: AnswerView) -> Message | None:
        view.finish()
        try:
            self._conversation.save(view.message)
            view.show_end(self._conversation.variant(view.message))
        except LocalLLMError as error:
            self._chat.show_error(str(error))
            return None
        return view.message
