"""The chat screen: sends what the user asks, and has the model answer it."""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.worker import Worker

from gguf_io.media import PictureView, is_sound
from localllm.background import in_thread
from localllm.chats import OUTPUT, Attachment, Role
from localllm.chats import Message as ChatMessage
from localllm.chats.conversation import Conversation
from localllm.chats.parameters import Parameters
from localllm.engine.request import Counts, FinishReason
from localllm.errors import LocalLLMError
from tui.answering import make_title
from tui.attachments import FileWeight, MissingFileError, Weight, named_files, text_file, weigh
from tui.backend import Backend, LoadedInfo, short_name
from tui.screens.chat_view import ChatView, Pictured
from tui.screens.folder import ChatFolder
from tui.screens.loading import ChatLoader
from tui.screens.tabs import Tabs
from tui.screens.tools import ChatTools
from tui.screens.writing import AnswerWriter
from tui.status import Latency
from tui.widgets.completion import Suggestion
from tui.widgets.frame import Note, key_names
from tui.widgets.messages import AnswerView, MessageView

MEMORY_EVERY_S = 2.0
LEAST_TOLD = 64  # tokens that a next message computes besides its own text


def _draft(text: str, attached: Iterable[Attachment] = ()) -> ChatMessage:
    """A message that is not stored."""
    return ChatMessage(0, 0, None, Role.USER, text, attachments=tuple(attached))


def command_in(text: str) -> str:
    """The shell command that a text asks for, as in "!ls"; "" for none. "![" begins a picture in Markdown."""
    return text[1:].strip() if text.startswith("!") and not text.startswith("![") else ""


@dataclass
class Answered(Message):
    """An answer has ended for any reason. title: the conversation's title."""

    title: str


