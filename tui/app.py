"""The Textual application: application-wide state, themes, key bindings and command dispatch."""

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.driver import Driver
from textual.screen import Screen
from textual.theme import Theme

from localllm.chats import SessionStore
from localllm.chats.conversation import Conversation
from localllm.chats.parameters import Parameters
from localllm.chats.saved import Persona
from localllm.errors import LocalLLMError
from localllm.text import counted, harmless
from tui.backend import Backend
from tui.commands.table import COMMANDS, find_command, unknown_command
from tui.drafts import Drafts
from tui.screens.approval import ApprovalScreen
from tui.screens.chat import Answered, ChatScreen
from tui.screens.loading import ChatLoader
from tui.screens.tabs import Tabs
from tui.terminal import in_browser, surviving
from tui.widgets.frame import Notice, key_names
from tui.widgets.prompt import Prompt

if sys.platform == "win32":  # its event loop does not support signal handlers
    LEAVE_ON: tuple[signal.Signals, ...] = ()
else:
    LEAVE_ON = (signal.SIGTERM, signal.SIGHUP)
"""Sent on logout, terminal close or shutdown."""
_HANG_UP = 1  # SIGHUP, which Windows lacks
KEEP_EVERY_S = 0.5  # between two looks for changed drafts
LEAVE_S = 3.0  # a second Ctrl+C within this time quits

# Backgrounds are nearly grey: 256-colour terminals would show dark tints as blue.
DARK = Theme(
    name="localllm",
    primary="#8fb8ff",
    secondary="#b9a4ff",
    accent="#ffb86b",
    warning="#f2c063",
    error="#ff7a85",
    success="#7fd6a4",
    foreground="#d9dce2",
    background="#121417",
    surface="#1a1d21",
    panel="#25292e",
    dark=True,
    variables={"footer-key-foreground": "#ffb86b", "footer-background": "#121417", "border": "#474d56"},
)
LIGHT = Theme(
    name="localllm-light",
    primary="#2457b3",
    secondary="#6b47b8",
    accent="#b3560b",
    warning="#946200",
    error="#b3202e",
    success="#1d7a46",
    foreground="#22262e",
    background="#fafafa",
    surface="#f0f0ef",
    panel="#e2e2e0",
    dark=False,
    variables={"footer-key-foreground": "#b3560b", "footer-background": "#fafafa", "border": "#b8b8b5"},
)
_VISITED = "browser visit"  # the store's key for a visit and its chat
_BETWEEN_TABS = (("next",), ("previous",))  # commands
# The terminal's own 16 colours on its own background.
PLAIN = {True: "ansi-dark", False: "ansi-light"}


