"""Loads models in the background, one at a time, and offers a choice to a user who has none yet. Esc stops a load."""

import threading
import time
from collections.abc import Sequence
from functools import partial

from textual.app import App

from localllm.background import in_thread
from localllm.chats.parameters import Parameters
from localllm.errors import LocalLLMError
from tui.backend import Backend, LoadedInfo, LoadStoppedError, PickerRow, short_name
from tui.screens.chat_view import ChatView

BUILT_IN = "built-in"  # a PickerRow's source
FLUSH_S = 1 / 25  # between two drawings of an answer, or of a load's progress


class ChatLoader:
    """Loads one model at a time, for all chats. Starting a load abandons the previous one; conversations stay."""

    def __init__(self, backend: Backend, app: App[None], remembered_as: str) -> None:
        """app: runs the work. remembered_as: the store's key for the last loaded model."""
        self._backend, self._app = backend, app
        self._remembered_as = remembered_as
        self._chats: list[ChatView] = []
        self._chat: ChatView | None = None  # where the load was requested
        self._stopped = threading.Event()
        self._name = ""
        self._fallback = ""
        self._loaded = ""  # the name under which the current model was loaded
        self.busy = False

    def join(self, chat: ChatView, pull: bool) -> None:
        """Add a chat. If no model is loaded, load its conversation's model, or let the user choose one.

        pull: whether to pull that model if it is not on this machine.
        """
        self._chats.append(chat)
        info = self._backend.info
        if self.busy:
            return  # it will show the next progress too
        if info is not None:
            self._show_model(chat, info)
            self._use(chat, self._loaded, info)
        elif chat.conversation.model:
            self.begin(chat.conversation.model, chat, pull=pull)
        else:
            chat.call_after_refresh(lambda: chat.run_worker(self.offer(chat)))

    def leave(self, chat: ChatView) -> None:
        """Remove a chat; a load that it requested continues unless it was the last chat."""
        self._chats.remove(chat)
        if not self._chats:
            self._stopped.set()

    def begin(self, name: str, chat: ChatView, fallback: str = "", pull: bool = True) -> None:
        """Load a model. chat: where errors are shown. fallback: loaded if the load fails and no model is loaded.

        pull: whether to pull a model that is not on this machine.
        """
        self._end()
        self._name, self._chat, self._fallback, self.busy = name, chat, fallback, True
        short = short_name(name)
        for each in self._chats:
            each.title_bar.show_model(short)
            each.transcript.forget_errors()
        self._show_activity(f"loading {short}", 0.0)
        chat.refresh_bindings()
        # The imports that loading triggers must not delay the first frame.
        load = partial(self._load, name, chat, pull, self._stopped)
        chat.call_after_refresh(self._app.run_worker, load, group="load")

    def stop(self) -> None:
        """Abandon the load. The previous model stays, unless it has already been freed."""
        self._end()
        self._settle()
        if self._chat is not None:
            self._fall_back(self._chat, f"{short_name(self._name)} was not loaded: stopped.", failed=False)

    async def offer(self, chat: ChatView) -> None:
        """Let the user choose a model; load the built-in one if they choose none."""
        from tui.screens.models import PickerScreen

        try:
            choices = await in_thread(lambda: self._backend.models(None))
        except LocalLLMError as error:
            chat.show_error(str(error))
            return
        built_in = next((choice.name for choice in choices if choice.source == BUILT_IN), "")

        def chosen(name: str | None) -> None:
            if name or built_in:
                self.begin(name or built_in, chat, built_in)

        self._app.push_screen(PickerScreen(self._backend, None, _heading(choices)), chosen)

    def _end(self) -> None:
        """Abandon the running load; its thread ends at its next progress call."""
        self._stopped.set()
        self._stopped = threading.Event()
        self._app.workers.cancel_group(self._app, "load")
        self.busy = False

    async def _load(self, name: str, chat: ChatView, pull: bool, stopped: threading.Event) -> None:
        if stopped.is_set():
            return
        said = ("", 0.0)

        def progress(what: str, share: float) -> None:
            nonlocal said
            if stopped.is_set():
                raise LoadStoppedError("The load was stopped.")
            now = time.monotonic()
            if what != said[0] or now - said[1] > FLUSH_S:
                said = (what, now)
                self._app.call_later(self._show_progress, stopped, what, share)

        try:
            info = await in_thread(lambda: self._backend.load(name, progress, pull))
        except LocalLLMError as error:
            self.busy = False
            self._settle()
            self._fall_back(chat, str(error), failed=True)
            return
        self.busy, self._loaded = False, name
        self._settle()
        for each in self._chats:
            self._use(each, name, info)
        try:
            chat.conversation.store.remember(self._remembered_as, name)
        except LocalLLMError as error:
            chat.show_error(str(error))
        for each in self._chats:
            each.transcript.tell(info.notice or "", as_note=each is chat)

    def _show_progress(self, stopped: threading.Event, what: str, share: float) -> None:
        if not stopped.is_set() and self.busy:
            self._show_activity(what, share)

    def _show_activity(self, what: str, share: float) -> None:
        for chat in self._chats:
            chat.status_line.facts.activity = (what, share)
            chat.status_line.redraw()

    def _settle(self) -> None:
        for chat in self._chats:
            chat.status_line.facts.activity = None
            self._show_model(chat, self._backend.info)

    def _show_model(self, chat: ChatView, info: LoadedInfo | None) -> None:
        facts = chat.status_line.facts
        facts.model, facts.place, facts.context = (
            (short_name(info.name), info.place, info.context) if info else ("", "", None)
        )
        chat.title_bar.show_model(facts.model)
        chat.status_line.redraw()
        chat.refresh_bindings()

    def _use(self, chat: ChatView, name: str, info: LoadedInfo) -> None:
        """Switch a conversation to the model that was loaded under this name."""
        conversation = chat.conversation
        if info.settings is not None:
            conversation.set_defaults(Parameters.from_settings(info.settings))
        try:
            conversation.set_model(name)
        except LocalLLMError as error:
            chat.show_error(str(error))
        if not info.sees and conversation.picture_names:
            text = f"{short_name(info.name)} reads text only: it answers without this chat's pictures."
            chat.notify(text, markup=False)

    def _fall_back(self, chat: ChatView, why: str, failed: bool) -> None:
        """Show why the load failed; load the fallback if no model is loaded."""
        if not self._chats:
            return  # the user has quit
        if chat not in self._chats:
            chat = self._chats[0]  # its tab was closed
        fallback = self._fallback
        if fallback and fallback != self._name and self._backend.info is None:
            self.begin(fallback, chat)
            chat.show_error(f"{why} The built-in model answers instead; F4 lists the others.")
        elif failed:
            chat.show_error(why)
        else:
            chat.notify(why, markup=False)


def _heading(choices: Sequence[PickerRow]) -> str:
    if any(choice.here and choice.source != BUILT_IN for choice in choices):
        return "Which model should answer?"
    return "No model is installed yet: use the built-in one, or pull a better one"