class ChatScreen(ChatView):
    """Owns the running answer; `tui.commands` act through its public methods."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", id="stop", priority=True),
        Binding("escape", "back", "Back", id="back", priority=True),
    ]

    def __init__(
        self,
        conversation: Conversation,
        backend: Backend,
        loader: ChatLoader,
        tabs: "Tabs[ChatScreen]",
        mode: str,
        pull: bool,
        keys: Mapping[str, str],
        commands: Sequence[Suggestion],
    ) -> None:
        """pull: whether to pull the first model if it is not on this machine. keys: the user's key bindings by id."""
        newline = key_names(keys.get("prompt.newline", "ctrl+j")).partition(",")[0]
        super().__init__(conversation, backend, mode, commands, self._weigh, newline)
        self.loader = loader
        self.tabs = tabs
        self.keys = keys
        self.latency = Latency()
        self.deleted: int | None = None
        self._pull = pull
        self._weights: dict[Attachment, FileWeight] = {}  # of what is attached to the draft
        self.tools = ChatTools(self)
        self.folder = ChatFolder(self)
        self.writer = AnswerWriter(self, loader, self.tools, self.latency)
        self._missing = ""  # a text that was rejected because it names missing files; resending it is accepted
        self._work: Worker[None] | None = None

    async def on_mount(self) -> None:
        self.prompt.sent = self.conversation.store.prompts()
        self.prompt.use_vim(self.conversation.store.remembered("vim") == "on")
        self.prompt.focus()
        await self.show_conversation()
        self.set_interval(MEMORY_EVERY_S, self._measure)
        self.loader.join(self, self._pull)

    def on_unmount(self) -> None:
        """Save the partial answer and free all resources."""
        self.loader.leave(self)
        self.writer.keep()
        self.stopping.set()
        self.tools.close()
        self.folder.close()

    @property
    def info(self) -> LoadedInfo | None:
        """The current model; None while one is loading."""
        return None if self.loader.busy else self.backend.info

    def set_parameters(self, parameters: Parameters) -> None:
        """Change the parameters of the next answers, and show what that costs."""
        self.conversation.set_parameters(parameters)
        self._weights.clear()  # a picture may have another budget
        self.prompt.weigh_again()

    def _weigh(self, text: str) -> Weight | None:
        """What a draft weighs and its answer costs; while a message is selected, what editing or regenerating it costs.

        Without a draft, the cost of the next message, if that is more than usual. Runs in a thread.
        """
        editing, selected = self.prompt.editing, self.focused
        known = [*(editing.attachments if editing else ()), *self.pasted()]
        files = [] if text.startswith("/") else named_files(text, known)
        self._show_pictures(files)
        if isinstance(selected, MessageView):
            message = selected.message
            if message.role is Role.TOOL:
                return None
            is_answer = message.role is Role.ASSISTANT
            cost = self._cost(None if is_answer else message, message)
            return Weight(0, cost=cost, without="regenerating" if is_answer else "an edit") if cost else None
        if text.startswith("/"):
            return None
        if not text.strip():
            cost = self._cost(_draft(""), None)
            told = cost is not None and cost.prompt - cost.cached >= LEAST_TOLD
            return Weight(0, cost=cost, without="the next message") if told else None
        info = self.backend.info
        context = self.conversation.parameters.ctx or (info.context if info else None)
        try:
            weight = weigh(text, files, context, self.backend.count_tokens, self.see_picture, self._weights)
        except LocalLLMError:  # sending it says why a picture cannot be read
            return None
        self._show_pictures(files)
        return weight and replace(weight, cost=self._cost(_draft(text.strip(), files), editing))

    def _caption(self, file: Attachment) -> str:
        """A picture's name, and what the model will see of it, if that is known."""
        view = self._weights.get(file)
        if not isinstance(view, PictureView):
            return file.label
        return f"{file.label} · {view.tokens:,} tokens\n{view.sizes}"

    def _show_pictures(self, files: Sequence[Attachment]) -> None:
        """Show the draft's pictures, with what the model will see of them where that is known. Runs in a thread."""
        found = [(file, file.picture_data()) for file in files if file.picture]
        self.post_message(Pictured([(self._caption(file), data) for file, data in found if not is_sound(data)]))

    def _cost(self, draft: ChatMessage | None, replaced: ChatMessage | None) -> Counts | None:
        """What the answer to a draft would reuse and compute, or another answer; None if unknown or the chat is empty.

        See Conversation.draft_request. It is unknown while an answer is running, and for questions to a folder, whose
        excerpts are found when they are sent.
        """
        conversation, info, tools = self.conversation, self.info, self.tools.offered_already()
        if self.busy or not conversation.messages or conversation.parameters.folder or info is None or tools is None:
            return None
        try:
            request = conversation.draft_request(draft, replaced, info.sees, tools)
            return self.backend.expected_counts(request)
        except LocalLLMError:  # sending it says why it cannot be answered
            return None

    def on_descendant_focus(self) -> None:
        self.prompt.weigh_again()

    def send(self, text: str) -> None:
        """Send a text to the model, or queue it while an answer runs; if neither is possible, put it back."""
        if self.busy and self.prompt.editing:
            self.notify("An answer is still running. Esc stops it.", severity="warning")
        elif self.busy:
            self.prompt.queue(text.rstrip())
            return
        elif command := command_in(text):
            self.remember_prompt(text.strip())
            self.begin(partial(self._run_command, text.strip(), command))
            return
        elif self.info is None and not self.loader.busy:
            self.show_error("No model is loaded yet. /models chooses one.")
        else:
            self.remember_prompt(text.strip())
            self.begin(partial(self._send, text.strip()))
            return
        self.prompt.give_back(text)

    def remember_prompt(self, text: str) -> None:
        self.prompt.accept(text)
        self._store_prompt(text)

    def take_over(self, texts: Sequence[str], pasted: Mapping[str, Attachment]) -> None:
        """Add texts that were written elsewhere and not sent to the history."""
        self.prompt.pasted |= pasted
        for text in texts:
            self.prompt.keep(text)
            self._store_prompt(text)

    def _store_prompt(self, text: str) -> None:
        try:
            self.conversation.store.add_prompt(text)
        except LocalLLMError as error:
            self.show_error(str(error))

    async def _send(self, text: str) -> None:
        editing = self.prompt.editing
        try:
            known = [*(editing.attachments if editing else ()), *self.pasted()]
            files = await self.folder.attachments(text, known, strict=text != self._missing)
            if editing:
                unnamed = [
                    file
                    for file in editing.attachments
                    if not (file.line or file.name == OUTPUT or file.name in editing.content)
                ]
                self.conversation.edit(editing, text, (*unnamed, *files))
                self.prompt.end_edit()
                await self.show_conversation()
            else:
                message = self.conversation.ask(text, files)
                await self.transcript.append(message)
        except LocalLLMError as error:
            self._missing = text if isinstance(error, MissingFileError) else ""
            self.prompt.give_back_queue()
            self.prompt.give_back(text)
            self.show_error(str(error))
            return
        self.show_title()
        await self.answer()

    async def _run_command(self, text: str, command: str) -> None:
        """Run the user's command; its output becomes part of the conversation, before the next prompt."""
        try:
            output = await self.tools.run_command(command)
            if output is None:
                self.prompt.give_back_queue()
                self.prompt.give_back(text)
                self.notify("The command was not run.")
                return
            file = await in_thread(lambda: text_file(OUTPUT, output, self.backend.count_tokens))
            if editing := self.prompt.editing:
                self.conversation.edit(editing, text, (file,))
                self.prompt.end_edit()
                await self.show_conversation()
            else:
                await self.transcript.append(self.conversation.ask(text, (file,)))
                self.tools.keep_approvals()
        except LocalLLMError as error:
            self.prompt.give_back_queue()
            self.prompt.give_back(text)
            self.show_error(str(error))
        self.show_title()

    def begin_answer(self, view: AnswerView | None = None) -> None:
        self.begin(partial(self.answer, view))

    def begin(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run work that occupies the model; it should end when Esc sets `stopping`."""

        async def whole() -> None:
            try:
                await work()
            finally:
                self.busy = False
            self._send_queued()

        self.busy = True
        self.stopping.clear()
        self._work = self.run_worker(whole)

    def _send_queued(self) -> None:
        """Send the next queued prompt; after an answer that was stopped or failed, the user decides about them all."""
        if not self.prompt.queued or not self.is_running:
            return
        last = self.conversation.messages[-1] if self.conversation.messages else None
        failed = last is not None and last.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR)
        if failed or self.stopping.is_set():
            self.prompt.give_back_queue()
        else:
            self.send(self.prompt.unqueue(0))

    async def stop(self) -> None:
        """Stop the running answer, even while it waits for its model to load, and wait until it is saved."""
        self.stopping.set()
        self.writer.cancel()
        self.workers.cancel_group(self, "title")
        asking, shown = self.asking, self.tabs.current
        if asking:
            await self.tabs.show(self)  # only a visible dialog can be dismissed
        if self._work:
            await self._work.wait()
        if asking:
            await self.tabs.show(shown)

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
        message = await self.tools.answer(self.writer.write, view)
        self.unread = self.tabs.current is not self
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

    async def load_model(self, name: str) -> None:
        """Load another model for all tabs; conversations stay. If answers are running, ask first: they are stopped."""

        async def load() -> None:
            for chat in self.tabs.all:
                chat.writer.cancel()
            self.loader.begin(name, self)

        await self.unless_busy(f"Load {short_name(name)}?", load, self.tabs.all)

    async def unless_busy(
        self, question: str, work: Callable[[], Coroutine[None, None, None]], tabs: "Sequence[ChatScreen] | None" = None
    ) -> None:
        """Do work that stops the running answers of this tab, or of the given ones; if there are any, ask first."""
        from tui.screens.question import QuestionScreen

        def chosen(sure: bool | None) -> None:
            if sure:
                self.app.run_worker(self.attempt(work()))  # not the chat's worker: stopping it would stop this too

        # Answers that wait for their model have no text yet, and go on with the next model.
        count = 0 if self.loader.busy else sum(tab.busy for tab in (tabs or [self]))
        if not count:
            await work()
            return
        running = "An answer is" if count == 1 else f"{count} answers are"
        screen = QuestionScreen(
            f"{question} {running} still running.", "Let it finish", "Stop it; the text so far is kept"
        )
        self.app.push_screen(screen, chosen)

    def action_stop(self) -> None:
        self.stop_work()
        self.prompt.focus()

    def action_back(self) -> None:
        """Close notes and the find bar, abandon an edit, and return to the prompt."""
        self.transcript.query(Note).remove()
        self.find.shut()
        if self.prompt.editing:
            self.prompt.end_edit(abandoned=True)
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
            away = self.prompt.editing is not None or self.focused is not self.prompt
            return finding or (not at_work and (away or bool(self.transcript.query(Note))))
        if action == "variant":
            view = self.transcript.selected()
            return view is not None and view.variant[1] > 1
        return True

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

    def _measure(self) -> None:
        facts = self.status_line.facts
        facts.unsaved = bool(self.conversation.store.unsaved)
        if self.info:
            facts.memory = self.backend.memory_bytes()
        if facts.answering:
            facts.silent_s = self.writer.silent_s
        self.status_line.redraw()