class ChatApp(App[None]):
    """The chat. Does not own backend and store: the caller closes them."""

    TITLE = "localllm"
    CSS_PATH = "chat.tcss"
    DEFAULT_MODE = "tab-1"
    COMMAND_PALETTE_BINDING = "ctrl+p"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (80, "-usual")]  # noqa: RUF012 - as declared by Textual
    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(
                command.key,
                f"app.command('{command.name}')",
                command.label or command.title,
                id=command.name,
                show=bool(command.label),
                priority=True,  # input fields bind many of these keys themselves
            )
            for command in COMMANDS
            if command.key
        ),
        Binding("ctrl+p", "command_palette", "Commands", show=False, priority=True),
        Binding("ctrl+c", "interrupt", "Copy, stop, leave", id="interrupt", show=False, priority=True),
    ]

    def __init__(
        self,
        backend: Backend,
        store: SessionStore,
        model: str = "",
        parameters: Parameters | None = None,
        keys: dict[str, str] | None = None,
        remembered_as: str = "model",
        light: bool = False,
        plain_colours: bool = False,
        typed: str = "",
    ) -> None:
        """model: "" selects the last one used; if there is none, the user chooses. keys: binding id -> key, overrides
        the default. remembered_as: the store's key for the last loaded model. light: the terminal's background is
        light; ignored once the user has chosen a theme. plain_colours: the terminal has few colours, or NO_COLOR is
        set. typed: what the user typed before the prompt appeared.
        """
        super().__init__(ansi_color=True if plain_colours else None)
        self.backend = backend
        self.store = store
        self.keys = keys or {}
        for theme in (DARK, LIGHT):
            self.register_theme(theme)
        chosen = None if plain_colours else store.remembered("theme")
        usual = PLAIN[not light] if plain_colours else (LIGHT if light else DARK).name
        self.theme = chosen if chosen in self.available_themes else usual
        self._model = model
        self._remembered_as = remembered_as
        self._parameters = parameters or Parameters()
        self._loader = ChatLoader(backend, self, remembered_as)
        self._drafts = Drafts(store)
        self._visit: str | None = None
        self._first_prompt = ""
        self.tabs = Tabs(self, self._make_chat)
        self.tabs.add().prompt.text = typed
        self._interrupted = -LEAVE_S
        self._asked_to_stay = -LEAVE_S  # when the warning about running answers was last shown
        self._named = False  # whether we have set the terminal's title
        self.set_keymap(self.keys)

    def _make_chat(self, mode: str) -> ChatScreen:
        model = self._model or self.store.remembered(self._remembered_as) or ""
        conversation = Conversation(self.store, model, self._parameters)
        commands = [(command.name, command.argument, command.title) for command in COMMANDS]
        pull = bool(self._model)
        return ChatScreen(conversation, self.backend, self._loader, self.tabs, mode, pull, self.keys, commands)

    @property
    def chat(self) -> ChatScreen:
        return self.tabs.current

    def begin_with(
        self,
        resume: bool,
        system: str | None,
        persona: Persona | None = None,
        visit: str | None = None,
        prompt: str | None = None,
    ) -> None:
        """Before the run: open the last chat, if there is one; apply a persona; set the system prompt.

        visit: names the visits of one browser page; the chat of the last visit is opened. prompt: sent once the chat
        is shown, except when it is opened anew for the same page. Raises SessionError.
        """
        conversation = self.chat.conversation
        self._visit = visit
        self._first_prompt = prompt or ""
        name, _, known = (self.store.remembered(_VISITED) or "").partition(" ")
        if visit and visit == name and int(known) in [session.id for session in self.store.sessions()]:
            conversation.open(int(known))
            self._first_prompt = ""
        elif resume and (last := self.store.sessions(limit=1)):
            conversation.open(last[0].id)
        if persona is not None:
            conversation.set_parameters(persona.over(conversation.parameters, conversation.defaults))
        if system is not None:
            conversation.set_parameters(replace(conversation.parameters, system=system))

    def on_load(self) -> None:
        """Let tasks begin in their turn. From Python 3.12 on, Textual has them begin at once.

        A mode's first screen would then be mounted before it is on the mode's stack, which mounting reads.
        """
        asyncio.get_running_loop().set_task_factory(None)

    def on_mount(self) -> None:
        """Handle termination signals: restore the terminal and save partial answers."""
        loop = asyncio.get_running_loop()
        for number in LEAVE_ON:
            loop.add_signal_handler(number, self._leave_on, number)
        self.store.on_saving = self._show_saving
        if self.store.unsaved:
            self.call_after_refresh(self._show_saving, self.store.unsaved)

    def _show_saving(self, unsaved: str) -> None:
        """Tell the user that chats are only in memory, and why; or that they are saved again ("")."""
        for chat in self.tabs.all:
            chat.status_line.facts.unsaved = bool(unsaved)
            chat.status_line.redraw()
        text = f"{unsaved} The chat continues, and saving will be retried." if unsaved else "Chats are saved again."
        self.notify(text, severity="error" if unsaved else "information", timeout=20 if unsaved else 5, markup=False)

    def on_ready(self) -> None:
        """After the first frame: enable garbage collection, with everything imported at startup frozen."""
        if not gc.isenabled():
            gc.freeze()
            gc.enable()
        self._take_over_drafts()
        if self._first_prompt.strip():
            waits = self.chat.info is None and not self.chat.loader.busy  # for the user to choose a model
            (self.chat.prompt.give_back if waits else self.chat.send)(self._first_prompt)
        self.set_interval(KEEP_EVERY_S, self._keep_drafts)

    def _take_over_drafts(self) -> None:
        """Continue with what was not sent when an earlier chat ended: in the prompt, and in the history."""
        try:
            drafts = self._drafts.take_over()
        except LocalLLMError as error:
            self.chat.show_error(str(error))
            return
        if not drafts:
            return
        others = [draft.text for draft in drafts[:-1]]
        self.chat.take_over(others, {file.name: file for draft in drafts for file in draft.pasted})
        self.chat.prompt.give_back(drafts[-1].text)
        more = f" Up brings back {counted(len(others), 'other text')}." if others else ""
        self.notify(f"What you had not sent is back in the prompt.{more}", markup=False)

    def _keep_drafts(self) -> None:
        """Keep what a crash, or a reload of the browser's page, would lose."""
        try:
            if self._visit and (session_id := self.chat.conversation.session_id) is not None:
                visited = f"{self._visit} {session_id}"
                if self.store.remembered(_VISITED) != visited:
                    self.store.remember(_VISITED, visited)
            self._drafts.keep([tab.prompt for tab in self.tabs.all])
        except LocalLLMError as error:
            self.log.warning(str(error))  # it is tried again, and the status line says that nothing can be saved

    def get_driver_class(self) -> type[Driver]:
        """Textual's driver, wrapped to survive the loss of its terminal."""
        driver = super().get_driver_class()
        return driver if in_browser() else surviving(driver)

    def leave_without_terminal(self) -> None:
        """The terminal is gone: exit as on SIGHUP."""
        self._leave_on(_HANG_UP)

    def _leave_on(self, number: int) -> None:
        if sys.platform != "win32":
            # If the shell owns the terminal again, restoring it from the background raises SIGTTOU; ignore it.
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        self._keep_answers()
        self.exit(return_code=128 + number)

    def _keep_answers(self) -> None:
        """Save the partial answers and the drafts of all tabs."""
        self._keep_drafts()
        for chat in self.tabs.all:
            chat.writer.keep()

    def watch_theme(self, theme: str) -> None:
        if self.is_running and self.ansi_color is None:
            try:
                self.store.remember("theme", theme)
            except LocalLLMError as error:
                self.notify(str(error), severity="error", markup=False)

    def notify(self, message: str, **options: Any) -> None:
        """Show a notification: on the screen's Notice line if it has one, else as a Textual toast."""
        if lines := self.screen.query(Notice):
            lines.first().show(message, options.get("severity", "information"), options.get("timeout") or 5)
        else:
            super().notify(message, **options)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Allow commands only on the chat screen; switching tabs also works while a tool approval is open."""
        if action != "command":
            return True
        over = (ChatScreen, ApprovalScreen) if parameters in _BETWEEN_TABS else (ChatScreen,)
        return isinstance(self.screen, over)

    async def action_command(self, name: str, argument: str = "") -> None:
        """Run a command of the table; errors are shown in the chat."""
        command = next(command for command in COMMANDS if command.name == name)
        chat = self.chat
        await chat.attempt(command.run(chat, argument))

    async def action_tab(self, place: int) -> None:
        """Bring a tab to the front; bound to a click on its title."""
        if isinstance(self.screen, (ChatScreen, ApprovalScreen)):
            await self.tabs.show(self.tabs.all[place])

    def on_tab_changed(self) -> None:
        self.tabs.redraw()

    async def action_quit(self) -> None:
        """Quit. While hidden tabs have running answers, the first call only warns."""
        hidden = [tab for tab in self.tabs.all if tab.busy and tab is not self.tabs.current]
        now = time.monotonic()
        if hidden and now - self._asked_to_stay > LEAVE_S:
            self._asked_to_stay = now
            where = "another tab" if len(hidden) == 1 else f"{len(hidden)} other tabs"
            text = f"Answers are still running in {where}. Leave again to stop them."
            self.notify(text, severity="warning", timeout=LEAVE_S)
            return
        self._keep_answers()
        self.exit()

    def on_answered(self, event: Answered) -> None:
        """If the terminal lacks focus, alert the user: bell, notification (OSC 9) and a mark in the title."""
        try:
            if self.app_focus or self.store.remembered("notify") == "off":
                return
            title = " ".join(harmless(event.title).split())
        except LocalLLMError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        self.bell()
        self._tell_terminal(f"\x1b]9;localllm has answered: {title}\a")
        self._name_terminal(f"\u2714 {title}")

    def watch_app_focus(self, focus: bool) -> None:
        if focus:
            self._name_terminal(None)

    def _name_terminal(self, title: str | None) -> None:
        """Set the terminal's title, or restore the previous one if None (XTWINOPS 22 and 23)."""
        if (title is None) == (not self._named):
            return
        self._tell_terminal("\x1b[23;2t" if title is None else f"\x1b[22;2t\x1b]2;{title}\a")
        self._named = title is not None

    def _tell_terminal(self, sequence: str) -> None:
        if self._driver is not None:
            self._driver.write(sequence)

    def on_unmount(self) -> None:
        self._name_terminal(None)

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        text = event.text.strip()
        if found := find_command(text):
            self.chat.remember_prompt(text)
            self.run_worker(self.action_command(*found))  # not the chat's worker: /close removes the chat
        elif unknown := unknown_command(event.text):
            self.chat.show_error(unknown)
            self.chat.prompt.give_back(event.text)
        else:
            self.chat.send(event.text)

    def action_interrupt(self) -> None:
        """Ctrl+C: copy the selection, else stop an answer or a load; pressed twice, quit."""
        marked = self.screen.get_selected_text() or getattr(self.focused, "selected_text", "")
        if marked:
            self.copy_to_clipboard(marked)
            self.notify("Copied.")
            return
        now = time.monotonic()
        if now - self._interrupted < LEAVE_S:
            self.run_worker(self.action_quit())
            return
        self._interrupted = now
        stopped = self.chat.stop_work()
        self.notify(f"{'Stopped. ' if stopped else ''}Press Ctrl+C again to leave.", timeout=LEAVE_S)

    def get_key_display(self, binding: Binding) -> str:
        """Short key names as in the help: F1, ^P, Esc. A single letter keeps its case."""
        name = super().get_key_display(binding)
        return name.title() if len(name) > 1 else name

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The command palette's entries: every chat command."""
        if isinstance(screen, ChatScreen):
            for command in COMMANDS:

                def run(name: str = command.name) -> None:
                    self.run_worker(self.action_command(name))

                # The palette searches titles only, so the title holds both what the command does and its name.
                keys = key_names(self.keys.get(command.name, command.key))
                yield SystemCommand(f"{command.title} · /{command.name}", keys, run)
