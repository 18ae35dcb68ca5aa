"""The view of a chat: title bar, messages, prompt and status line. Loader, tools and tabs act on it."""

import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.events import Key, Paste
from textual.message import Message
from textual.reactive import var
from textual.screen import Screen

from localllm.chats import PASTED, Attachment
from localllm.chats.conversation import Conversation
from localllm.errors import LocalLLMError
from tui.attachments import Weight
from tui.backend import Backend
from tui.widgets.completion import Suggestion
from tui.widgets.find import FindBar
from tui.widgets.frame import KeyBar, Note, Notice, Queue, Row, StatusLine, TabMark, TitleBar
from tui.widgets.pictures import Previews
from tui.widgets.prompt import Prompt
from tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from gguf_io.media import View


@dataclass
class Pictured(Message):
    """The draft's pictures, or what the model will see of them, are known: captions and files."""

    pictures: Sequence[tuple[str, bytes]]


class TabChanged(Message):
    """A chat's title or state has changed."""


class ChatView(Screen[None]):
    """A conversation and its widgets.

    busy: an answer or a summary is running, from the moment it was requested. asking: an approval dialog is open,
    perhaps in a hidden tab. unread: an answer has ended while another tab was visible.
    """

    AUTO_FOCUS = "#prompt"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "scroll(-1)", "Page up", id="scroll.up", show=False, priority=True),
        Binding("pagedown", "scroll(1)", "Page down", id="scroll.down", show=False, priority=True),
        Binding("ctrl+up", "select(-1)", "Earlier message", id="message.earlier", show=False, priority=True),
        Binding("ctrl+down", "select(1)", "Later message", id="message.later", show=False, priority=True),
    ]
    busy = var(False, init=False, bindings=True)
    asking = var(False, init=False)

    def __init__(
        self,
        conversation: Conversation,
        backend: Backend,
        mode: str,
        commands: Sequence[Suggestion],
        weigh: Callable[[str], Weight | None],
        newline: str,
    ) -> None:
        """mode: the application mode whose base screen this is. commands, weigh, newline: of the prompt."""
        super().__init__()
        self.conversation = conversation
        self.backend = backend
        self.mode = mode
        self.transcript = Transcript(conversation)
        self.find = FindBar(self.transcript)
        self.prompt = Prompt(commands, backend.count_tokens, weigh, newline)
        self.notice = Notice()
        self.queue = Queue()
        self.previews = Previews()
        self.status_line = StatusLine()
        self.title_bar = TitleBar()
        self.unread = False
        self.stopping = threading.Event()  # set when the user stops the running work

    def compose(self) -> ComposeResult:
        yield self.title_bar
        yield self.transcript
        with Vertical(id="entry"):
            yield self.prompt.completion
            yield self.notice
            yield self.find
            yield self.queue
            yield self.previews
            yield self.prompt
        yield self.status_line
        yield KeyBar()

    def watch_busy(self) -> None:
        self.post_message(TabChanged())
        self.prompt.weigh_again()

    def watch_asking(self) -> None:
        self.post_message(TabChanged())

    def mark(self) -> TabMark:
        """The tab's title, and whether the chat asks for approval, answers, has an unread answer, or has a draft."""
        states = (
            (self.asking, "?", "$warning"),
            (self.busy, "●", "$accent"),
            (self.unread, "✔", "$success"),
            (bool(self.prompt.text.strip()), "✎", ""),
        )
        sign, style = next(((sign, style) for holds, sign, style in states if holds), ("", ""))
        return TabMark(self.title_bar.title, sign, style)

    def show_title(self) -> None:
        """Show the current title and tags."""
        self.title_bar.show_title(self.conversation.title, self.conversation.tags)
        self.post_message(TabChanged())

    async def show_conversation(self) -> None:
        """Redraw the conversation, scrolled to its end. Ends an edit whose message is no longer part of it."""
        self.show_title()
        self.find.shut()
        editing = self.prompt.editing
        if editing and editing.id not in [message.id for message in self.conversation.messages]:
            self.prompt.free_edit()
        await self.transcript.show()
        self.prompt.weigh_again()

    def see_picture(self, data: bytes) -> "View | None":
        """What the model will see of a picture within this chat's budget; see Backend.see_picture."""
        parameters = self.conversation.parameters
        return self.backend.see_picture(data, parameters.image_min_tokens, parameters.image_max_tokens)

    def pasted(self) -> list[Attachment]:
        """The long texts that were pasted into this chat."""
        sent = [file for message in self.conversation.messages for file in message.attachments]
        return [*(file for file in sent if PASTED.fullmatch(file.name)), *self.prompt.pasted.values()]

    async def attempt(self, work: Awaitable[None]) -> None:
        """Await work; its error is shown in the chat."""
        try:
            await work
        except LocalLLMError as error:
            self.show_error(str(error))

    def show_error(self, text: str) -> None:
        """Show an error below the messages."""
        self.transcript.show_error(text)

    def show_note(self, content: Content | str | Sequence[Row]) -> None:
        """Show a note that is not part of the conversation."""
        self.run_worker(self.transcript.note(Note(content)))

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

    async def on_pictured(self, event: Pictured) -> None:
        await self.previews.show(event.pictures)

    def on_prompt_queue_changed(self) -> None:
        self.queue.show(self.prompt.queued)

    def on_prompt_wanted(self, event: Prompt.Wanted) -> None:
        """Handle vim normal-mode commands that search or scroll the messages."""
        transcript, lines = self.transcript, self.transcript.size.height // 2
        if event.what == "find":
            self.find.open(then=self.prompt)
        elif event.what.startswith("find-"):
            self.find.action_step(1 if event.what == "find-next" else -1)
        elif event.what in ("first", "last"):
            (transcript.scroll_home if event.what == "first" else transcript.scroll_end)(animate=False)
        else:
            step = {"down": 1, "up": -1, "half-down": lines, "half-up": -lines}[event.what]
            transcript.scroll_relative(y=step, animate=False)

    def action_scroll(self, pages: int) -> None:
        scroll = self.transcript.scroll_page_up if pages < 0 else self.transcript.scroll_page_down
        scroll(animate=False)

    def action_select(self, step: int) -> None:
        """Focus the next message up or down; past the last one, focus the prompt."""
        if not self.transcript.select(step):
            self.prompt.focus()
