"""The chat screen: messages above, the prompt below, and a status line."""

import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.events import Key, Paste
from textual.screen import Screen
from textual.worker import Worker

from localllm.engine.request import FinishReason
from localllm.errors import LocalLLMError
from tui.answering import Answered, make_title
from tui.attachments import MissingFileError
from tui.backend import Backend, ModelInfo
from tui.conversation import Conversation
from tui.screens.folder import ChatFolder
from tui.screens.loading import ModelLoader, Place
from tui.screens.tools import ChatTools
from tui.screens.writing import AnswerWriter
from tui.sessions import Message
from tui.status import Latency
from tui.tabs import TabChanged, Tabs
from tui.widgets.completion import Suggestion
from tui.widgets.find import FindBar
from tui.widgets.frame import KeyBar, Note, Notice, Row, StatusLine, TabMark, TitleBar
from tui.widgets.messages import AnswerView
from tui.widgets.prompt import Prompt
from tui.widgets.transcript import Transcript

MEMORY_EVERY_S = 2.0


class ChatScreen(Screen[None]):
    """Owns the conversation and the running answer; `tui.commands` act through its public methods."""

    AUTO_FOCUS = "#prompt"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", id="stop", priority=True),
        Binding("escape", "back", "Back", id="back", priority=True),
        Binding("pageup", "scroll(-1)", "Page up", id="scroll.up", show=False, priority=True),
        Binding("pagedown", "scroll(1)", "Page down", id="scroll.down", show=False, priority=True),
        Binding("ctrl+up", "select(-1)", "Earlier message", id="message.earlier", show=False, priority=True),
        Binding("ctrl+down", "select(1)", "Later message", id="message.later", show=False, priority=True),
    ]

    def __init__(
        self,
        conversation: Conversation,
        backend: Backend,
        loader: ModelLoader,
        tabs: "Tabs[ChatScreen]",
        mode: str,
        pull: bool = False,
        keys: Mapping[str, str] | None = None,
        commands: Sequence[Suggestion] = (),
        folder: Path | None = None,
    ) -> None:
        """mode: the application mode whose base screen this is. pull: whether to pull the first model if it is not on
        this machine. keys: the user's key bindings by id. commands: completed by the prompt. folder: the folder that
        tools act on; None for the current directory.
        """
        super().__init__()
        self.conversation = conversation
        self.backend = backend
        self.loader = loader
        self.tabs = tabs
        self.mode = mode
        self.keys = keys or {}
        self.transcript = Transcript(conversation.variant, conversation.checker)
        self.find = FindBar(self.transcript)
        self.prompt = Prompt(commands, backend.count_tokens)
        self.notice = Notice()
        self.status_line = StatusLine()
        self.title_bar = TitleBar()
        self.latency = Latency()
        self.editing: Message | None = None
        self.deleted: int | None = None
        self.place = Place(self, conversation, self.title_bar, self.transcript, self.status_line)
        self._pull = pull
        self.tools = ChatTools(folder, conversation, self, mode, (self.transcript, self.status_line, self.prompt))
        self.folder = ChatFolder(conversation, backend, self.status_line)
        self._begun = False
        self._unread = False  # an answer has ended while another tab was visible
        self.stopping = threading.Event()
        self.writer = AnswerWriter(self.place, backend, loader, self.tools, self.latency, self.stopping)
        self._missing = ""  # a text that was rejected because it names missing files; resending it is accepted
        self._work: Worker[None] | None = None

    def compose(self) -> ComposeResult:
        yield self.title_bar
        yield self.transcript
        with Vertical(id="entry"):
            yield self.prompt.completion
            yield self.notice
            yield self.find
            yield self.prompt
        yield self.status_line
        yield KeyBar()

    async def on_mount(self) -> None:
        self.prompt.sent = self.conversation.store.prompts()
        self.prompt.use_vim(self.conversation.store.remembered("vim") == "on")
        self.prompt.focus()
        await self.show_conversation()
        self.set_interval(MEMORY_EVERY_S, self._measure)
        self.loader.join(self.place, self._pull)

    def on_unmount(self) -> None:
        """Save the partial answer and free all resources."""
        self.loader.leave(self.place)
        self.writer.keep()
        self.stopping.set()
        self.tools.close()
        self.folder.close()

    @property
    def info(self) -> ModelInfo | None:
        """The current model; None while one is loading."""
        return None if self.loader.busy else self.backend.info

    @property
    def busy(self) -> bool:
        """Whether an answer or a summary is running, from the moment it was requested."""
        return self._begun

    def mark(self) -> TabMark:
        """The tab's title, and whether the chat asks for approval, answers, has an unread answer, or has a draft."""
        states = (
            (self.tools.asking, "?", "$warning"),
            (self.busy, "●", "$accent"),
            (self._unread, "✔", "$success"),
            (bool(self.prompt.text.strip()), "✎", ""),
        )
        sign, style = next(((sign, style) for holds, sign, style in states if holds), ("", ""))
        return TabMark(self.title_bar.title, sign, style)

    def seen(self) -> None:
        self._unread = False

    def show_title(self) -> None:
        """Show the current title and tags."""
        self.title_bar.title = self.conversation.title
        self.title_bar.tags = self.conversation.tags
        self.post_message(TabChanged())

    async def show_conversation(self) -> None:
        """Redraw the conversation, scrolled to its end."""
        self.show_title()
        self.find.shut()
        show = self.transcript.show if self.conversation.messages else self.transcript.welcome
        await show(self.conversation.messages)

    # Typing always reaches the prompt, whatever is selected.

    def on_key(self, event: Key) -> None:
        """Forward keys typed elsewhere to the prompt."""
        if event.is_printable and event.character and self.focused is not self.prompt:
            event.stop()
            self.prompt.focus()
            if self.prompt.inserts:
                self.prompt.insert(event.character)
            else:
                self.prompt.press(event.character)

    def on_paste(self, event: Paste) -> None:
        """Forward text pasted elsewhere to the prompt."""
        if self.focused is not self.prompt:
            self.prompt.focus()
            self.prompt.post_message(Paste(event.text))

    def on_prompt_wanted(self, event: Prompt.Wanted) -> None:
        """Handle vim normal-mode commands that search or scroll the messages."""
        transcript, lines = self.transcript, self.transcript.size.height // 2
        if event.what == "find":
            self.find.open(self.conversation.messages, then=self.prompt)
        elif event.what.startswith("find-"):
            self.find.action_step(1 if event.what == "find-next" else -1)
        elif event.what in ("first", "last"):
            (transcript.scroll_home if event.what == "first" else transcript.scroll_end)(animate=False)
        else:
            step = {"down": 1, "up": -1, "half-down": lines, "half-up": -lines}[event.what]
            transcript.scroll_relative(y=step, animate=False)

    def send(self, text: str) -> None:
        """Send a text to the model; if that is not possible now, put it back into the prompt."""
        if self.busy:
            self.notify("An answer is still running. Esc stops it.", severity="warning")
        elif self.info is None and not self.loader.busy:
            self.show_error("No model is loaded yet. /models chooses one.")
        else:
            self.remember_prompt(text.strip())
            self.begin(partial(self._send, text.strip()))
            return
        self.prompt.give_back(text)

    def remember_prompt(self, text: str) -> None:
        self.prompt.accept(text)
        try:
            self.conversation.store.add_prompt(text)
        except LocalLLMError as error:
            self.show_error(str(error))

    async def _send(self, text: str) -> None:
        editing, self.editing = self.editing, None
        try:
            known = [*(editing.attachments if editing else ()), *self.prompt.pasted.values()]
            files = await self.folder.attachments(text, known, strict=text != self._missing)
            if editing:
                self.conversation.edit(editing, text, files)
                self.prompt.end_edit()
                await self.show_conversation()
            else:
                message = self.conversation.ask(text, files)
                await self.transcript.append(message)
        except LocalLLMError as error:
            self.editing = editing
            self._missing = text if isinstance(error, MissingFileError) else ""
            self.prompt.give_back(text)
            self.show_error(str(error))
            return
        self.show_title()
        await self.answer()

    def begin_answer(self, view: AnswerView | None = None) -> None:
        self.begin(partial(self.answer, view))

    def begin(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run work that occupies the model; it should end when Esc sets `stopping`."""

        async def whole() -> None:
            try:
                await work()
            finally:
                self._begun = False
                self.refresh_bindings()
                self.post_message(TabChanged())

        self._begun = True
        self.post_message(TabChanged())
        self.stopping.clear()
        self._work = self.run_worker(whole)

    async def stop(self) -> None:
        """Stop the running answer, even while it waits for its model to load, and wait until it is saved."""
        self.stopping.set()
        self.writer.cancel()
        self.workers.cancel_group(self, "title")
        if self._work:
            await self._work.wait()

    def stop_work(self) -> bool:
        """Stop the answer, else the load; False if there is neither."""
        at_work = self.busy or self.loader.busy
        if self.writer.cancel():
            return at_work
        if self.loader.busy:
            self.loader.stop()
        else:
            self.stopping.set()
        return at_work

    async def answer(self, view: AnswerView | None = None) -> None:
        """Have the model answer the conversation and call tools; with a view, continue its incomplete answer."""
        message = await self.tools.answer(self.writer.write, view, self.stopping)
        self._unread = self.tabs.current is not self
        self.post_message(Answered(self.conversation.title))
        info = self.info
        if message and message.finish_reason == FinishReason.STOP and info and info.converses and info.titles:
            self.run_worker(self._make_title(), exclusive=True, group="title")

    async def _make_title(self) -> None:
        """Ask the model for a title. If that fails, the title stays the start of the first prompt."""
        try:
            await make_title(self.conversation, self.backend)
        except LocalLLMError as error:
            self.log.warning(str(error))
        self.show_title()

    def load_model(self, name: str) -> None:
        """Load another model for all tabs; conversations stay, running answers are cancelled."""
        for chat in self.tabs.all:
            chat.writer.cancel()
        self.loader.begin(name, self.place)

    def action_stop(self) -> None:
        self.stop_work()
        self.prompt.focus()

    def action_back(self) -> None:
        """Close notes and the find bar, abandon an edit, and return to the prompt."""
        self.transcript.query(Note).remove()
        self.find.shut()
        if self.editing:
            self.editing = None
            self.prompt.end_edit(empty=True)
        self.prompt.focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Enable Stop only while work is running, and Back only if it would change something."""
        at_work = self.busy or self.loader.busy
        finding = self.find.display
        if action in ("stop", "back") and self.prompt.takes_escape:
            return False
        if action == "stop":
            return at_work and not finding
        if action == "back":
            away = self.editing is not None or self.focused is not self.prompt
            return finding or (not at_work and (away or bool(self.transcript.query(Note))))
        if action == "variant":
            view = self.transcript.selected()
            return view is not None and view.variant[1] > 1
        return True

    def action_scroll(self, pages: int) -> None:
        scroll = self.transcript.scroll_page_up if pages < 0 else self.transcript.scroll_page_down
        scroll(animate=False)

    def action_select(self, step: int) -> None:
        """Focus the next message up or down; past the last one, focus the prompt."""
        if not self.transcript.select(step):
            self.prompt.focus()

    async def action_variant(self, step: int) -> None:
        view = self.transcript.selected()
        if view is None or self.busy:
            return
        index = self.transcript.views.index(view)
        try:
            turned = self.conversation.turn_to_variant(view.message, step)
        except LocalLLMError as error:
            self.show_error(str(error))
            return
        if turned:
            await self.show_conversation()
            self.transcript.views[index].focus()

    def show_error(self, text: str) -> None:
        """Show an error below the messages."""
        self.transcript.show_error(text)

    def show_note(self, content: Content | str | Sequence[Row]) -> None:
        """Show a note that is not part of the conversation."""
        self.run_worker(self.transcript.note(Note(content)))

    def _measure(self) -> None:
        facts = self.status_line.facts
        facts.unsaved = bool(self.conversation.store.unsaved)
        if self.info:
            facts.memory = self.backend.memory_bytes()
        if facts.answering:
            facts.silent_s = self.writer.silent_s
        self.status_line.redraw()
