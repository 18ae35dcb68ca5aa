"""Requests one answer of the model, and draws and saves it while it streams."""

import asyncio
import threading
import time
from typing import cast

from textual.screen import Screen

from localllm.answer.event import AnswerStream
from localllm.engine.request import FinishReason
from localllm.errors import LocalLLMError, RequestError
from tui.answering import FLUSH_S, follow, note_end
from tui.backend import Backend, ModelInfo
from tui.background import in_thread
from tui.screens.loading import ModelLoader, Place
from tui.screens.tools import ChatTools
from tui.sessions import Message
from tui.status import Latency, joined
from tui.widgets.messages import AnswerView


class AnswerWriter:
    """Writes the answers of one chat, one at a time."""

    def __init__(
        self,
        place: Place,
        backend: Backend,
        loader: ModelLoader,
        tools: ChatTools,
        latency: Latency,
        stopping: threading.Event,
    ) -> None:
        """latency: records the times of all answers. stopping: set when the user stops the answer."""
        self._screen: Screen[None] = place.screen
        self._conversation, self._transcript, self._status_line = (
            place.conversation,
            place.transcript,
            place.status_line,
        )
        self._backend, self._loader, self._tools, self._stopping = backend, loader, tools, stopping
        self._latency = latency
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
        facts, conversation, stopping = self._status_line.facts, self._conversation, self._stopping
        facts.answering, facts.speed, facts.progress = True, 0.0, None
        self._heard()
        self._screen.refresh_bindings()
        continues, before = view is not None, dict(view.message.stats) if view else {}
        try:
            if view is None:
                view = cast("AnswerView", await self._transcript.append(conversation.begin_answer()))
            view.message.finish_reason = None
            self._message = view.message
            info = await self._model_loaded()
            unseen = () if info.sees else conversation.picture_names
            tools = await self._tools.offered(info)
            request = conversation.request(continues, info.sees, tools, tool_choice)
            self._answer = await in_thread(lambda: self._backend.submit(request))
            if stopping.is_set():
                self._answer.cancel()
            update = await follow(self._answer, view, conversation, facts, self._latency, self._heard)
            note_end(view, update, unseen)
            view.message.stats = joined(before, view.message.stats)
            facts.speed = view.message.stats["speed"]
        except LocalLLMError as error:
            if view is None:
                self._transcript.show_error(str(error))
                return None
            view.message.error = str(error)
            view.message.finish_reason = FinishReason.ERROR
        finally:
            self.cancel()
            self._answer = self._message = None
            facts.answering, facts.progress = False, None
            self._heard()
            self._screen.refresh_bindings()
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
            self._screen.log.error(str(error))

    def _heard(self) -> None:
        """Record that the running answer has produced data."""
        self._heard_at, self._status_line.facts.silent_s = time.monotonic(), 0.0
        self._status_line.redraw()

    async def _model_loaded(self) -> ModelInfo:
        """Wait for a model that is loading. Raises RequestError if the load fails or the answer was stopped."""
        while self._loader.busy and not self._stopping.is_set():
            await asyncio.sleep(FLUSH_S)
        info = self._backend.info
        if self._loader.busy or info is None:
            raise RequestError("No model is loaded. /models chooses one, /regenerate asks it again.")
        return info

    async def _end(self, view: AnswerView) -> Message | None:
        await view.finish()
        try:
            self._conversation.save(view.message)
            view.show_end(self._conversation.variant(view.message))
        except LocalLLMError as error:
            self._transcript.show_error(str(error))
            return None
        return view.message
