"""Loading models behind the chat: one at a time, stopped by Esc, and the first one of somebody who has none yet."""

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from textual.worker import Worker

from localllm.errors import LocalLLMError
from tui.answering import FLUSH_S
from tui.backend import LoadStoppedError, ModelChoice, ModelInfo
from tui.background import in_thread
from tui.parameters import Parameters

if TYPE_CHECKING:
    from tui.screens.chat import ChatScreen

BUILT_IN = "built-in"  # a ModelChoice's source


class ModelLoader:
    """Loads for one chat. A load that begins ends the one before; the conversation stays."""

    def __init__(self, chat: "ChatScreen") -> None:
        self._chat = chat
        self._work: Worker[None] | None = None
        self._stopped = threading.Event()
        self._name = ""
        self._fallback = ""
        self.busy = False

    def begin(self, name: str, fallback: str = "", pull: bool = True) -> None:
        """Load a model. fallback is loaded where it cannot be had and no other one is there.

        pull: whether a model that is not on this machine is brought here.
        """
        self._end()
        self._name, self._fallback, self.busy = name, fallback, True
        self._show_activity(f"loading {name.rpartition('/')[2]}", 0.0)
        self._chat.refresh_bindings()
        # What loading imports must not hold up the first picture.
        self._chat.call_after_refresh(self._start, name, pull, self._stopped)

    def stop(self) -> None:
        """Give the load up. The model before it stays, unless it has been freed already."""
        self._end()
        self._settle()
        self._fall_back(f"{self._name} was not loaded: stopped.", "information")

    def shut(self) -> None:
        """Let a load that is on its way end by itself; the chat is closing."""
        self._stopped.set()

    async def offer(self) -> None:
        """Let somebody choose who has not said which model, and take the built-in one where they do not."""
        from tui.screens.models import ModelsScreen

        chat = self._chat
        backend = chat.app.backend
        try:
            choices = await in_thread(lambda: backend.models(None))
        except LocalLLMError as error:
            chat.show_error(str(error))
            return
        built_in = next((choice.name for choice in choices if choice.source == BUILT_IN), "")

        def chosen(name: str | None) -> None:
            if name or built_in:
                self.begin(name or built_in, built_in)

        chat.app.push_screen(ModelsScreen(backend, None, _heading(choices)), chosen)

    def _end(self) -> None:
        """Abandon the load at hand: nobody waits for it, and its thread ends at its next progress."""
        self._stopped.set()
        self._stopped = threading.Event()
        if self._work is not None:
            self._work.cancel()
        self.busy = False

    def _start(self, name: str, pull: bool, stopped: threading.Event) -> None:
        if not stopped.is_set():
            self._work = self._chat.run_worker(partial(self._load, name, pull, stopped), group="load")

    async def _load(self, name: str, pull: bool, stopped: threading.Event) -> None:
        told = ("", 0.0)

        def progress(what: str, share: float) -> None:
            nonlocal told
            if stopped.is_set():
                raise LoadStoppedError("The load was stopped.")
            now = time.monotonic()
            if what != told[0] or now - told[1] > FLUSH_S:
                told = (what, now)
                self._chat.app.call_later(self._show_progress, stopped, what, share)

        backend = self._chat.app.backend
        try:
            info = await in_thread(lambda: backend.load(name, progress, pull))
        except LocalLLMError as error:
            self.busy = False
            self._settle()
            self._fall_back(str(error), "error")
            return
        self.busy = False
        self._settle()
        self._take(name, info)

    def _show_progress(self, stopped: threading.Event, what: str, share: float) -> None:
        if not stopped.is_set() and self.busy:
            self._show_activity(what, share)

    def _show_activity(self, what: str, share: float) -> None:
        self._chat.status_line.facts.activity = (what, share)
        self._chat.status_line.redraw()

    def _settle(self) -> None:
        """Show the model that is there now."""
        chat, info = self._chat, self._chat.app.backend.info
        facts = chat.status_line.facts
        facts.activity = None
        facts.model, facts.place, facts.context = (info.name, info.place, info.context) if info else ("", "", None)
        chat.title_bar.model = facts.model
        chat.status_line.redraw()
        chat.refresh_bindings()

    def _take(self, name: str, info: ModelInfo) -> None:
        chat = self._chat
        if info.settings is not None:
            chat.conversation.set_defaults(Parameters.from_settings(info.settings))
        try:
            chat.conversation.set_model(name)
            chat.conversation.store.remember(chat.app.remembered_as, name)
        except LocalLLMError as error:
            chat.show_error(str(error))
        if info.notice:
            chat.transcript.tell(info.notice)
        if not info.sees and chat.conversation.picture_names:
            chat.notify(f"{info.name} reads text only: it answers without this chat's pictures.", markup=False)

    def _fall_back(self, why: str, severity: str) -> None:
        """Say why there is no such model; take the fallback where there is no other."""
        chat, fallback = self._chat, self._fallback
        if fallback and fallback != self._name and chat.app.backend.info is None:
            chat.show_error(f"{why} The built-in model answers in its place; F4 offers the others again.")
            self.begin(fallback)
        elif severity == "error":
            chat.show_error(why)
        else:
            chat.notify(why, markup=False)


def _heading(choices: Sequence[ModelChoice]) -> str:
    if any(choice.here and choice.source != BUILT_IN for choice in choices):
        return "Which model shall answer?"
    return "No model is here yet: take the built-in one, or pull a better one"
