"""The chat: messages above, the prompt below, and the truth about the machine in one line."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer
from textual.worker import Worker

from localllm.answer.event import AnswerStream, merged
from localllm.cli.terminal import harmless
from localllm.engine.request import FinishReason
from localllm.errors import LocalLLMError, RequestError
from tui.answering import FLUSH_S, follow, note_end
from tui.attachments import find_attachments
from tui.backend import ModelInfo
from tui.background import in_thread
from tui.commands.table import COMMANDS, find_command, unknown_command
from tui.conversation import Conversation
from tui.latency import Latency
from tui.loading import ModelLoader
from tui.sessions import Message, Role
from tui.widgets.message_views import MessageView
from tui.widgets.notes import Note
from tui.widgets.prompt import Prompt
from tui.widgets.status_line import StatusLine
from tui.widgets.title_bar import TitleBar
from tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from textual.widgets import Markdown

    from tui.app import ChatApp
    from tui.widgets.answer_view import AnswerView

MEMORY_EVERY_S = 2.0


class ChatScreen(Screen[None]):
    """Owns the conversation and the answer on its way; `tui.commands` act through its public methods."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", id="stop", priority=True),
        Binding("escape", "back", "Back", id="back", priority=True),
        *(
            Binding(
                command.key,
                f"command('{command.name}')",
                command.label or command.title,
                id=command.name,
                show=bool(command.label),
                priority=True,  # a field that edits has uses of its own for many keys
            )
            for command in COMMANDS
            if command.key
        ),
        Binding("pageup", "scroll(-1)", "Page up", id="scroll.up", show=False, priority=True),
        Binding("pagedown", "scroll(1)", "Page down", id="scroll.down", show=False, priority=True),
        Binding("ctrl+up", "select(-1)", "Earlier message", id="message.earlier", show=False, priority=True),
        Binding("ctrl+down", "select(1)", "Later message", id="message.later", show=False, priority=True),
    ]

    app: "ChatApp"

    def __init__(self, conversation: Conversation) -> None:
        super().__init__()
        self.conversation = conversation
        self.transcript = Transcript(conversation.variant)
        self.prompt = Prompt()
        self.status_line = StatusLine()
        self.title_bar = TitleBar()
        self.latency = Latency()
        self.editing: Message | None = None
        self.deleted: int | None = None
        self.loader = ModelLoader(self)
        self._answer: AnswerStream | None = None
        self._writing: Message | None = None
        self._begun = self._stopping = False
        self._work: Worker[None] | None = None

    def compose(self) -> ComposeResult:
        """Title, messages, prompt with completions above it, status, keys."""
        yield self.title_bar
        yield self.transcript
        with Vertical(id="entry"):
            yield self.prompt.completion
            yield self.prompt
        yield self.status_line
        yield Footer()

    async def on_mount(self) -> None:
        """Show the conversation, then load the model behind it."""
        self.prompt.sent = self.conversation.store.prompts()
        self.prompt.focus()
        await self.show_conversation()
        self.set_interval(MEMORY_EVERY_S, self._measure)
        if self.conversation.model:
            self.loader.begin(self.conversation.model, pull=self.app.model_was_named)
        else:
            self.call_after_refresh(lambda: self.run_worker(self.loader.offer()))

    def on_unmount(self) -> None:
        """Leave nothing behind: the load ends, the answer is kept as far as it has come."""
        self.loader.shut()
        self.keep_answer()

    @property
    def info(self) -> ModelInfo | None:
        """The model that answers; None while one is loading."""
        return None if self.loader.busy else self.app.backend.info

    @property
    def busy(self) -> bool:
        """Whether an answer is on its way, from the moment it was asked for."""
        return self._begun

    async def show_conversation(self) -> None:
        """Draw the conversation as it is now, from its end on."""
        self.title_bar.title = self.conversation.title
        if self.conversation.messages:
            await self.transcript.show(self.conversation.messages)
        else:
            await self.transcript.welcome()

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        """Run a command or ask the model."""
        text = event.text.strip()
        if found := find_command(text):
            self.prompt.accept(text)
            self._remember(text)
            self.run_worker(self.run_command(*found))
            return
        if unknown := unknown_command(event.text):
            self.show_error(unknown)
        elif self.busy:
            self.notify("An answer is on its way. Esc stops it.", severity="warning")
        elif self.info is None and not self.loader.busy:
            self.show_error("No model is loaded yet. /models chooses one.")
        else:
            self.prompt.accept(text)
            self._remember(text)
            self._begin(partial(self._send, text))
            return
        self.prompt.give_back(event.text)

    async def action_command(self, name: str) -> None:
        """Run a command of the table without an argument."""
        await self.run_command(name)

    async def run_command(self, name: str, argument: str = "") -> None:
        """Run a command of the table; what goes wrong is shown in place."""
        command = next(command for command in COMMANDS if command.name == name)
        try:
            await command.run(self, argument)
        except LocalLLMError as error:
            self.show_error(str(error))

    async def _send(self, text: str) -> None:
        editing, self.editing = self.editing, None
        try:
            known = [*(editing.attachments if editing else ()), *self.prompt.pasted.values()]
            backend = self.app.backend
            files = await in_thread(lambda: find_attachments(text, backend.count_tokens, backend.picture_tokens, known))
            if editing:
                self.conversation.edit(editing, text, files)
                await self.show_conversation()
            else:
                message = self.conversation.ask(text, files)
                await self.transcript.append(message)
        except LocalLLMError as error:
            self.editing = editing
            self.prompt.give_back(text)
            self.show_error(str(error))
            return
        self.title_bar.title = self.conversation.title
        await self.answer()

    def begin_answer(self, view: "AnswerView | None" = None) -> None:
        """Start `answer` beside everything else."""
        self._begin(partial(self.answer, view))

    def _begin(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        async def whole() -> None:
            try:
                await work()
            finally:
                self._begun = False
                self.refresh_bindings()

        self._begun, self._stopping = True, False
        self._work = self.run_worker(whole)

    async def stop(self) -> None:
        """Stop the answer on its way and wait until it is saved; one that waits for its model waits no longer."""
        self._stopping = True
        if self._answer:
            self._answer.cancel()
        if self._work:
            await self._work.wait()

    async def answer(self, view: "AnswerView | None" = None) -> None:
        """Let the model answer what is shown; with a view, continue its cut answer."""
        facts = self.status_line.facts
        facts.answering, facts.speed, facts.progress = True, 0.0, None
        self.status_line.redraw()
        self.refresh_bindings()
        continues = view is not None
        try:
            if view is None:
                view = cast("AnswerView", await self.transcript.append(self.conversation.begin_answer()))
            view.message.finish_reason = None
            self._writing = view.message
            sees = (await self._model_loaded()).sees
            unseen = () if sees else self.conversation.picture_names
            request = self.conversation.request(continues, sees)
            self._answer = await in_thread(lambda: self.app.backend.submit(request))
            if self._stopping:
                self._answer.cancel()
            update = await follow(self._answer, view, self.conversation, facts, self.latency, self.status_line.redraw)
            note_end(view, update, unseen)
        except LocalLLMError as error:
            if view is None:
                self.show_error(str(error))
                return
            view.message.error = str(error)
            view.message.finish_reason = FinishReason.ERROR
        finally:
            if self._answer:
                self._answer.cancel()
            self._answer = self._writing = None
            facts.answering, facts.progress = False, None
            self.status_line.redraw()
            self.refresh_bindings()
        await self._end_answer(view)

    async def _model_loaded(self) -> ModelInfo:
        """Wait for a model that is on its way. Raises RequestError if it does not come or nobody waits any more."""
        while self.loader.busy and not self._stopping:
            await asyncio.sleep(FLUSH_S)
        if self.info is None:
            raise RequestError("No model is loaded. /models chooses one, /regenerate asks it again.")
        return self.info

    async def _end_answer(self, view: "AnswerView") -> None:
        await view.finish()
        try:
            self.conversation.save(view.message)
            view.show_end(self.conversation.variant(view.message))
        except LocalLLMError as error:
            self.show_error(str(error))
            return
        info = self.info
        if view.message.finish_reason == FinishReason.STOP and info and info.converses and info.titles:
            self.run_worker(self._make_title(), exclusive=True, group="title")

    async def _make_title(self) -> None:
        """Ask the model for a title. It stays the first prompt's words if anything is in the way."""
        request, session_id = self.conversation.title_request(), self.conversation.session_id
        if request is None or session_id is None:
            return
        try:
            answer = await in_thread(lambda: self.app.backend.submit(request))
            text = ""
            while True:
                if events := answer.poll():
                    update = merged(events)
                    text += update.content
                    if update.finish_reason is not None:
                        break
                await asyncio.sleep(0.1)
            title = " ".join(harmless(text).split()).strip("\"'*#.")[:60]
            if update.finish_reason == FinishReason.STOP and title:
                self.conversation.store.rename(session_id, title)
        except LocalLLMError as error:
            self.log.warning(str(error))
        self.title_bar.title = self.conversation.title

    def action_stop(self) -> None:
        """Stop the answer, else the load."""
        if self._answer:
            self._answer.cancel()
        elif self.loader.busy:
            self.loader.stop()
        else:
            self._stopping = True
        self.prompt.focus()

    def action_back(self) -> None:
        """Leave what is being done and go back to the prompt; close what stands below the messages."""
        self.transcript.query(Note).remove()
        if self.editing:
            self.editing = None
            self.prompt.empty()
            self.notify("Editing was given up.")
        self.prompt.focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Stop is offered while there is something to stop, Back while there is somewhere to go back from."""
        at_work = self.busy or self.loader.busy
        if action == "stop":
            return at_work
        if action == "back":
            away = self.editing is not None or self.focused is not self.prompt
            return not at_work and (away or bool(self.transcript.query(Note)))
        return True

    def action_scroll(self, pages: int) -> None:
        """Scroll the messages from anywhere."""
        if pages < 0:
            self.transcript.scroll_page_up(animate=False)
        else:
            self.transcript.scroll_page_down(animate=False)

    def action_select(self, step: int) -> None:
        """Give the focus to the next message up or down; past the last one it goes back to the prompt."""
        views = self.transcript.views
        index = views.index(self.focused) if isinstance(self.focused, MessageView) else len(views)
        index = max(index + step, 0)
        if index < len(views):
            views[index].focus()
        else:
            self.prompt.focus()

    async def action_variant(self, step: int) -> None:
        """Show another variant of the selected message, and what followed it."""
        view = self.selected()
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

    def selected(self, role: Role | None = None) -> MessageView | None:
        """The message that has the focus, else the last one of this role."""
        views = [view for view in self.transcript.views if role is None or view.message.role is role]
        if isinstance(self.focused, MessageView) and self.focused in views:
            return self.focused
        return views[-1] if views else None

    def load_model(self, name: str) -> None:
        """Load another model; the conversation stays."""
        if self._answer:
            self._answer.cancel()
        self.loader.begin(name)

    def keep_answer(self) -> None:
        """Store the answer on its way as far as it has come: the program is about to end."""
        if self._writing is None:
            return
        message, self._writing = self._writing, None
        message.finish_reason = FinishReason.CANCELLED
        try:
            self.conversation.save(message)
        except LocalLLMError as error:  # nobody is left who could be told on the screen
            self.log.error(str(error))

    def show_error(self, text: str) -> None:
        """Say what is wrong, and what to do, where the user looks."""
        self.run_worker(self.transcript.note(Note(text, failure=True)))

    def show_note(self, content: Content) -> None:
        """Show something that is no part of the conversation."""
        self.run_worker(self.transcript.note(Note(content)))

    def _remember(self, text: str) -> None:
        try:
            self.conversation.store.add_prompt(text)
        except LocalLLMError as error:
            self.show_error(str(error))

    def _measure(self) -> None:
        if self.info:
            self.status_line.facts.memory = self.app.backend.memory_bytes()
            self.status_line.redraw()

    def on_markdown_link_clicked(self, event: "Markdown.LinkClicked") -> None:
        """A link that a model wrote is copied, never opened."""
        self.app.copy_to_clipboard(event.href)
        self.notify(f"Copied {harmless(event.href)}", markup=False)
