"""The Textual application: what is there for the whole run, colours, keys and the palette."""

import asyncio
import gc
import signal
import sys
from collections.abc import Iterable

from textual.app import App, SystemCommand
from textual.driver import Driver
from textual.screen import Screen

from tui.backend import Backend
from tui.commands.table import COMMANDS
from tui.conversation import Conversation
from tui.parameters import Parameters
from tui.screens.chat import ChatScreen
from tui.sessions import SessionStore
from tui.sessions.database import SessionError
from tui.terminal import surviving
from tui.themes import THEMES

# The end of the session, of the terminal or of the machine. Windows' loop cannot be told.
LEAVE_ON = () if sys.platform == "win32" else (signal.SIGTERM, signal.SIGHUP)


class ChatApp(App[None]):
    """The chat. Owns neither backend nor store: whoever made them closes them."""

    TITLE = "localllm"
    CSS_PATH = "chat.tcss"
    COMMAND_PALETTE_BINDING = "ctrl+p"

    def __init__(
        self,
        backend: Backend,
        store: SessionStore,
        model: str = "",
        parameters: Parameters | None = None,
        keys: dict[str, str] | None = None,
        remembered_as: str = "model",
    ) -> None:
        """model "" is the one used last, and without one the user chooses. keys: binding id -> key, in place of the
        default. remembered_as: under which name the store keeps the model that was loaded last.
        """
        super().__init__()
        self.model_was_named = bool(model)
        self.backend = backend
        self.store = store
        self.remembered_as = remembered_as
        for theme in THEMES:
            self.register_theme(theme)
        remembered = store.remembered("theme")
        self.theme = remembered if remembered in self.available_themes else THEMES[0].name
        wanted = model or store.remembered(remembered_as) or ""
        self._conversation = Conversation(store, wanted, parameters or Parameters())
        self.keys = keys or {}
        self.set_keymap(self.keys)

    def on_mount(self) -> None:
        """Leave in order when the system asks: the terminal as it was, the answer as far as it has come."""
        loop = asyncio.get_running_loop()
        for number in LEAVE_ON:
            loop.add_signal_handler(number, self._leave_on, number)

    def on_ready(self) -> None:
        """The first picture stands: look for garbage again, though not among what the start brought."""
        if not gc.isenabled():
            gc.freeze()
            gc.enable()

    def get_driver_class(self) -> type[Driver]:
        """Textual's choice, made to outlive its terminal."""
        return surviving(super().get_driver_class())

    def leave_without_terminal(self) -> None:
        """Leave as if told by the system that the terminal has gone."""
        self._leave_on(signal.SIGHUP)

    def _leave_on(self, number: signal.Signals) -> None:
        # Where the shell has taken the terminal back, only who ignores this may put it as it was.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        for screen in self.screen_stack:
            if isinstance(screen, ChatScreen):
                screen.keep_answer()
        self.exit(return_code=128 + number)

    def get_default_screen(self) -> Screen[None]:
        """The chat is the only screen that is always there."""
        return ChatScreen(self._conversation)

    def watch_theme(self, theme: str) -> None:
        """Remember the choice."""
        if not self.is_running:
            return
        try:
            self.store.remember("theme", theme)
        except SessionError as error:
            self.notify(str(error), severity="error", markup=False)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The palette: every command of the chat."""
        if isinstance(screen, ChatScreen):
            for command in COMMANDS:

                def run(name: str = command.name) -> None:
                    screen.run_worker(screen.run_command(name))

                yield SystemCommand(f"/{command.name}", command.title, run)
        yield SystemCommand("Quit", "Leave", self.action_quit)
