"""Loading models behind the chat: one at a time, stopped by Esc, and the first one of a user who has none yet."""

import threading
import time
from collections.abc import Sequence
from functools import partial

from textual.screen import Screen
from textual.worker import Worker

from localllm.errors import LocalLLMError
from tui.answering import FLUSH_S
from tui.backend import Backend, LoadStoppedError, ModelChoice, ModelInfo
from tui.background import in_thread
from tui.conversation import Conversation
from tui.parameters import Parameters
from tui.widgets.frame import StatusLine, TitleBar
from tui.widgets.transcript import Transcript

BUILT_IN = "built-in"  # a ModelChoice's source


class ModelLoader:
    """Loads one model at a time. A load that begins ends the one before; the conversation stays."""

    def __init__(
        self,
        backend: Backend,
        conversation: Conversation,
        screen: Screen[None],
        shown: tuple[TitleBar, Transcript, StatusLine],
        remembered_as: str,
    ) -> None:
        """screen: runs the work. shown: what says how it goes. remembered_as: the store's name for the last model."""
        self._backend, self._conversation, self._screen = backend, conversation, screen
        self._title_bar, self._transcript, self._status_line = shown
        self._remembered_as = remembered_as
        self._work: Worker[None] | None = None
        self._stopped = threading.Event()
        self._name = ""
        self._fallback = ""
        self.busy = False

    def begin(self, name: str, fallback: str = "", pull: bool = True) -> None:
        """Load a model. fallback: loaded if it cannot be had and no other one is there.

        pull: whether a model that is not on this machine is pulled.
        """
        self._end()
        self._name, self._fallback, self.busy = name, fallback, True
        self._show_activity(f"loading {name.rpartition('/')[2]}", 0.0)
        self._screen.refresh_bindings()
        # What loading imports must not hold up the first picture.
        self._screen.call_after_refresh(self._start, name, pull, self._stopped)

    def stop(self) -> None:
        """Give the load up. The model before it stays, unless it has been freed already."""
        self._end()
        self._settle()
        self._fall_back(f"{self._name} was not loaded: stopped.", failed=False)

    def shut(self) -> None:
        """Let a load that is on its way end by itself; the chat is closing."""
        self._stopped.set()

    async def offer(self) -> None:
        """Let a user who has named no model choose one, and take the built-in one where they do not."""
        from tui.screens.models import ModelsScreen

        try:
            choices = await in_thread(lambda: self._backend.models(None))
        except LocalLLMError as error:
            self._transcript.show_error(str(error))
            return
        built_in = next((choice.name for choice in choices if choice.source == BUILT_IN), "")

        def chosen(name: str | None) -> None:
            if name or built_in:
                self.begin(name or built_in, built_in)

        self._screen.app.push_screen(ModelsScreen(self._backend, None, _heading(choices)), chosen)

    def _end(self) -> None:
        """Abandon the load on its way: its thread ends at its next progress."""
        self._stopped.set()
        self._stopped = threading.Event()
        if self._work is not None:
            self._work.cancel()
        self.busy = False

    def _start(self, name: str, pull: bool, stopped: threading.Event) -> None:
        if not stopped.is_set():
            self._work = self._screen.run_worker(partial(self._load, name, pull, stopped), group="load")

    async def _load(self, name: str, pull: bool, stopped: threading.Event) -> None:
        said = ("", 0.0)

        def progress(what: str, share: float) -> None:
            nonlocal said
            if stopped.is_set():
                raise LoadStoppedError("The load was stopped.")
            now = time.monotonic()
            if what != said[0] or now - said[1] > FLUSH_S:
                said = (what, now)
                self._screen.app.call_later(self._show_progress, stopped, what, share)

        try:
            info = await in_thread(lambda: self._backend.load(name, progress, pull))
        except LocalLLMError as error:
            self.busy = False
            self._settle()
            self._fall_back(str(error), failed=True)
            return
        self.busy = False
        self._settle()
        self._take(name, info)

    def _show_progress(self, stopped: threading.Event, what: str, share: float) -> None:
        if not stopped.is_set() and self.busy:
            self._show_activity(what, share)

    def _show_activity(self, what: str, share: float) -> None:
        self._status_line.facts.activity = (what, share)
        self._status_line.redraw()

    def _settle(self) -> None:
        """Show the model that is there now."""
        info, facts = self._backend.info, self._status_line.facts
        facts.activity = None
        facts.model, facts.place, facts.context = (info.name, info.place, info.context) if info else ("", "", None)
        self._title_bar.model = facts.model
        self._status_line.redraw()
        self._screen.refresh_bindings()

    def _take(self, name: str, info: ModelInfo) -> None:
        conversation = self._conversation
        if info.settings is not None:
            conversation.set_defaults(Parameters.from_settings(info.settings))
        try:
            conversation.set_model(name)
            conversation.store.remember(self._remembered_as, name)
        except LocalLLMError as error:
            self._transcript.show_error(str(error))
        if info.notice:
            self._transcript.tell(info.notice)
        if not info.sees and conversation.picture_names:
            text = f"{info.name} reads text only: it answers without this chat's pictures."
            self._screen.notify(text, markup=False)

    def _fall_back(self, why: str, failed: bool) -> None:
        """Say why the model is not there; load the fallback if there is no other."""
        fallback = self._fallback
        if fallback and fallback != self._name and self._backend.info is None:
            self._transcript.show_error(f"{why} The built-in model answers instead; F4 lists the others.")
            self.begin(fallback)
        elif failed:
            self._transcript.show_error(why)
        else:
            self._screen.notify(why, markup=False)


def _heading(choices: Sequence[ModelChoice]) -> str:
    if any(choice.here and choice.source != BUILT_IN for choice in choices):
        return "Which model should answer?"
    return "No model is here yet: take the built-in one, or pull a better one"
